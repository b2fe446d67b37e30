"""LLM-as-judge scores: the decorator of rubric functions."""
