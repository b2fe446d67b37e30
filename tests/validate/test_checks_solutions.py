"""Solutions: the findings about played ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from osmosis_ai.failures import CallError
from osmosis_ai.records import Failure, FinishReason, Message, Rollout, Row, Score, SolutionCall, ToolCall
from osmosis_ai.validate import Finding
from osmosis_ai.validate.check import Subject
from osmosis_ai.validate.solutions import Played, judge_solutions

Judge = Callable[..., list[Finding]]
STEPS = [[SolutionCall("add")]]


def played(
    value: float | None = 1.0,
    *,
    index: int = 0,
    error: CallError | None = None,
    reason: FinishReason = "stop",
    failure: Failure | None = None,
) -> Played:
    messages: list[Message] = [{"role": "tool", "tool_call_id": "oracle_0", "content": "Error: no\n such thing"}]
    rollout = Rollout(
        "id",
        index,
        f"row {index}",
        0,
        "solution",
        messages,
        reason,
        1.0,
        failure,
        tool_calls=[ToolCall(0, "oracle_0", "add", "{}", 1.0, error)],
    )
    score = Score("rewards:exact", value, None if value is not None else Failure("reward", "raised", "exception"))
    return Played(Row(index, f"row {index}", "s", "u", solution=STEPS), rollout, [score])


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 20, encoding="utf-8")

    def judge(*several: Played, full: float | None = None) -> list[Finding]:
        best = {} if full is None else {"rewards:exact": full}
        return list(judge_solutions(several, best, Subject(tmp_path, {}, tmp_path / "rows.jsonl")))

    return judge


def test_a_sound_solution(judge: Judge) -> None:
    assert judge(played()) == []
    assert judge(played(10.0), full=10.0) == []
    assert judge(played(1.0), full=0.5) == []


@pytest.mark.parametrize(
    ("one", "code", "message"),
    [
        (played(0.5), "OSM410", "doesn't earn the full reward: 0.5 instead of 1 from rewards:exact"),
        (played(None), "OSM410", "doesn't earn the full reward: no score from rewards:exact"),
        (played(reason="max_turns"), "OSM410", "doesn't run to the end: max_turns"),
        (played(failure=Failure("model", "leads nowhere", "solution")), "OSM410", "run to the end: leads nowhere"),
        (played(error="exception"), "OSM411", "call of add fails: Error: no such thing"),
    ],
)
def test_what_is_wrong(judge: Judge, one: Played, code: str, message: str) -> None:
    [found] = judge(one)
    assert (found.code, found.file, found.line, found.subject) == (code, "rows.jsonl", 1, "solution")
    assert found.message.startswith("row 0: ")
    assert message in found.message
    assert "--row 0`" in found.hint


def test_less_than_what_a_right_answer_gets(judge: Judge) -> None:
    assert "1 instead of 10" in judge(played(1.0), full=10.0)[0].message


def test_many_are_counted(judge: Judge) -> None:
    found = judge(*(played(0.0, index=index) for index in range(8)))
    assert [one.line for one in found] == [1, 2, 3, 4, 5, None]
    assert found[-1].message == "the solutions of 3 more rows have the same problem"
