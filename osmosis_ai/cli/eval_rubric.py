"""`osmosis eval-rubric`: have a judge score recorded solutions."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from osmosis_ai.cli.options import Given, dash_is_json, takes
from osmosis_ai.cli.session import ExitCode, SharedOptions, command_session, interrupts, stored_runs
from osmosis_ai.errors import OutputError, UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.options import config_of, once
from osmosis_ai.records import FunctionRef, Record
from osmosis_ai.text import counted
from osmosis_ai.text import score_number as number
from osmosis_ai.urls import show_url

if TYPE_CHECKING:
    from osmosis_ai.cli.console import Output
    from osmosis_ai.reward_rubric.agreement import LabelAgreement
    from osmosis_ai.reward_rubric.configs import Rubric
    from osmosis_ai.reward_rubric.data import RubricRecord
    from osmosis_ai.reward_rubric.evaluation import Judge, JudgedRun, RecordResult, RubricResults

__all__ = ["eval_rubric", "print_results"]


class RecordsConfig(Record, frozen=True):
    """Records: the records to judge, and the rubric."""

    rubric: Annotated[
        str,
        once(
            "A rubric of the rubric file or the repository, as in `osmosis eval`: the name of an entry or of an "
            "@osmosis_rubric function.",
            metavar="NAME|FILE#ID",
        ),
    ] = ""
    data: Annotated[str, once("The records: JSONL with a solution_str in each line.", ("--data", "-d"), "FILE")] = ""
    run: Annotated[
        str | None,
        once(
            "Judge the answers of this stored run, instead of --data. With --against human: those that have a verdict.",
            metavar="RUN",
        ),
    ] = None
    config: Annotated[
        str | None, once("The rubric file.", metavar="FILE", default="rubric_configs.yaml beside the data")
    ] = None
    limit: Annotated[int | None, once("Judge at most N records.", metavar="N", minimum=1)] = None
    n: Annotated[int, once("Judge every record N times.", metavar="N", minimum=1)] = 1
    batch_size: Annotated[int, once("Maximum number of concurrent runs.", metavar="N", minimum=1)] = 8
    timeout: Annotated[
        float, once("Time limit for one run of an @osmosis_rubric function.", metavar="SECONDS", minimum=0.001)
    ] = 150.0


class ComparisonConfig(Record, frozen=True):
    """Comparison: human labels, and an earlier result."""

    against: Annotated[str | None, once("Compare with the human labels in this column.", metavar="COLUMN")] = None
    threshold: Annotated[
        float | None,
        once("Lowest positive score with --against.", metavar="SCORE", default="the middle of the range"),
    ] = None
    baseline: Annotated[str | None, once("Compare with this earlier result.", metavar="FILE")] = None


class JudgeConfig(Record, frozen=True):
    """Judge: the judge model."""

    judge_model: Annotated[str | None, once("Use this model instead of the one the rubric names.", metavar="NAME")] = (
        None
    )
    judge_base_url: Annotated[
        str | None,
        once(
            "Send judge calls to this OpenAI-compatible endpoint; reads its key from $OSMOSIS_JUDGE_API_KEY.",
            metavar="URL",
        ),
    ] = None


class RecordingsConfig(Record, frozen=True):
    """Recordings: the judge's replies, recorded or replayed."""

    record: Annotated[
        str | None,
        once(
            "Record the judge's replies in this folder, and reuse those already recorded.",
            metavar="DIR",
        ),
    ] = None
    replay: Annotated[
        str | None,
        once("Answer every request from the recordings in this folder; a request without one fails.", metavar="DIR"),
    ] = None


class RubricOutput(Record, frozen=True):
    """Output: the result's destination."""

    output: Annotated[
        str | None,
        once(
            "Write the result to this file, or to a new one in this folder; - is --json.",
            ("--output", "-o"),
            "PATH",
            default="a new file in eval-rubric in --store",
        ),
    ] = None
    store: Annotated[
        str | None, once("The folder of runs, as for `osmosis eval`.", metavar="DIR", default="the repository's")
    ] = None
    quiet: Annotated[bool, once("No progress, only results.", ("--quiet", "-q"))] = False
    json: Annotated[bool, once("The result on one line of stdout, and nothing else there.")] = False


