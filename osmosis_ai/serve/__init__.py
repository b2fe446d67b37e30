"""Serve an agent to a trainer, with rollouts in worker processes."""
