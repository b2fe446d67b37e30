"""One run, from what was asked for to its report."""
