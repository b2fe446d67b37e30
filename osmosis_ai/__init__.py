"""Osmosis: a local rollout runtime for repositories of MCP tools, reward functions and rubrics.

The public names are loaded when they are first used, so that a repository's `from osmosis_ai import osmosis_reward`
costs milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from osmosis_ai.errors import MissingAPIKeyError, ModelNotFoundError, OsmosisError, ProviderRequestError
    from osmosis_ai.reward_fn.decorator import osmosis_reward
    from osmosis_ai.reward_rubric.decorator import osmosis_rubric
    from osmosis_ai.reward_rubric.judge import RewardRubricRunResult, aevaluate_rubric, evaluate_rubric

__all__ = [
    "MissingAPIKeyError",
    "ModelNotFoundError",
    "OsmosisError",
    "ProviderRequestError",
    "RewardRubricRunResult",
    "__version__",
    "aevaluate_rubric",
    "evaluate_rubric",
    "osmosis_reward",
    "osmosis_rubric",
]

__version__ = "0.4.0"

_HOMES = {
    "MissingAPIKeyError": "osmosis_ai.errors",
    "ModelNotFoundError": "osmosis_ai.errors",
    "OsmosisError": "osmosis_ai.errors",
    "ProviderRequestError": "osmosis_ai.errors",
    "RewardRubricRunResult": "osmosis_ai.reward_rubric.judge",
    "aevaluate_rubric": "osmosis_ai.reward_rubric.judge",
    "evaluate_rubric": "osmosis_ai.reward_rubric.judge",
    "osmosis_reward": "osmosis_ai.reward_fn.decorator",
    "osmosis_rubric": "osmosis_ai.reward_rubric.decorator",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
