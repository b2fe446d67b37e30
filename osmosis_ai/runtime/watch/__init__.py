"""Runs that follow a repository: what a save makes stale is done again."""