class EvalRubricConfig(Record, frozen=True):
    """All options of `osmosis eval-rubric`."""

    records: RecordsConfig = RecordsConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    judge: JudgeConfig = JudgeConfig()
    recordings: RecordingsConfig = RecordingsConfig()
    output: RubricOutput = RubricOutput()


@takes(EvalRubricConfig)
def eval_rubric(given: Given) -> None:
    """Have a judge score recorded solutions.

    Measures how well the judge agrees with itself and, with --against, with human labels.
    """
    import asyncio

    from osmosis_ai.reward_rubric.target import judge_variables
    from osmosis_ai.runtime.run.recordings import find_recordings

    config = config_of(EvalRubricConfig, dash_is_json(given))
    if not given.get("rubric"):
        raise UsageError("--rubric is missing; see osmosis eval-rubric --help")
    if bool(given.get("data")) == bool(given.get("run")):
        problem = "--data and --run exclude each other" if given.get("data") else "--data is missing, or --run"
        raise UsageError(f"{problem}; see osmosis eval-rubric --help")
    with (
        command_session(quiet=config.output.quiet) as session,
        find_recordings(config.recordings.record, config.recordings.replay, session.cwd) as recordings,
    ):
        # Judges are called from this process.
        os.environ.update(session.environ | judge_variables(config.judge.judge_model, config.judge.judge_base_url))
        if recordings is not None:
            os.environ.update(recordings.variables)
            session.output.say(recordings.banner)
        plan = _prepare(config, session.cwd)
        session.use(keys=plan.keys)
        if plan.skipped:
            session.output.say(f"skipped records for other rubrics: {plan.skipped}")
        judged = asyncio.run(_evaluate(plan, session.output))
        if judged is None:
            session.output.warn("interrupted; nothing was written")
            raise typer.Exit(ExitCode.INTERRUPTED)
        for unused in recordings.unused([recordings.judges]) if recordings is not None else ():
            session.output.say(unused)
        raise typer.Exit(_finish(plan, judged, session.output, config.output.json))


class _JudgeFacts(NamedTuple):
    """The rubric's source and the judge, as in the results."""

    rubric_source: Literal["config", "function"]
    provider: str
    model: str
    config_path: str | None
    base_url: str | None


class _Plan(NamedTuple):
    """The evaluation to run, with every input checked."""

    config: EvalRubricConfig
    data: Path
    records: list[RubricRecord]
    skipped: int
    rubric_id: str
    judge: _JudgeFacts
    bounds: tuple[float, float]
    output: Path
    rubric: Rubric | None = None
    function: FunctionRef | None = None
    labels: dict[int, float] | None = None
    baseline: float | None = None
    keys: list[str] = []


# Before


def _prepare(config: EvalRubricConfig, cwd: Path) -> _Plan:
    from osmosis_ai.reward_rubric.data import load_records, records_of_run
    from osmosis_ai.reward_rubric.evaluation import labels_of, read_baseline
    from osmosis_ai.store.queries import Queries
    from osmosis_ai.store.schema import database_path
    from osmosis_ai.store.verdicts import HUMAN

    options, comparison = config.records, config.comparison
    if comparison.threshold is not None and comparison.against is None:
        raise UsageError("--threshold needs --against COLUMN, the column with the human labels")
    if options.run is None:
        data = given_path(options.data, cwd)
        folder, everything = data.parent, load_records(data)
    else:
        folder, store = stored_runs(cwd, SharedOptions(store=config.output.store))
        data = database_path(store)
        runs = Queries(data)
        everything = records_of_run(runs, runs.find_run(options.run), with_verdict=comparison.against == HUMAN)
    rubric, function, judge = _judge_of(options, folder, cwd)
    name = rubric.id if rubric is not None else options.rubric
    # Records may name a function with or without its module.
    names = {None, name, function.attribute} if function is not None else {None, name}
    records = [record for record in everything if record.rubric_id in names]
    if not records:
        there = sorted({record.rubric_id for record in everything if record.rubric_id})
        raise UsageError(f"{data} has no records for the rubric {name!r}, only for {', '.join(there)}")
    records = records[: options.limit]
    key = rubric.model_info.get("api_key") if rubric is not None else None
    low, high = bounds = (rubric.score_min, rubric.score_max) if rubric is not None else (0.0, 1.0)
    labels = labels_of(records, comparison.against) if comparison.against is not None else None
    if labels is not None and options.run is not None and comparison.against == HUMAN:
        # A verdict is the one or the other end of the judge's scale.
        labels = {index: high if good else low for index, good in labels.items()}
    return _Plan(
        config=config,
        data=data,
        records=records,
        skipped=len(everything) - len(records),
        rubric_id=name,
        judge=judge,
        bounds=bounds,
        output=_output_file(config.output, name, cwd),
        rubric=rubric,
        function=function,
        labels=labels,
        baseline=None if comparison.baseline is None else read_baseline(given_path(comparison.baseline, cwd)),
        keys=[key] if key else [],
    )


