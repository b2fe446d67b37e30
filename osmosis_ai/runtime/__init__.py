"""Run rollouts: the worker processes, the pool that feeds them, runs, and watch mode."""
