"""Runs and rollouts in the browser: pages over the run store, which they only read."""