def _judge_of(options: RecordsConfig, folder: Path, cwd: Path) -> tuple[Rubric | None, FunctionRef | None, _JudgeFacts]:
    """Find the rubric: in the file of --config, in the rubric file in the records' folder, else as runs do."""
    from osmosis_ai.discovery.repository import find_repository
    from osmosis_ai.errors import FunctionError
    from osmosis_ai.reward_rubric.configs import DEFAULT_FILE, load_rubrics
    from osmosis_ai.reward_rubric.resolve import resolve_rubrics

    if options.config is not None:
        return _entry(given_path(options.config, cwd), options.rubric)
    beside = folder / DEFAULT_FILE
    here = [rubric.id for rubric in load_rubrics(beside)] if beside.is_file() else []
    if options.rubric in here:
        return _entry(beside, options.rubric)
    try:
        refs, _ = resolve_rubrics([options.rubric], find_repository(None, cwd), cwd)
    except FunctionError:
        if not here or ":" in options.rubric or "#" in options.rubric:
            raise
        # Its error lists the rubrics of the file beside the data.
        return _entry(beside, options.rubric)
    # A name may be that of several entries, but a result has one judge.
    if len(refs) > 1:
        raise UsageError(f"--rubric {options.rubric} names {len(refs)} rubrics; write FILE#ID to choose one")
    return _function(refs[0]) if refs[0].module else _entry(Path(refs[0].root, refs[0].file or ""), refs[0].attribute)


def _entry(path: Path, rubric_id: str) -> tuple[Rubric, None, _JudgeFacts]:
    from osmosis_ai.errors import MissingAPIKeyError
    from osmosis_ai.reward_rubric.configs import load_rubric
    from osmosis_ai.reward_rubric.target import find_target

    rubric = load_rubric(path, rubric_id)
    try:
        target = find_target(rubric.model_info)
    except (MissingAPIKeyError, ValueError) as error:
        raise UsageError(f"rubric {rubric.id}: {error}") from None
    return rubric, None, _JudgeFacts("config", target.provider, target.model, str(path), _shown(target.base_url))


def _function(ref: FunctionRef) -> tuple[None, FunctionRef, _JudgeFacts]:
    from osmosis_ai.reward_rubric.target import current_redirect, rubric_extra_info

    judge, redirect = rubric_extra_info({}, None), current_redirect()
    base_url = None if redirect is None else _shown(redirect.base_url)
    return None, ref, _JudgeFacts("function", judge["provider"], judge["model"], None, base_url)


def _shown(url: str | None) -> str | None:
    return None if url is None else show_url(url)


def _output_file(options: RubricOutput, rubric_id: str, cwd: Path) -> Path:
    """Return the result's file and create its folder."""
    import re
    import time
    from uuid import uuid4

    from osmosis_ai.folders import private_folder

    given, store = options.output, None
    if given is None:
        _, store = stored_runs(cwd, SharedOptions(store=options.store))
        # The id comes from a file, and mustn't lead out of the folder.
        folder = store / "eval-rubric" / re.sub(r"[^\w.-]|^\.+", "_", rubric_id)
        path = folder / f"rubric_eval_result_{int(time.time())}_{uuid4().hex[:8]}.json"
    else:
        path = given_path(given, cwd)
        if path.is_dir() or given.endswith(("/", os.sep)) or not path.suffix:
            path = path / f"rubric_eval_result_{int(time.time())}.json"
    try:
        # Checked before the judge is called: an unwritable folder would cost its replies.
        if store is not None:
            private_folder(store)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"the result can't be written: the folder {path.parent} is read-only; use --output PATH")
    except OSError as error:
        raise UsageError(f"the result can't be written to {path.parent}: {error.strerror or error}") from None
    return path


