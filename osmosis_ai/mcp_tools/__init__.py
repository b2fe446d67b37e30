"""The repository's tools, as the model sees and calls them. Runs only inside workers."""
