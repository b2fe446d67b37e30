"""The inside of a worker process, the only place that imports user code."""
