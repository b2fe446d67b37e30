"""Rows of a dataset, whatever file they are in."""
