"""The fork server that workers come from. It takes a second to import what they need, so it is started first of all."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence

__all__ = ["available", "start_early"]

PRELOAD = ["osmosis_ai.runtime.preload"]
NO_RUNS = (["rubric"], ["submit"], ["list"], ["info"], ["stop"])
"""Subcommands of `eval`."""


def available() -> bool:
    """Whether this system has one; where it doesn't, every worker is a new interpreter."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def start() -> None:
    """Start it, if it doesn't run already; returns at once while it goes on importing."""
    from multiprocessing import forkserver, resource_tracker

    forkserver.set_forkserver_preload(PRELOAD)
    # Before the signal is blocked, because its start unblocks it.
    resource_tracker.ensure_running()
    # Ctrl-C is for the command to handle; the server ignores it, but not before it has imported how.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_early(arguments: Sequence[str]) -> None:
    """Start it when this command line is sure to need workers, while the command itself is still to be imported.

    Args:
        arguments: The command line without the command's own name.
    """
    text = " ".join(arguments).replace("=", " ")
    runs = arguments[:1] and arguments[0] in {"test", "eval", "serve"} and arguments[1:2] not in NO_RUNS
    if runs and "--workers 0" not in text and not {"--help", "-h"} & set(arguments) and available():
        start()
