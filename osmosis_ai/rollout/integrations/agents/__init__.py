"""Agent frameworks: `strands` and `openai_agents`."""
