"""Start the fork server as soon as the options are known: it takes about as long as the command to get ready."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["preloads", "start_early"]


def start_early(given: Mapping[str, Any]) -> None:
    """Start the fork server for a command that is sure to need workers, before what runs the command is imported."""
    if given.get("workers") != 0:
        from osmosis_ai.runtime.pool import forkserver

        # What is wrong is said by whoever needs a worker.
        with suppress(OSError):
            forkserver.start(preloads(given, os.environ))


def preloads(given: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """The modules that the models asked for need, as far as can be told before `.env` is read."""
    from osmosis_ai.models.engines import ENGINES, engine_for

    asked = [
        (given.get("model") or environ.get("OSMOSIS_MODEL") or environ.get("OPENAI_API_KEY"), given.get("base_url")),
        (given.get("baseline_model"), given.get("baseline_base_url")),
    ]
    engines = [engine_for(model or "", base_url=url is not None) for model, url in asked if model or url is not None]
    if given.get("rubric"):
        engines.append(ENGINES["litellm"])
    return [info.preload for info in ENGINES.values() if info.preload and info in engines]
