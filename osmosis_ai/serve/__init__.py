"""An agent loop offered to a trainer, run in workers."""