# During


class _Tally:
    """Running totals of finished runs."""

    def __init__(self) -> None:
        self._scored = self._failed = 0
        self._sum = 0.0

    def add(self, run: JudgedRun) -> None:
        self._failed += run.score is None
        self._scored += run.score is not None
        self._sum += run.score or 0.0

    def status(self) -> list[str]:
        """Return the number of failures and the mean score."""
        mean = [f"mean score {number(self._sum / self._scored)}"] if self._scored else []
        return [f"{self._failed:,} failed", *mean]


async def _evaluate(plan: _Plan, view: Output) -> list[RecordResult] | None:
    """Judge every record; return None if interrupted."""
    import anyio

    from osmosis_ai.cli.progress import LiveProgress
    from osmosis_ai.reward_rubric.evaluation import judge_records
    from osmosis_ai.tasks import task_group

    options, tally = plan.config.records, _Tally()
    progress = LiveProgress(view, len(plan.records) * options.n, "runs", tally.status)

    def done(record: RubricRecord, run: JudgedRun) -> None:
        tally.add(run)
        progress.advance()

    judged = None
    with anyio.CancelScope() as scope, interrupts(scope.cancel):
        async with _judge(plan) as judge:
            with progress:
                async with task_group() as ticker:
                    ticker.start_soon(progress.keep_showing)
                    judged = await judge_records(
                        plan.records, judge, number=options.n, batch_size=options.batch_size, done=done
                    )
                    ticker.cancel_scope.cancel()
    return None if scope.cancel_called else judged


@asynccontextmanager
async def _judge(plan: _Plan) -> AsyncIterator[Judge]:
    from osmosis_ai.reward_rubric.evaluation import config_judge, without_label

    column = plan.config.comparison.against

    def unlabelled(judge: Judge) -> Judge:
        # A judge that sees the label could simply copy it.
        return judge if column is None else lambda record: judge(without_label(record, column))

    if plan.rubric is not None:
        yield unlabelled(config_judge(plan.rubric))
        return
    from osmosis_ai.config import LimitsConfig
    from osmosis_ai.runtime.pool.base import PoolOptions, default_workers
    from osmosis_ai.runtime.run.rubric_functions import function_judge

    options = plan.config.records
    assert plan.function is not None
    workers = PoolOptions(workers=default_workers(options.batch_size), environ=dict(os.environ))
    async with function_judge(plan.function, LimitsConfig(reward_timeout=options.timeout), workers) as judge:
        yield unlabelled(judge)


# After


def _finish(plan: _Plan, judged: list[RecordResult], view: Output, as_json: bool) -> int:
    import msgspec

    results = _results(plan, judged)
    data = view.masker.encoded(msgspec.json.encode(results))
    problem = _save(data, plan.output)
    if as_json:
        view.json(data)
    else:
        print_results(view, results)
    # Only after the results are printed, because they were paid for.
    if problem is not None:
        raise problem
    view.say(f"results written to {plan.output}")
    return int(results.overall_statistics.failure_count > 0)


def _save(results: bytes, file: Path) -> OutputError | None:
    """Write the results, else save what was paid for in a temporary folder and return the error; raises OutputError."""
    import tempfile

    from osmosis_ai.cli.run import save_results

    try:
        # Its folder may have been removed while the judge worked.
        file.parent.mkdir(parents=True, exist_ok=True)
        save_results(results, file)
    except (OSError, OutputError) as error:
        spare = Path(tempfile.mkdtemp(prefix="osmosis-")) / file.name
        save_results(results, spare)
        why = f"{file.parent} can't be made: {error.strerror}" if isinstance(error, OSError) else str(error)
        return OutputError(f"{why}; the results are in {spare}")
    return None


