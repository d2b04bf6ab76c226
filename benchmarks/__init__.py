"""Measurements that take longer than tests may, or whose result is a figure; each says how to run it."""
