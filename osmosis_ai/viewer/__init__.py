"""Show runs and rollouts in the browser: pages over the run store, read-only except for verdicts and notes."""
