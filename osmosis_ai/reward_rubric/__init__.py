"""LLM-as-judge scores: rubric functions, rubric files, and the judges behind them."""
