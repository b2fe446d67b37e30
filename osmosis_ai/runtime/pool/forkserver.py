"""The fork server that workers come from. It takes a second to import what they need, so it is started first of all."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence

__all__ = ["available", "preloads", "start", "start_early"]

SAFE_PATH = "osmosis_ai.runtime.pool.safe_path"
PRELOAD = "osmosis_ai.runtime.worker.preload"
LITELLM = "osmosis_ai.runtime.worker.preload_litellm"
ENDPOINTS = "osmosis_ai.models.endpoint"
NO_RUNS = (["rubric"], ["submit"], ["list"], ["info"], ["stop"])
"""Subcommands of `eval`."""


def available() -> bool:
    """Whether this system has one; where it doesn't, every worker is a new interpreter."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def start(models: Sequence[str] = ()) -> None:
    """Start it, if it doesn't run already; returns at once while it goes on importing.

    Args:
        models: Modules to import besides, from `preloads`.
    """
    from multiprocessing import forkserver, resource_tracker

    forkserver.set_forkserver_preload([SAFE_PATH, *models, PRELOAD])
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
        start(preloads(arguments, os.environ))


def preloads(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What the models asked for need imported, as far as it shows before `.env` and the command line are read properly.

    Args:
        arguments: The command line without the command's own name.
        environ: The environment.
    """
    options: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name.startswith("--"):
            options[name] = value if sign else " ".join(arguments[index + 1 : index + 2])
    policy = options.get("--model") or environ.get("OSMOSIS_MODEL") or environ.get("OPENAI_API_KEY", "")
    baseline = options.get("--baseline-model", "")
    endpoints = options.keys() & {"--base-url", "--baseline-base-url"}
    litellm = (
        "--rubric" in options
        or ("--base-url" not in options and _is_online(policy))
        or ("--baseline-base-url" not in options and _is_online(baseline))
    )
    return [LITELLM] * litellm + [ENDPOINTS] * bool(endpoints)


def _is_online(model: str) -> bool:
    return bool(model) and not model.startswith("offline/")
