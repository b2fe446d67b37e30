"""Serve the repository's tools to the model. Runs only inside workers."""
