"""Records judged concurrently, several times each, and what the scores come to."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import anyio
import msgspec

from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.records import Record
from osmosis_ai.reward_rubric.agreement import agreement
from osmosis_ai.reward_rubric.configs import Rubric
from osmosis_ai.reward_rubric.data import RubricRecord

__all__ = [
    "Answer",
    "Judge",
    "JudgedRecord",
    "JudgedRun",
    "Statistics",
    "compare_with_labels",
    "config_judge",
    "judge_records",
    "labels_of",
    "read_baseline",
    "result_object",
    "spread",
    "statistics_of",
    "without_label",
]

PREVIEW = 120


class Answer(Record, frozen=True):
    """What a judge made of one record."""

    score: float
    explanation: str | None = None
    raw: Any = None


Judge = Callable[[RubricRecord], Awaitable[Answer]]
"""Scores one record once; raises OsmosisError, TypeError or ValueError when it can't."""


class JudgedRun(Record, frozen=True):
    """One of the times a record was judged: exactly one of `score` and `error` is set. Times in UTC."""

    run_index: int
    status: str
    started_at: str
    completed_at: str
    duration_seconds: float
    preview: str
    score: float | None = None
    explanation: str | None = None
    error: str | None = None
    raw: Any = None


class JudgedRecord(Record, frozen=True):
    """A record with all its runs, in order."""

    record: RubricRecord
    runs: list[JudgedRun]

    @property
    def scores(self) -> list[float]:
        """Those of the runs that have one."""
        return [run.score for run in self.runs if run.score is not None]


class Statistics(Record, frozen=True, omit_defaults=False):
    """Of the runs that have a score; None where there is none. Variance and stdev are the population's."""

    average: float | None
    variance: float | None
    stdev: float | None
    min: float | None
    max: float | None
    success_count: int
    failure_count: int
    total_runs: int


def config_judge(rubric: Rubric) -> Judge:
    """The judge that an entry of a rubric file describes. What a record says itself comes before what the entry says.

    Args:
        rubric: The entry.
    """
    from osmosis_ai.reward_rubric.judge import aevaluate_rubric

    async def judge(record: RubricRecord) -> Answer:
        system_prompt = record.system_prompt or rubric.system_prompt
        model_info = {**rubric.model_info, "system_prompt": system_prompt or rubric.model_info.get("system_prompt")}
        context = {**(record.extra_info or {}), **(record.metadata or {})}
        result = await aevaluate_rubric(
            rubric.rubric,
            record.solution_str,
            model_info,
            ground_truth=record.ground_truth if record.ground_truth is not None else rubric.ground_truth,
            original_input=record.original_input or rubric.original_input,
            metadata=context or None,
            score_min=rubric.score_min if record.score_min is None else record.score_min,
            score_max=rubric.score_max if record.score_max is None else record.score_max,
            return_details=True,
        )
        assert isinstance(result, dict)
        return Answer(result["score"], result["explanation"], result["raw"])

    return judge


async def judge_records(
    records: Sequence[RubricRecord],
    judge: Judge,
    *,
    number: int,
    batch_size: int,
    done: Callable[[RubricRecord, JudgedRun], None],
) -> list[JudgedRecord]:
    """Judge every record a number of times, so many at once. A failing run is recorded; the others go on.

    Args:
        records: What to judge.
        judge: Who does.
        number: Runs of each record.
        batch_size: Runs at a time.
        done: Told about each run when it ends.

    Returns:
        The records in their order.
    """
    runs: dict[tuple[int, int], JudgedRun] = {}
    # One iterator that all slots take from.
    waiting = ((place, run_index) for run_index in range(number) for place in range(len(records)))

    async def slot() -> None:
        for place, run_index in waiting:
            run = runs[place, run_index] = await _run(records[place], run_index, judge)
            done(records[place], run)

    async with anyio.create_task_group() as group:
        for _ in range(min(batch_size, number * len(records))):
            group.start_soon(slot)
    return [
        JudgedRecord(record, [runs[place, run_index] for run_index in range(number)])
        for place, record in enumerate(records)
    ]


async def _run(record: RubricRecord, run_index: int, judge: Judge) -> JudgedRun:
    started_at, started = _now(), perf_counter()
    facts: dict[str, Any]
    try:
        answer = await judge(record)
    except (OsmosisError, TypeError, ValueError) as error:
        facts = {"status": "error", "error": str(error) or type(error).__name__}
    else:
        facts = {"status": "success", "score": answer.score, "explanation": answer.explanation, "raw": answer.raw}
    text = " ".join(record.solution_str[: 4 * PREVIEW].split())
    return JudgedRun(
        run_index=run_index,
        started_at=started_at,
        completed_at=_now(),
        duration_seconds=round(perf_counter() - started, 6),
        preview=text if len(text) <= PREVIEW else f"{text[:PREVIEW]}…",
        **facts,
    )


