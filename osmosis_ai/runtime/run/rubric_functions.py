"""A repository's own @osmosis_rubric function as the judge of records; like all user code it runs in workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import msgspec

from osmosis_ai.errors import ScoreError
from osmosis_ai.records import Failure, FunctionRef
from osmosis_ai.reward_rubric.data import RubricRecord
from osmosis_ai.reward_rubric.evaluation import Answer, Judge
from osmosis_ai.runtime.pool.pool import PoolOptions, open_pool
from osmosis_ai.runtime.protocol import Limits, ScoreJob, WorkerSpec

__all__ = ["function_judge"]

# Columns that reach a function in other ways than as a column of `extra_info`.
_OWN = frozenset({"solution_str", "ground_truth", "rubric_id", "extra_info"})


@asynccontextmanager
async def function_judge(ref: FunctionRef, limits: Limits, options: PoolOptions) -> AsyncIterator[Judge]:
    """Load a rubric function into workers, and judge records with it.

    Args:
        ref: The function.
        limits: `reward_timeout` is the time for one record, in seconds.
        options: How workers run.

    Raises:
        StartError: The function can't be loaded.
    """
    required = frozenset({ref.name})
    spec = WorkerSpec(root=ref.root, limits=limits, functions=[ref], required=required, batch_size=options.workers)
    async with open_pool(spec, options) as pool:

        async def judge(record: RubricRecord) -> Answer:
            columns = {name: value for name, value in record.values.items() if name not in _OWN}
            job = ScoreJob(
                uuid4().hex,
                messages=_conversation(record),
                row_index=record.index,
                ground_truth=record.ground_truth,
                extra={**(record.extra_info or {}), **columns},
                functions=[ref.name],
            )
            (score,) = await pool.score(job)
            if score.value is None:
                raise _failed(score.failure)
            calls = [msgspec.to_builtins(call) for call in score.judge_calls]
            return Answer(score.value, score.explanation, calls or None)

        yield judge


def _conversation(record: RubricRecord) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": record.original_input}] if record.original_input is not None else []
    return [*asked, {"role": "assistant", "content": record.solution_str}]


def _failed(failure: Failure | None) -> ScoreError:
    if failure is None:
        return ScoreError("the function gave no score")
    place = f"{failure.file}:{failure.line}: " if failure.file and failure.line else ""
    return ScoreError(f"{place}{failure.message}")
