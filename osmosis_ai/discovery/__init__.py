"""What is in a repository, read from disk without running any of it."""
