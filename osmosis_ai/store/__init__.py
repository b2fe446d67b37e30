"""The run store: every run, rollout and score of a repository, in `.osmosis/runs.db`."""
