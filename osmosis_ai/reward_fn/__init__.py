"""Deterministic scores: the decorator, calling a function on a trajectory, and the statistics of what came out."""
