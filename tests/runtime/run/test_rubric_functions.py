"""A repository's own rubric function judges records, in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from osmosis_ai.config import LimitsConfig
from osmosis_ai.discovery.repository import Repository
from osmosis_ai.errors import FunctionError, ScoreError
from osmosis_ai.records import FunctionRef
from osmosis_ai.reward_rubric.data import RubricRecord
from osmosis_ai.reward_rubric.evaluation import Answer
from osmosis_ai.reward_rubric.resolve import resolve_rubrics
from osmosis_ai.runtime.pool.base import PoolOptions
from osmosis_ai.runtime.run.rubric_functions import function_judge

pytestmark = pytest.mark.anyio

RUBRICS = """
from osmosis_ai import osmosis_rubric


@osmosis_rubric
def told(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    level = extra_info["level"]
    if level == "raises":
        raise ValueError("no opinion")
    if level == "masked":
        assert solution_str == "the key is [masked]", solution_str
        return 1.0
    assert (solution_str, ground_truth) == ("four", "4")
    assert (level, extra_info["column"]) == ("own", "of the row")
    assert "solution_str" not in extra_info and "rubric_id" not in extra_info
    return 0.75


def full(messages, ground_truth, metadata):
    return float([[message["role"], message["content"]] for message in messages] == metadata["expected"])
"""


def ref(root: Path, name: str, source: str) -> FunctionRef:
    (root / "reward_rubric").mkdir()
    (root / "reward_rubric" / "opinions.py").write_text(source, encoding="utf-8")
    (found,), _ = resolve_rubrics([name], Repository(root, rubric_dir=root / "reward_rubric"), root)
    return found


def record(index: int = 0, **columns: Any) -> RubricRecord:
    known = {name: columns[name] for name in ("ground_truth", "extra_info", "original_input") if name in columns}
    values = {"solution_str": "four", "rubric_id": "told", **columns}
    return RubricRecord(index, index + 1, values["solution_str"], values, **known)


async def judged(root: Path, name: str, *records: RubricRecord, source: str = RUBRICS) -> list[Answer]:
    options = PoolOptions(keys=["sk-very-secret"])
    async with function_judge(ref(root, name, source), LimitsConfig(), options) as judge:
        return [await judge(one) for one in records]


async def test_a_function_is_told_the_record_and_its_own_columns(tmp_path: Path) -> None:
    own = record(ground_truth="4", extra_info={"level": "own"}, column="of the row")
    secret = record(1, solution_str="the key is sk-very-secret", level="masked")
    assert await judged(tmp_path, "told", own, secret) == [Answer(0.75), Answer(1.0)]


async def test_the_solution_is_a_conversation_with_the_input_if_there_is_one(tmp_path: Path) -> None:
    asked = record(original_input="2 + 2?", expected=[["user", "2 + 2?"], ["assistant", "four"]])
    unasked = record(1, expected=[["assistant", "four"]])
    answers = await judged(tmp_path, "reward_rubric.opinions:full", asked, unasked)
    assert [answer.score for answer in answers] == [1.0, 1.0]


async def test_a_function_that_fails_says_where(tmp_path: Path) -> None:
    with pytest.raises(ScoreError, match=r"^reward_rubric/opinions\.py:9: ValueError: no opinion$"):
        await judged(tmp_path, "told", record(level="raises"))


async def test_a_function_that_cannot_be_loaded_is_an_error_before_any_record(tmp_path: Path) -> None:
    with anyio.fail_after(60), pytest.raises(FunctionError, match=r"opinions\.py:1: .*no_such_package"):
        await judged(tmp_path, "reward_rubric.opinions:told", source="import no_such_package\n" + RUBRICS)