def _results(plan: _Plan, judged: list[RecordResult]) -> RubricResults:
    from osmosis_ai.reward_rubric import evaluation

    overall = evaluation.statistics_of([run for item in judged for run in item.runs])
    labelled = baseline = None
    if plan.labels is not None and plan.config.comparison.against is not None:
        low, high = plan.bounds
        threshold = (low + high) / 2 if plan.config.comparison.threshold is None else plan.config.comparison.threshold
        labelled = evaluation.compare_with_labels(plan.config.comparison.against, judged, plan.labels, threshold)
    if plan.baseline is not None and plan.config.comparison.baseline is not None:
        difference = None if overall.average is None else overall.average - plan.baseline
        baseline = evaluation.BaselineDifference(plan.config.comparison.baseline, plan.baseline, difference)
    return evaluation.RubricResults(
        generated_at=evaluation.now(),
        rubric_id=plan.rubric_id,
        **plan.judge._asdict(),
        number=plan.config.records.n,
        data_path=str(plan.data),
        run=plan.config.records.run,
        spread=evaluation.spread_of(judged),
        agreement=labelled,
        baseline=baseline,
        overall_statistics=overall,
        records=judged,
    )


def print_results(view: Output, results: RubricResults) -> None:
    """Print every run of every record, and the statistics."""
    from osmosis_ai.cli.console import BAD
    from osmosis_ai.cli.report import figure_with_error, shown_interval
    from osmosis_ai.cli.tables import Cell, Column, Table
    from osmosis_ai.reward_fn.statistics import summarize

    table = Table(Column("record", "name"), "run", "score", Column("explanation", "text"))
    for record in results.records:
        for run in record.runs:
            score = Cell("failed", BAD) if run.score is None else number(run.score)
            table.add(record.id, str(run.run_index), score, run.error or run.explanation or "")
    view.table(table)
    view.line("")
    overall, spread, before = results.overall_statistics, results.spread, results.baseline
    if overall.average is not None:
        view.line(
            f"average {number(overall.average)}, variance {number(overall.variance)}, stdev {number(overall.stdev)}, "
            f"min {number(overall.min)}, max {number(overall.max)}"
        )
        # As `eval` gives them: attempts at the same record aren't independent. Failed runs have no score to count.
        scored = [[run.score for run in record.runs if run.score is not None] for record in results.records]
        found = summarize(scored, pass_threshold=1.0)
        view.line(
            f"mean {figure_with_error(found.mean, found.standard_error)}, 95 % confidence interval "
            f"{shown_interval(found.confidence_interval)} over {counted(found.rows, 'record')}"
        )
    view.line(f"{overall.success_count:,} of {overall.total_runs:,} runs succeeded")
    if spread is not None:
        view.line(
            f"spread over {counted(spread.records, 'record')}: mean stdev {number(spread.mean_stdev)}, "
            f"largest range {number(spread.max_range)} ({spread.widest_record}), {spread.unanimous} unanimous"
        )
    if results.agreement is not None:
        for line in _agreement_lines(results.agreement):
            view.line(line)
    if before is not None and before.difference is not None:
        view.line(f"baseline average {number(before.average)}, difference {number(before.difference, '+')}")


def _agreement_lines(agreement: LabelAgreement) -> list[str]:
    from osmosis_ai.reward_rubric.agreement import agreement_words

    counts = agreement.confusion
    if not counts or not isinstance(agreement.mean_absolute_error, float):
        return [f"agreement with {agreement.column}: no record has both a score and a label"]
    rank = f"{agreement.spearman:.3f}" if isinstance(agreement.spearman, float) else "not defined"
    return [
        f"agreement with {agreement.column} on {counted(agreement.records, 'record')}: mean absolute error "
        f"{number(agreement.mean_absolute_error)}, Spearman {rank}; at {agreement.threshold:g}: "
        f"{counts.true_positive} both positive, {counts.true_negative} both negative, "
        f"{counts.false_positive} only the judge, {counts.false_negative} only the label "
        f"(accuracy {agreement.accuracy:.2f})",
        f"judge and label {agreement_words(agreement)}",
    ]
