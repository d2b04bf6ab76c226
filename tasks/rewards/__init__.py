"""Rewards: scorers with verl's signature, how they are run, and the shaping of what they return."""
