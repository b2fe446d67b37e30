"""Reward functions: the decorator, and statistics of scores."""
