"""Running rollouts."""
