"""Start the fork server before anything else is imported: it takes about as long as the command to get ready."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from osmosis_ai.models.engines import ENGINES, engine_for
from osmosis_ai.runtime.pool import forkserver

__all__ = ["preloads", "start_early"]

NO_RUNS = (["rubric"], ["submit"], ["list"], ["info"], ["stop"])
"""Subcommands of `eval`."""


def start_early(arguments: Sequence[str]) -> None:
    """Start the fork server when this command line is sure to need workers, before the command itself is imported.

    Args:
        arguments: The command line without the command's own name.
    """
    text = " ".join(arguments).replace("=", " ")
    runs = arguments[:1] and arguments[0] in {"test", "eval", "serve"} and arguments[1:2] not in NO_RUNS
    if runs and "--workers 0" not in text and not {"--help", "-h"} & set(arguments):
        # What is wrong is said by whoever needs a worker.
        with suppress(OSError):
            forkserver.start(preloads(arguments, os.environ))


def preloads(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The modules that the models asked for need, as far as can be told before `.env` and the options are read.

    Args:
        arguments: The command line without the command's own name.
        environ: The environment.
    """
    options: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name.startswith("--"):
            options[name] = value if sign else " ".join(arguments[index + 1 : index + 2])
    asked = [
        (options.get("--model") or environ.get("OSMOSIS_MODEL") or environ.get("OPENAI_API_KEY"), "--base-url"),
        (options.get("--baseline-model"), "--baseline-base-url"),
    ]
    engines = [engine_for(model or "", base_url=url in options) for model, url in asked if model or url in options]
    if "--rubric" in options:
        engines.append(ENGINES["litellm"])
    return [info.preload for info in ENGINES.values() if info.preload and info in engines]
