"""Show the status line and start the fork server, before the command itself is imported.

The fork server and the command take about as long to get ready.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from osmosis_ai.cli.status import STATUS
from osmosis_ai.compat import COMMANDS

__all__ = ["preloads", "show_status", "start_early"]

STARTING = ("test", "eval", "serve")
"""Commands whose work is done by workers."""
PLATFORM = ("submit", "list", "info", "stop", "retry", "logs", "download")
"""Subcommands of `osmosis eval` that work on a platform."""
WITHOUT_WORKERS = {"--help", "-h", *PLATFORM, *(name.removeprefix("eval ") for name in COMMANDS)}
WAITS = {
    **dict.fromkeys(STARTING, "starting workers"),
    "eval-rubric": "loading the judge",
    "validate": "checking the repository",
    "runs": "opening the run store",
    "view": "opening the run store",
    "cache": "opening the reply cache",
    "preview": "reading the file",
    "config": "reading the options",
    "init": "creating the repository",
}
"""The first thing that each command waits for."""
LOOPS = "osmosis_ai.runtime.worker.agents"
"""The modules that workers need for an agent loop."""
WITHOUT_STATUS = {"--help", "-h", "--quiet", "-q", "--json", "--debug"}
"""Options that go without a status line: help is there at once, and --debug fills stderr itself."""


def show_status(arguments: Sequence[str]) -> None:
    """Show what this command line waits for first, unless it asks for quiet output."""
    command = COMMANDS.get(" ".join(arguments[:2]), arguments[0] if arguments else "")
    if command not in WAITS:
        return
    if not WITHOUT_STATUS & {*arguments}:
        STATUS.turn_on()
    # Also if nothing is shown: --debug prints the times of all waits.
    STATUS.wait_for(WAITS[command])


def start_early(arguments: Sequence[str]) -> None:
    """Start the fork server if this command line certainly needs workers."""
    given = words_after(arguments)
    if arguments and arguments[0] in STARTING and not WITHOUT_WORKERS & {*given} and given.get("--workers") != "0":
        from osmosis_ai.runtime.pool import forkserver

        # The first use of a worker reports the error.
        with suppress(OSError):
            forkserver.start(preloads(given, os.environ))


def words_after(arguments: Sequence[str]) -> dict[str, str]:
    """Map each word of a command line to the next one, which is the value if the word is an option that takes one."""
    words = [word for argument in arguments for word in argument.split("=", 1)]
    return dict(zip(words, [*words[1:], ""], strict=False))


def preloads(given: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Return the modules that models and rollouts need, as far as known before reading `.env` and the options."""
    from osmosis_ai.models.engines import ENGINES, engine_for
    from osmosis_ai.runtime.pool.forkserver import TOOLS, WORKFLOWS

    asked = [
        (given.get("--model") or environ.get("OSMOSIS_MODEL") or environ.get("OPENAI_API_KEY"), "--base-url"),
        (given.get("--baseline-model"), "--baseline-base-url"),
    ]
    engines = [engine_for(model or "", base_url=url in given) for model, url in asked if model or url in given]
    if "--rubric" in given:
        engines.append(ENGINES["litellm"])
    loops = [LOOPS] if "-m" in given or "--module" in given or "OSMOSIS_MODULE" in environ else []
    own_server = "--rollout" in given or given.get("eval") == "run" or "OSMOSIS_ROLLOUT" in environ
    models = [info.preload for info in ENGINES.values() if info.preload and info in engines]
    return [*loops, *models, WORKFLOWS if own_server else TOOLS]
