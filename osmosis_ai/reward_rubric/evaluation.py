"""Judge records concurrently, several times each, and compute statistics and the documented results."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, Literal

import anyio
import msgspec

from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.reward_rubric.agreement import LabelAgreement, agreement
from osmosis_ai.reward_rubric.configs import Rubric
from osmosis_ai.reward_rubric.data import RubricRecord

PREVIEW = 120
"""Characters of a solution that a report shows."""


class Answer(Record, frozen=True):
    """A judge's answer about one record."""

    score: float
    explanation: str | None = None
    raw: Any = None


Judge = Callable[[RubricRecord], Awaitable[Answer]]
"""Scores one record once; raises OsmosisError, TypeError or ValueError when it can't."""


class JudgedRun(Record, frozen=True, kw_only=True):
    """One judgement of a record; either `score` or `error` is set."""

    run_index: int
    """Number of the run, from 0."""
    status: Literal["success", "error"]
    started_at: str
    """Start, in UTC and ISO 8601."""
    completed_at: str
    """End, in UTC and ISO 8601."""
    duration_seconds: float
    """Duration in seconds."""
    preview: str
    """Beginning of the solution, on one line."""
    score: float | None
    """The judge's score, null if it gave none."""
    explanation: str | None
    """The judge's explanation, null if it gave none."""
    error: str | None
    """Reason for a missing score, null if there is a score."""
    raw: Any
    """The judge's reply as the provider sent it, or the requests of an @osmosis_rubric function to its judges."""


class Statistics(Record, frozen=True):
    """Statistics of the runs with a score; null if there are none."""

    average: float | None
    variance: float | None
    """Population variance."""
    stdev: float | None
    """Population standard deviation."""
    min: float | None
    max: float | None
    success_count: int
    """Runs with a score."""
    failure_count: int
    """Runs without a score."""
    total_runs: int


class Spread(Record, frozen=True):
    """Differences between a judge's scores of the same record."""

    records: int
    """Records with at least two scores."""
    mean_stdev: float
    """Mean over records of the population standard deviation of their scores."""
    max_range: float
    """Largest difference between two scores of one record."""
    widest_record: str
    """Id of that record."""
    unanimous: int
    """Records whose scores are all equal."""


class BaselineDifference(Record, frozen=True):
    """The average compared with an earlier result's."""

    path: str
    """File of the earlier result."""
    average: float
    """Its average."""
    difference: float | None
    """This average minus that one, null if no run has a score."""


class RecordResult(Record, frozen=True):
    """One record and its runs."""

    id: str
    """The record's `conversation_id`, else `record-` and its index."""
    record_index: int
    """Position among the file's records, from 0."""
    conversation_id: str | None
    input_record: JsonObject
    """The record's columns as in the file."""
    statistics: Statistics
    """Statistics of the record's runs."""
    runs: list[JudgedRun]
    """The runs, in order."""

    @property
    def scores(self) -> list[float]:
        """The scores of the runs that have one."""
        return [run.score for run in self.runs if run.score is not None]


class RubricResults(Record, frozen=True, kw_only=True):
    """The results of `osmosis eval-rubric`."""

    generated_at: str
    """End of the evaluation, in UTC and ISO 8601."""
    rubric_id: str
    """Id of the rubric, or name of the function as given."""
    rubric_source: Literal["config", "function"]
    """The rubric file, or an @osmosis_rubric function."""
    provider: str
    """Provider of the judge."""
    model: str
    """Model of the judge."""
    number: int
    """Runs per record."""
    config_path: str | None
    """The rubric file, null for a function."""
    data_path: str
    """File of the records, or the run store."""
    run: str | None = None
    """The run whose answers were judged, as given with `--run`."""
    spread: Spread | None = None
    """Spread of the judge's scores, absent if no record has two."""
    agreement: LabelAgreement | None = None
    """Agreement with human labels, with `--against`."""
    baseline: BaselineDifference | None = None
    """The average compared with an earlier result's, with `--baseline`."""
    base_url: str | None = None
    """The judge's OpenAI-compatible endpoint, absent for the provider's own."""
    overall_statistics: Statistics
    """Statistics of all runs."""
    records: list[RecordResult]
    """The records, in order."""


