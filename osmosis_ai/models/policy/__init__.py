"""Policies called with tokens: the engine keeps each rollout's tokens and never tokenises a sampled reply again."""
