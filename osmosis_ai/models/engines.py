"""The table of engines, one for each way to call a model. To add one, write a file with an `ENGINE` and a line here.

Imports nothing heavy, because it is read before the rest of the package is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from osmosis_ai.models.offline import OFFLINE_MODELS

if TYPE_CHECKING:
    from osmosis_ai.models.host import Engine
    from osmosis_ai.records import ModelSpec

__all__ = ["ENGINES", "EngineInfo", "banner_of", "engine_for", "load_engine"]


class EngineInfo(NamedTuple):
    """The facts about an engine that are known without importing it.

    Attributes:
        name: The value of `ModelSpec.engine`.
        module: The module that defines its `ENGINE`.
        prefix: Names of its models begin with this and a slash; an empty one takes every name that no other takes, None
            takes none.
        at_base_url: True if it calls the models at `--base-url`, whatever their names.
        stand_in: True if its models are only stand-ins, whose scores say nothing about a real model.
        models: The only names it knows, each with the banner that every report must show; empty for any name.
        preload: The module to import in the process that workers are forked from, empty for none.
    """

    name: str
    module: str
    prefix: str | None = None
    at_base_url: bool = False
    stand_in: bool = False
    models: Mapping[str, str] = {}
    preload: str = ""


ENGINES: dict[str, EngineInfo] = {
    info.name: info
    for info in (
        EngineInfo(
            "offline",
            "osmosis_ai.models.offline.engine",
            prefix="offline",
            stand_in=True,
            models=OFFLINE_MODELS,
            preload="osmosis_ai.models.offline.engine",
        ),
        EngineInfo(
            "openai_compatible", "osmosis_ai.models.endpoint", at_base_url=True, preload="osmosis_ai.models.endpoint"
        ),
        EngineInfo("policy", "osmosis_ai.models.policy.engine", preload="osmosis_ai.models.policy.engine"),
        EngineInfo("recorded", "osmosis_ai.models.cassette"),
        EngineInfo("litellm", "osmosis_ai.models.litellm", prefix="", preload="osmosis_ai.models.preload_litellm"),
    )
}
"""Every engine by its name. The first one that takes a model's name calls that model."""


def engine_for(model: str, *, base_url: bool) -> EngineInfo:
    """Return the engine for a model's name as in `--model`; `base_url` is True if `--base-url` is given."""
    prefixes = (model.partition("/")[0], "")
    return next(info for info in ENGINES.values() if (info.at_base_url if base_url else info.prefix in prefixes))


def load_engine(spec: ModelSpec) -> Engine:
    """Import the engine of a model."""
    engine: Engine = import_module(ENGINES[spec.engine].module).ENGINE
    return engine


def banner_of(spec: ModelSpec) -> str | None:
    """Return the banner that every report must show for a model; None for a real one."""
    return ENGINES[spec.engine].models.get(spec.model)
