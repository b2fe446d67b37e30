"""Judge records with a repository's own @osmosis_rubric function, which, like all user code, runs in workers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from osmosis_ai.config import LimitsConfig
from osmosis_ai.errors import ScoreError
from osmosis_ai.masking import Masker
from osmosis_ai.records import Failure, FunctionRef, Row
from osmosis_ai.reward_rubric.data import RubricRecord
from osmosis_ai.reward_rubric.evaluation import Answer, Judge
from osmosis_ai.reward_rubric.judge import current_attempt
from osmosis_ai.runtime.pool.backends import open_pool
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.run.prepare import scorer_spec
from osmosis_ai.runtime.run.scoring import score_conversations

__all__ = ["function_judge"]

# Columns passed to a function as arguments of their own, not in `extra_info`.
_OWN = frozenset({"solution_str", "ground_truth", "rubric_id", "extra_info"})


@asynccontextmanager
async def function_judge(ref: FunctionRef, limits: LimitsConfig, options: PoolOptions) -> AsyncIterator[Judge]:
    """Load a rubric function into workers, and yield a judge that calls it; raise StartError if it can't be loaded."""
    masker = Masker.from_environment(os.environ, options.keys)
    async with open_pool(scorer_spec(Path(ref.root), [ref], limits), options) as pool:

        async def judge(record: RubricRecord) -> Answer:
            conversation = (_row(record), _conversation(record))
            ((score,),) = await score_conversations(
                pool, masker, [conversation], [ref.name], first_attempt=current_attempt()
            )
            if score.value is None:
                raise _failed(score.failure)
            calls = [msgspec.to_builtins(msgspec.structs.replace(call, prompt=[])) for call in score.judge_calls]
            return Answer(score.value, score.explanation, calls or None)

        yield judge


def _row(record: RubricRecord) -> Row:
    columns = {name: value for name, value in record.values.items() if name not in _OWN}
    extra = {**(record.extra_info or {}), **columns}
    return Row(record.index, str(record.index), "", record.original_input or "", record.ground_truth, extra)


def _conversation(record: RubricRecord) -> list[dict[str, str]]:
    asked = [{"role": "user", "content": record.original_input}] if record.original_input is not None else []
    return [*asked, {"role": "assistant", "content": record.solution_str}]


def _failed(failure: Failure | None) -> ScoreError:
    if failure is None:
        return ScoreError("the function returned no score")
    place = f"{failure.file}:{failure.line}: " if failure.file and failure.line else ""
    return ScoreError(f"{place}{failure.message}")
