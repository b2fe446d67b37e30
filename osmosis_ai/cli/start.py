"""Which of the ways to run a request was asked for."""

from __future__ import annotations

from osmosis_ai.cli.options import RunOptions
from osmosis_ai.errors import UsageError
from osmosis_ai.runtime.run.prepare import RunRequest

__all__ = ["start"]


def start(request: RunRequest, options: RunOptions, *, fail_under: float | None = None) -> int:
    """Run a request once, or again at every save.

    Args:
        request: What to run.
        options: How to show it.
        fail_under: The least mean of every function for exit code 0.

    Returns:
        The exit code.
    """
    if options.watch:
        if options.resume or options.resume_run or options.retry_failed:
            raise UsageError("--watch starts a run of its own; leave out --resume, --resume-run and --retry-failed")
        from osmosis_ai.cli.watch import watch

        return watch(request, options)
    from osmosis_ai.cli.execute import execute

    return execute(request, options, fail_under=fail_under)
