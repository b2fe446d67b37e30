"""The run store: every run, rollout and score of a repository, in `.osmosis/runs.db`."""

from osmosis_ai.store.queries import (
    Completed,
    FunctionTotals,
    PairedRow,
    Queries,
    RolloutKey,
    RunInfo,
    ScoredRollout,
    SharedRows,
    StoredRollout,
    Unscored,
)
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.store.tables import RunStatus

__all__ = [
    "Completed",
    "FunctionTotals",
    "PairedRow",
    "Queries",
    "RolloutKey",
    "RunInfo",
    "RunStatus",
    "RunStore",
    "ScoredRollout",
    "SharedRows",
    "StoredRollout",
    "Unscored",
]
