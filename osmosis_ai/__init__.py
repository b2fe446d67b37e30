"""Osmosis: a local rollout runtime for repositories of MCP tools, reward functions and rubrics.

Public names load on first use, so a repository's `from osmosis_ai import osmosis_reward` takes milliseconds.

Example:
    >>> from osmosis_ai import RunConfig, run
    >>> report = run(RunConfig.of(mcp="./mcp", dataset="test_data.jsonl", model="offline/oracle"))
"""

# Type checkers take this for True. `python -m osmosis_ai` hasn't put the working directory last on the path yet, so a
# `typing.py` there would be imported.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from osmosis_ai.config import RunConfig
    from osmosis_ai.current import CurrentRollout, current_rollout, osmosis_setup
    from osmosis_ai.errors import MissingAPIKeyError, ModelNotFoundError, OsmosisError, ProviderRequestError, StartError
    from osmosis_ai.records import Rollout, Score
    from osmosis_ai.reward_fn.decorator import osmosis_reward
    from osmosis_ai.reward_rubric.decorator import osmosis_rubric
    from osmosis_ai.reward_rubric.judge import RewardRubricRunResult, aevaluate_rubric, evaluate_rubric
    from osmosis_ai.runtime.run.report import Report
    from osmosis_ai.runtime.run.session import RunSession, open_run, run

__all__ = [
    "CurrentRollout",
    "MissingAPIKeyError",
    "ModelNotFoundError",
    "OsmosisError",
    "ProviderRequestError",
    "Report",
    "RewardRubricRunResult",
    "Rollout",
    "RunConfig",
    "RunSession",
    "Score",
    "StartError",
    "__version__",
    "aevaluate_rubric",
    "current_rollout",
    "evaluate_rubric",
    "open_run",
    "osmosis_reward",
    "osmosis_rubric",
    "osmosis_setup",
    "run",
]

__version__ = "0.4.0"

_HOMES = {
    "osmosis_ai.config": ("RunConfig",),
    "osmosis_ai.current": ("CurrentRollout", "current_rollout", "osmosis_setup"),
    "osmosis_ai.errors": (
        "MissingAPIKeyError",
        "ModelNotFoundError",
        "OsmosisError",
        "ProviderRequestError",
        "StartError",
    ),
    "osmosis_ai.records": ("Rollout", "Score"),
    "osmosis_ai.reward_fn.decorator": ("osmosis_reward",),
    "osmosis_ai.reward_rubric.decorator": ("osmosis_rubric",),
    "osmosis_ai.reward_rubric.judge": ("RewardRubricRunResult", "aevaluate_rubric", "evaluate_rubric"),
    "osmosis_ai.runtime.run.report": ("Report",),
    "osmosis_ai.runtime.run.session": ("RunSession", "open_run", "run"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULES[name]), name)
    # Cached, so Python calls __getattr__ once per name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
