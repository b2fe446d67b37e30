"""The pool: start worker processes, give them jobs, and find the job to blame when one is lost."""
