"""Find a repository's tools, functions and agent loops on disk without running its code."""
