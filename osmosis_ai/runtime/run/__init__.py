"""One run, from its config to its report."""