def config_judge(rubric: Rubric) -> Judge:
    """Return the judge that an entry of a rubric file describes. A record's own fields override the entry's."""
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
) -> list[RecordResult]:
    """Judge every record `number` times, `batch_size` runs at once, and call `done` after each run.

    A failing run is recorded; the others continue.
    """
    runs: dict[tuple[int, int], JudgedRun] = {}
    # All slots draw from this iterator.
    waiting = ((place, run_index) for run_index in range(number) for place in range(len(records)))

    async def slot() -> None:
        for place, run_index in waiting:
            run = runs[place, run_index] = await _run(records[place], run_index, judge)
            done(records[place], run)

    async with anyio.create_task_group() as group:
        for _ in range(min(batch_size, number * len(records))):
            group.start_soon(slot)
    return [
        _result(record, [runs[place, run_index] for run_index in range(number)]) for place, record in enumerate(records)
    ]


def _result(record: RubricRecord, runs: list[JudgedRun]) -> RecordResult:
    return RecordResult(record.id, record.index, record.conversation_id, record.values, statistics_of(runs), runs)


async def _run(record: RubricRecord, run_index: int, judge: Judge) -> JudgedRun:
    from osmosis_ai.reward_rubric.judge import judged_attempt

    started_at, started = now(), perf_counter()
    answer = Answer(math.nan)
    problem: str | None = None
    try:
        with judged_attempt(run_index):
            answer = await judge(record)
    except (OsmosisError, TypeError, ValueError) as error:
        problem = str(error) or type(error).__name__
    # Enough for a preview even after white space is collapsed; the rest may be megabytes.
    text = " ".join(record.solution_str[: 4 * PREVIEW].split())
    return JudgedRun(
        run_index=run_index,
        status="success" if problem is None else "error",
        started_at=started_at,
        completed_at=now(),
        duration_seconds=round(perf_counter() - started, 6),
        preview=text if len(text) <= PREVIEW else f"{text[:PREVIEW]}…",
        score=answer.score if problem is None else None,
        explanation=answer.explanation,
        error=problem,
        raw=answer.raw,
    )


def statistics_of(runs: Sequence[JudgedRun]) -> Statistics:
    """Compute statistics of runs, of one record or of all."""
    scores = [run.score for run in runs if run.score is not None]
    counts = {"success_count": len(scores), "failure_count": len(runs) - len(scores), "total_runs": len(runs)}
    if not scores:
        return Statistics(None, None, None, None, None, **counts)
    mean = fmean(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / len(scores)
    return Statistics(mean, variance, math.sqrt(variance), min(scores), max(scores), **counts)


def spread_of(judged: Sequence[RecordResult]) -> Spread | None:
    """Compute how much a judge's scores of the same record differ; None if no record has two scores."""
    several = [item for item in judged if len(item.scores) > 1]
    if not several:
        return None
    widest = max(several, key=lambda item: max(item.scores) - min(item.scores))
    return Spread(
        records=len(several),
        mean_stdev=fmean(item.statistics.stdev or 0.0 for item in several),
        max_range=max(widest.scores) - min(widest.scores),
        widest_record=widest.id,
        unanimous=sum(min(item.scores) == max(item.scores) for item in several),
    )


def labels_of(records: Sequence[RubricRecord], column: str) -> dict[int, float]:
    """Return the human labels by record index: a number, numeric text or boolean in a column, or under its name in
    `metadata` or `extra_info`. Records without a label are left out.

    Raises:
        UsageError: A label isn't a number, or no record has one; the message lists the columns.
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
    """Return the record without its label, which a judge must not see."""

    def left(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name != column}

    given = {"metadata": record.metadata, "extra_info": record.extra_info}
    inner = {name: left(values) for name, values in given.items() if values is not None}
    # `values` has these two columns as well.
    return msgspec.structs.replace(record, values=left(record.values | inner), **inner)


def compare_with_labels(
    column: str, judged: Sequence[RecordResult], labels: dict[int, float], threshold: float
) -> LabelAgreement:
    """Compare the records' mean scores with the labels of a column, given by record index."""
    both = [item for item in judged if item.scores and item.record_index in labels]
    if not both:
        return LabelAgreement(column, 0)
    scores = [fmean(item.scores) for item in both]
    return agreement(column, scores, [labels[item.record_index] for item in both], threshold)


def read_baseline(path: Path) -> float:
    """Return the average of an earlier result.

    Raises:
        UsageError: The file can't be read, isn't such a result, or has no average because every run failed.
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


def now() -> str:
    """Return the current time in UTC and ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _label(value: Any, column: str, record: RubricRecord) -> float:
    try:
        number = float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--against {column}: line {record.line} of the data has {value!r}, which is not a number")
    return number