def statistics_of(runs: Sequence[JudgedRun]) -> Statistics:
    """Statistics of runs, of one record or of all."""
    scores = [run.score for run in runs if run.score is not None]
    counts = {"success_count": len(scores), "failure_count": len(runs) - len(scores), "total_runs": len(runs)}
    if not scores:
        return Statistics(None, None, None, None, None, **counts)
    mean = fmean(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / len(scores)
    return Statistics(mean, variance, math.sqrt(variance), min(scores), max(scores), **counts)


def spread(judged: Sequence[JudgedRecord]) -> dict[str, Any] | None:
    """How much a judge differs from itself on the same record; None when no record has two scores.

    `mean_stdev` is the mean over records of the population standard deviation of their scores, `max_range` the largest
    difference between two scores of one record, `widest_record` its id, and `unanimous` the number of records whose
    scores are all equal.
    """
    several = [item for item in judged if len(item.scores) > 1]
    if not several:
        return None
    widest = max(several, key=lambda item: max(item.scores) - min(item.scores))
    return {
        "records": len(several),
        "mean_stdev": fmean(statistics_of(item.runs).stdev or 0.0 for item in several),
        "max_range": max(widest.scores) - min(widest.scores),
        "widest_record": widest.record.id,
        "unanimous": sum(min(item.scores) == max(item.scores) for item in several),
    }


def labels_of(records: Sequence[RubricRecord], column: str) -> dict[int, float]:
    """The human labels of records: a number, a numeric text or a boolean in a column, or under it in `metadata` or
    `extra_info`. A record without one is left out.

    Args:
        records: The records.
        column: The column's name.

    Returns:
        Labels by record index.

    Raises:
        UsageError: A label is no number, or no record has one; the message lists the columns there are.
    """
    labels: dict[int, float] = {}
    for record in records:
        for values in (record.values, record.metadata or {}, record.extra_info or {}):
            if values.get(column) is not None:
                labels[record.index] = _label(values[column], column, record)
                break
    if not labels:
        columns = dict.fromkeys(name for record in records for name in record.values)
        raise UsageError(f"--against {column}: no record has this column; there are {', '.join(columns)}")
    return labels


def without_label(record: RubricRecord, column: str) -> RubricRecord:
    """The record as a judge may see it, without the label that it is compared with."""

    def left(values: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if values is None else {name: value for name, value in values.items() if name != column}

    inner = {"metadata": left(record.metadata), "extra_info": left(record.extra_info)}
    values = {name: inner.get(name, value) for name, value in record.values.items()}
    return msgspec.structs.replace(record, values=left(values) or {}, **inner)


def compare_with_labels(
    judged: Sequence[JudgedRecord], labels: dict[int, float], column: str, threshold: float
) -> dict[str, Any]:
    """How the records' mean scores agree with their labels.

    Args:
        judged: The judged records.
        labels: Labels by record index.
        column: Where they are from.
        threshold: What is at least this counts as positive.
    """
    pairs = [
        (fmean(item.scores), labels[item.record.index])
        for item in judged
        if item.scores and item.record.index in labels
    ]
    found: dict[str, Any] = {"column": column, "records": len(pairs)}
    if pairs:
        scores, human = zip(*pairs, strict=True)
        found |= msgspec.to_builtins(agreement(scores, human, threshold))
    return found


def read_baseline(path: Path) -> float:
    """The average of an earlier result.

    Raises:
        UsageError: The file can't be read, is no such result, or has no average because every run failed.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--baseline {path} can't be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--baseline {path} is not JSON: {error}") from None
    overall = data.get("overall_statistics") if isinstance(data, dict) else None
    if not isinstance(overall, dict) or "average" not in overall:
        raise UsageError(f"--baseline {path} is not a result of eval-rubric: it has no overall_statistics.average")
    average = overall["average"]
    if isinstance(average, bool) or not isinstance(average, (int, float)):
        raise UsageError(f"--baseline {path} has no average: every run in it failed")
    return float(average)


def result_object(judged: Sequence[JudgedRecord], facts: dict[str, Any]) -> dict[str, Any]:
    """The result as it is written.

    Args:
        judged: The judged records.
        facts: What stands beside them: `rubric_id`, `rubric_source`, `provider`, `model`, `number`, `config_path`,
            `data_path`, and more.
    """
    return {
        "generated_at": _now(),
        **facts,
        "overall_statistics": statistics_of([run for item in judged for run in item.runs]),
        "records": [
            {
                "id": item.record.id,
                "record_index": item.record.index,
                "conversation_id": item.record.conversation_id,
                "input_record": item.record.values,
                "statistics": statistics_of(item.runs),
                "runs": [msgspec.structs.asdict(run) for run in item.runs],
            }
            for item in judged
        ],
    }


def _label(value: Any, column: str, record: RubricRecord) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--against {column}: line {record.line} of the data has {value!r}, which is not a number")
    return number


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
