"""A policy that is called with tokens: the engine keeps each rollout's tokens, and never renders a reply again."""
