"""Deterministic scores: the decorator, and the statistics of what came out."""
