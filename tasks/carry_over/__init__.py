"""Carry-over: what of an iteration's trajectories is trained on, carried on or let go, and the books of it."""
