"""Outside a worker process: where workers run, who feeds them, and who is to blame when one is lost."""
