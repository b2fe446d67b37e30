"""Choose the recorded model that a replay uses, without heavy imports."""

from __future__ import annotations

from pathlib import Path

import msgspec

from osmosis_ai.errors import UsageError
from osmosis_ai.models.cassette import recorded_models
from osmosis_ai.records import ModelSpec

__all__ = ["recorded_model", "replay_of"]


def recorded_model(path: Path, name: str | None) -> str | None:
    """Return the model that a run names, else the only one in a cassette, else None; raise UsageError for several."""
    if name:
        return name
    names = recorded_models(path)
    if len(names) > 1:
        raise UsageError(f"{path} has recordings of several models; name one with --model: {', '.join(names)}")
    return names[0] if names else None


def replay_of(spec: ModelSpec, name: str | None, path: Path) -> ModelSpec:
    """Return the recordings of a model in its place; a stand-in stays, because it needs none.

    `name` is the model as the run names it, which at an endpoint has no provider. Raises UsageError if it isn't
    recorded.
    """
    if spec.stand_in:
        return spec
    names = recorded_models(path)
    model = name if name is not None and name in names else spec.model
    if model not in names:
        there = f"it has {', '.join(names)}" if names else "it has none"
        raise UsageError(f"{path} has no recordings of {model}: {there}; record them with --record, or change --model")
    return msgspec.structs.replace(spec, name=model, model=model, engine="recorded", api_key=None)
