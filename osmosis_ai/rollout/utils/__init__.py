"""Helpers that workflows import."""
