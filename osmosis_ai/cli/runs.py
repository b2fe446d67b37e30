"""`osmosis runs`: list, show, compare, merge, export, rescore and remove stored runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json, Nodes, WorkersPerNode
from osmosis_ai.cli.session import ExitCode, SharedOptions, Store, command_session, shared_options, stored_runs
from osmosis_ai.cli.status import STATUS
from osmosis_ai.cli.view import view
from osmosis_ai.errors import FunctionError, StoreError, UsageError
from osmosis_ai.exports import EXPORT_FORMATS, ExportFormat, format_of
from osmosis_ai.exports.base import Arguments, ExportOptions
from osmosis_ai.folders import given_path, replaced_file
from osmosis_ai.text import counted

if TYPE_CHECKING:
    from osmosis_ai.cli.console import Output
    from osmosis_ai.masking import Masker
    from osmosis_ai.records import Failure, FunctionRef, Record
    from osmosis_ai.runtime.pool.base import PoolOptions
    from osmosis_ai.runtime.protocol import WorkerSpec
    from osmosis_ai.store.queries import RolloutFilter, RunInfo
    from osmosis_ai.store.run_store import RunStore
    from osmosis_ai.store.views import MovedRun

__all__ = ["app"]

ALL = 2**31
"""More runs than any store holds."""

_DEFAULT_FORMAT = format_of(None).name
_FILES_ONLY = ", ".join(each.name for each in EXPORT_FORMATS.values() if not each.text)

app = typer.Typer(cls=HelpGroup, invoke_without_command=True)


def _export_format(name: str) -> ExportFormat:
    if name not in EXPORT_FORMATS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, EXPORT_FORMATS))}.")
    return EXPORT_FORMATS[name]


_Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or `latest`.")]
_Root = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", help="The repository. Default: that of the working directory."),
]
_Threshold = Annotated[float, typer.Option(metavar="SCORE", help="A row passes with at least this mean score.")]


_Failed = Annotated[bool, typer.Option("--failed", help="Only rollouts that failed or could not be scored.")]
_ToolErrors = Annotated[bool, typer.Option("--tool-errors", help="Only rollouts with a tool call that failed.")]
_NotPassed = Annotated[
    bool,
    typer.Option("--not-passed", help="Only rollouts that failed, or with a score below the run's pass threshold."),
]
_Below = Annotated[
    float | None, typer.Option("--below", metavar="S", help="Only rollouts that failed, or with a score below S.")
]


class _Policy(str, Enum):
    policy = "policy"
    baseline = "baseline"
    all = "all"


class _Arguments(str, Enum):
    text = "text"
    object = "object"


class _CompareFormat(str, Enum):
    github = "github"
    markdown = "markdown"
    junit = "junit"
    json = "json"


class _FailOn(str, Enum):
    worse = "worse"
    undecided = "undecided"
    any_flip = "any-flip"


class _Session(NamedTuple):
    """The context of a subcommand."""

    root: Path
    store: RunStore
    output: Output
    masker: Masker
    json: bool

    def show(self, view: Record) -> None:
        """Print one JSON object on one line of stdout."""
        from osmosis_ai.store.views import encode_view

        self.output.json(encode_view(view))


@app.callback()
def runs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="List the N latest runs.")] = 20,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Browse stored runs. Without a subcommand: list them, newest first."""
    context.obj = SharedOptions(root, store_dir, json)
    if context.invoked_subcommand is None:
        list_runs(context, limit=limit)


@app.command("list", cls=HelpCommand)
def list_runs(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="List the N latest runs.")] = 20,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """List runs, newest first, with their status and mean scores."""
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.cli.runs_output import print_runs
        from osmosis_ai.store.views import ListedRuns, run_view

        found = session.store.list_runs(limit)
        if session.json:
            session.show(ListedRuns([run_view(run) for run in found]))
        elif found:
            print_runs(session.output, found)
        else:
            session.output.say("no runs yet; `osmosis test` and `osmosis eval` create one")


app.command(cls=HelpCommand)(view)


@app.command(cls=HelpCommand)
def show(
    context: typer.Context,
    run: _Run = "latest",
    row: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show this row's transcript instead of the table.")
    ] = None,
    run_index: Annotated[int | None, typer.Option(min=0, metavar="K", help="Only the K-th attempt of a row.")] = None,
    failed: _Failed = False,
    tool_errors: _ToolErrors = False,
    not_passed: _NotPassed = False,
    below: _Below = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most N rollouts.")] = 50,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Show a run: its summary and a line per rollout, or with --row everything about one row."""
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.cli.runs_output import print_rollouts, print_run, print_transcript, print_verdicts
        from osmosis_ai.store.verdicts import verdicts_on
        from osmosis_ai.store.views import ShownRow, ShownRun, rollout_detail, rollout_summary, run_view

        store, output = session.store, session.output
        info = store.find_run(run)
        wanted = _filter(info, failed=failed, tool_errors=tool_errors, not_passed=not_passed, below=below)
        wanted = msgspec.structs.replace(wanted, row=row, run_index=run_index)
        found = list(islice(store.scored(info.id, wanted, with_trajectory=row is not None), limit))
        more = 0
        # Count only if the limit may have cut the list.
        if len(found) == limit:
            more = store.count_rollouts(info.id, wanted) - limit
        if not found and row is not None:
            raise UsageError(_nothing_there(store, info, wanted))
        if session.json:
            shown, totals = run_view(info), store.function_totals(info.id)
            if row is None:
                rollouts = [rollout_summary(scored) for scored in found]
                session.show(ShownRun(shown, totals, verdicts_on(store, info), rollouts, more))
            else:
                session.show(ShownRow(shown, totals, [rollout_detail(scored) for scored in found], more))
        elif row is not None:
            for scored in found:
                print_transcript(output, scored)
            if more:
                output.line(f"… and {more} more of this row; choose with --run-index K, or raise --limit")
        else:
            print_run(output, info, store.function_totals(info.id))
            print_verdicts(output, verdicts_on(store, info))
            print_rollouts(output, info, found, more)
            if not found and (given := _given(wanted)):
                output.say(f"no rollout of the run matches {given}")


@app.command(
    cls=HelpCommand,
    help="Compare run B with run A on the rows both have.\n\n"
    "Rows are the same if their content is. Shows for each function the paired difference B − A with its 95 % "
    "confidence interval, the number of rows that B wins, loses and ties, and the rows that crossed the pass "
    "threshold. With several attempts per row, a row's score is their mean; a missing score counts as 0. The exit code "
    "is 1 if there is nothing to compare.",
)
def compare(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="The run to compare with: an id, its beginning, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The run to compare.")],
    pass_threshold: _Threshold = 1.0,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="List at most N flipped rows per function.")] = 20,
    format: Annotated[
        _CompareFormat | None,
        typer.Option(
            "--format",
            metavar="|".join(each.value for each in _CompareFormat),
            help="For a merge request: markdown for a comment, github for annotations, junit for test results.",
        ),
    ] = None,
    fail_on: Annotated[
        _FailOn | None,
        typer.Option(
            metavar="|".join(each.value for each in _FailOn),
            help="Exit with 1 if a function is significantly worse; also if one is undecided; or if a row fails that "
            "passed.",
        ),
    ] = None,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Compare run B with run A on the rows both have."""
    with _session(context, root, store_dir, json or format is _CompareFormat.json) as session:
        from osmosis_ai.cli.gate import FORMATS, gate
        from osmosis_ai.cli.runs_output import print_comparison
        from osmosis_ai.store.compare import compare_runs

        store = session.store
        found_a, found_b = store.find_run(a), store.find_run(b)
        comparison = compare_runs(store, found_a, found_b, pass_threshold)
        # Only the forms for merge requests show where conversations part, which takes reading them.
        judged = gate(comparison, store, found_a, found_b, session.root, 0 if format is None else limit)
        if session.json:
            session.show(comparison)
        elif format is not None:
            write = session.output.ci_command if format is _CompareFormat.github else session.output.line
            for line in FORMATS[format.value](judged):
                write(line)
        else:
            print_comparison(session.output, comparison, found_a, found_b, store, limit=limit)
        if not comparison.functions:
            if comparison.rows.shared:
                session.output.warn("no function has scored both runs; `osmosis runs rescore` scores a stored run")
            raise typer.Exit(ExitCode.FAILED)
        if judged.failed(None if fail_on is None else fail_on.value):
            verdicts = ", ".join(f"{name} is {verdict}" for name, verdict in judged.verdicts.items())
            session.output.warn(f"{verdicts} (--fail-on {fail_on.value if fail_on else ''})")
            raise typer.Exit(ExitCode.FAILED)


@app.command(
    cls=HelpCommand,
    help="Show what changed from run A to run B: the rows that flipped first, then the scores.\n\n"
    "With --row, align two conversations step by step, on role, tool and arguments: equal steps are folded, and words "
    "that only A or only B has are marked as [-this-] and {+this+}.",
)
def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="The run before: an id, its beginning, or `latest`.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The run after.")],
    row: Annotated[int | None, typer.Option(min=0, metavar="N", help="Align the conversations of A's row N.")] = None,
    run_index: Annotated[int, typer.Option(min=0, metavar="K", help="With --row: the attempt, from 0.")] = 0,
    pass_threshold: _Threshold = 1.0,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="List at most N flipped rows per function.")] = 20,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Show what changed from run A to run B: flipped rows, scores, and with --row two conversations side by side."""
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.cli.runs_output import print_aligned, print_comparison
        from osmosis_ai.store.compare import compare_row, compare_runs

        store = session.store
        found_a, found_b = store.find_run(a), store.find_run(b)
        if row is not None:
            compared, *_ = compare_row(store, found_a, found_b, row, run_index)
            if session.json:
                session.show(compared)
            else:
                print_aligned(session.output, compared)
            return
        comparison = compare_runs(store, found_a, found_b, pass_threshold)
        if session.json:
            session.show(comparison)
        else:
            print_comparison(session.output, comparison, found_a, found_b, store, limit=limit, flips_first=True)


@app.command(
    cls=HelpCommand,
    help="Export a run for training: one row per rollout.\n\n"
    "Each row has messages, tools (the schemas offered), reward (the only score, or the mean of them), rewards by "
    "function, row_id, row_index, run_index, model, finish_reason, error, ground_truth, metadata (the dataset row's "
    "other columns), tokens, and per turn log probabilities and token ids if the endpoint returned them.\n\n"
    + "\n\n".join(
        text
        for each in EXPORT_FORMATS.values()
        for text in (f"{each.description[:-1]}:", *(f"    {call}" for call in each.read_with))
    ),
)
def export(
    context: typer.Context,
    run: _Run = "latest",
    format: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            parser=_export_format,
            metavar="FORMAT",
            help=f"{', '.join(EXPORT_FORMATS)}. Default: by the file's suffix, {_DEFAULT_FORMAT} without one.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help=f"Write to this file; {_FILES_ONLY} needs one. Default: stdout."
        ),
    ] = None,
    arguments: Annotated[
        _Arguments,
        typer.Option(
            metavar="|".join(each.value for each in _Arguments),
            help="In TRL's formats, write a tool call's arguments as the model's text, or as the object that some "
            "chat templates expect.",
        ),
    ] = _Arguments.text,
    only_passed: Annotated[
        bool, typer.Option("--only-passed", help="Only rollouts with every score at or above the run's pass threshold.")
    ] = False,
    min_reward: Annotated[
        float | None, typer.Option(metavar="X", help="Only rollouts with a reward of at least X.")
    ] = None,
    failed: _Failed = False,
    tool_errors: _ToolErrors = False,
    not_passed: _NotPassed = False,
    below: _Below = None,
    policy: Annotated[
        _Policy,
        typer.Option(
            metavar="|".join(each.value for each in _Policy),
            help="The rollouts of which model, for a run with a baseline model.",
        ),
    ] = _Policy.policy,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Export a run for training: one row per rollout."""
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.exports.rollouts import Selection, exported_rollouts
        from osmosis_ai.store.views import WrittenExport

        store, output = session.store, session.output
        file = None if file == "-" else file
        chosen = format or format_of(file)
        if file is None and not chosen.text:
            name = f"-o FILE{chosen.suffix}"
            raise UsageError(f"can't write {chosen.name} to stdout: name a file with {name}")
        if file is None and session.json:
            raise UsageError("--json describes a written file, but the rows go to stdout: add -o FILE")
        path = _writable(file)
        info = store.find_run(run)
        threshold = info.pass_threshold if only_passed else None
        wanted = _filter(info, failed=failed, tool_errors=tool_errors, not_passed=not_passed, below=below)
        rollouts = exported_rollouts(store, info, Selection(policy.value, threshold, min_reward), wanted)
        form: Arguments = "object" if arguments is _Arguments.object else "text"
        options = ExportOptions(store.functions(info.id), session.masker.encoded, info.pass_threshold, form)
        if path is None:
            with output.writing():
                written = chosen.write(rollouts, sys.stdout.buffer, options)
                sys.stdout.buffer.flush()
        else:
            try:
                with replaced_file(path) as sink:
                    written = chosen.write(rollouts, sink, options)
            except OSError as error:
                output.fail(f"{file} could not be written: {error.strerror or error}")
                raise typer.Exit(ExitCode.FAILED) from error
        if session.json:
            export = WrittenExport(
                info.id, chosen.name, str(path), written.records, info.rollouts, dict(written.left_out)
            )
            session.show(export)
        else:
            where = f" to {file}" if file else ""
            whose = {_Policy.policy: "the model's", _Policy.baseline: "the baseline's", _Policy.all: "both models'"}
            chosen_only = f", {whose[policy]} (--policy)" if info.config.get("baseline_model") else ""
            is_rollout = chosen.record == "rollout"
            of = f"{written.records} of" if is_rollout else f"{counted(written.records, chosen.record)} from"
            output.say(f"{of} {info.rollouts} rollouts of run {info.id} written{where}{chosen_only}")
            for reason, number in written.left_out.items():
                output.warn(f"{number} left out: {reason}")


@app.command(cls=HelpCommand)
def rescore(
    context: typer.Context,
    run: _Run = "latest",
    eval_fn: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FN",
            help="Score with this function (repeatable). Default: every discovered reward function.",
        ),
    ] = None,
    reward_timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Time limit per score.")] = 150.0,
    workers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Worker processes; 0 scores in this process. Default: CPUs.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="auto|ray://HOST:PORT|local", help="Score on the nodes of a Ray cluster."),
    ] = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Leave out reward files that can't be loaded, instead of refusing to score."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show user code's output live on stderr.")] = False,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Score a stored run again with the current reward code, without any model call.

    Skips rollouts that this code has scored already. The exit code is 1 if a score could not be computed, or a function
    was left out.
    """
    import asyncio

    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.config import LimitsConfig, WorkersConfig
        from osmosis_ai.runtime.logs import new_log
        from osmosis_ai.runtime.pool.base import PoolOptions, default_workers
        from osmosis_ai.runtime.run.prepare import check_cluster, choose_sandbox, scorer_spec

        info = session.store.find_run(run)
        # Its writer could score the same rollouts at the same time.
        if info.alive:
            raise UsageError(f"run {info.id} is still being written; rescore it when it has ended")
        refs, left_out = _functions(session, info, eval_fn or [], keep_going=keep_going)
        limits = LimitsConfig(reward_timeout=reward_timeout)
        spec = scorer_spec(session.root, refs, limits, keep_going=keep_going)
        made_with = info.config.get("options", {})
        isolation = made_with.get("isolation", "session")
        check_cluster(
            WorkersConfig(
                workers=workers, cluster=cluster, nodes=nodes, workers_per_node=workers_per_node, isolation=isolation
            )
        )
        if made_with.get("isolation") == "sandbox":
            # What a model wrote for that run is scored in a sandbox too.
            config = WorkersConfig(workers=workers, sandbox_network=made_with.get("sandbox_network", False))
            hidden = [Path(info.config["dataset"]), session.store.path.parent]
            spec = msgspec.structs.replace(spec, sandbox=choose_sandbox(config, refs, session.root, hidden))
        options = PoolOptions(
            workers=default_workers(spec.batch_size) if workers is None else workers,
            log=str(new_log(session.store.path.parent, f"{info.id}-rescore")),
            debug=debug,
            cluster=cluster,
            nodes=nodes,
            workers_per_node=workers_per_node,
            # Workers of this machine have it anyway.
            environ=dict(os.environ) if cluster else {},
        )
        raise typer.Exit(asyncio.run(_rescore(session, info, spec, options, left_out)))


@app.command("rm", cls=HelpCommand)
def remove(
    context: typer.Context,
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="Ids, their beginnings, or `latest`.")] = None,
    all_finished: Annotated[bool, typer.Option("--all-finished", help="Remove every finished run.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Don't ask.")] = False,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Remove runs with all their records. Refuses a run that another process is writing."""
    import asyncio

    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.store.views import RemovedRuns

        store, output = session.store, session.output
        found = {info.id: info for info in map(store.find_run, runs or ())}
        if all_finished:
            found.update((info.id, info) for info in store.list_runs(ALL) if info.status == "finished")
        elif not runs:
            raise UsageError("name the runs to remove, or pass --all-finished; `osmosis runs` lists them")
        busy = [info.id for info in found.values() if info.alive]
        if busy:
            raise UsageError(f"still being written by another process: {', '.join(busy)}; nothing was removed")
        if found and not yes:
            what = ", ".join(
                f"{info.id} ({info.command}, {counted(info.rollouts, 'rollout')})" for info in found.values()
            )
            if not sys.stdin.isatty():
                raise UsageError(f"this would remove {what}; confirm with -y")
            if not typer.confirm(f"remove {what}?", err=True):
                raise typer.Exit(ExitCode.FAILED)
        for run_id in found:
            asyncio.run(store.delete_run(run_id))
        if session.json:
            session.show(RemovedRuns(list(found)))
        else:
            output.say(f"{counted(len(found), 'run')} removed")


@app.command(cls=HelpCommand)
def push(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to write the file to.")],
    run: _Run = "latest",
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Copy a finished run to one file in a folder, for another machine to pull."""
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.store.transfer import push_run
        from osmosis_ai.store.views import MovedRun

        info = session.store.find_run(run)
        try:
            file = push_run(session.store.path, info, given_path(folder, Path.cwd()))
        except OSError as error:
            raise UsageError(f"{folder} can't be written: {error.strerror or error}") from None
        _moved(session, MovedRun(info.id, str(file), True), f"run {info.id} is in {file}")


@app.command(cls=HelpCommand)
def pull(
    context: typer.Context,
    place: Annotated[str, typer.Argument(metavar="DIR|FILE", help="A folder of pushed runs, or one file.")],
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Copy a pushed run into the store, from a folder the latest one, and print its id."""
    with _session(context, root, store_dir, json, create=True) as session:
        from osmosis_ai.store.transfer import SUFFIX, pull_run, pushed_runs
        from osmosis_ai.store.views import MovedRun

        found = pushed_runs(given_path(place, Path.cwd()))
        if not found:
            raise UsageError(f"there is no pushed run (*{SUFFIX}) in {place}; `osmosis runs push` writes one")
        try:
            run, new = pull_run(session.store.path, found[0])
        except OSError as error:
            raise UsageError(f"{found[0]} can't be read: {error.strerror or error}") from None
        _moved(session, MovedRun(run, str(found[0]), new), run)


@app.command(cls=HelpCommand)
def merge(
    context: typer.Context,
    stores: Annotated[
        list[str],
        typer.Argument(metavar="STORE", help="A folder of runs, a repository, or a pushed file or folder of them."),
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this name, if a store has several of a shard.")
    ] = None,
    root: _Root = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Make one run of the runs of all shards (--shard), as if it had never been split, and print its id."""
    import asyncio

    with _session(context, root, store_dir, json, create=True) as session:
        from osmosis_ai.runtime.run.merge import found_shards, merge_shards
        from osmosis_ai.store.views import MergedRun, MergedShard, run_view

        store, output = session.store, session.output
        places = [(place, given_path(place, Path.cwd())) for place in stores]
        try:
            with found_shards(places, store.path.parent, name) as shards:
                run, taken, new = asyncio.run(merge_shards(store, shards))
        except OSError as error:
            raise UsageError(f"{error.filename} can't be read: {error.strerror or error}") from None
        if session.json:
            parts = [MergedShard(str(one.shard), one.info.id, one.place, one.info.rollouts) for one in taken]
            session.show(MergedRun(run_view(run), parts, new))
            return
        planned = run.config["planned"]
        if not new:
            output.say(f"nothing to do: these {counted(len(taken), 'shard')} were merged before")
        else:
            output.say(f"{counted(len(taken), 'shard')} merged: {run.rollouts} of {planned} rollouts")
        if run.status != "finished":
            output.say(f"the run is unfinished; run it with --resume-run {run.id} instead of --shard to continue it")
        output.line(run.id)


def _moved(session: _Session, moved: MovedRun, text: str) -> None:
    if session.json:
        session.show(moved)
    else:
        session.output.line(text)


async def _rescore(
    session: _Session, info: RunInfo, spec: WorkerSpec, options: PoolOptions, left_out: list[Failure]
) -> int:
    from osmosis_ai.cli.runs_output import RescoreProgress, print_rescored
    from osmosis_ai.runtime.pool.backends import open_pool
    from osmosis_ai.runtime.pool.group import HaltError
    from osmosis_ai.runtime.run.scoring import rescore as score_again
    from osmosis_ai.store.views import RescoredRun

    store, output = session.store, session.output
    before = {total.function: total.mean for total in store.function_totals(info.id)}
    async with open_pool(spec, options) as pool:
        not_scored = [*left_out, *pool.loaded.problems]
        for problem in not_scored:
            output.warn(f"not scored with: {problem.message}")
        names = list(pool.loaded.functions)
        interrupted = False
        with RescoreProgress(output, info.rollouts - info.failed) as listener:
            try:
                await score_again(info.id, pool, store, listener, spec.functions, session.root)
            except HaltError as error:
                interrupted = True
                output.warn(f"stopped: {error}; run it again")
    totals = store.function_totals(info.id)
    if info.status != "running":
        means = {total.function: total.mean for total in totals}
        # The intervals were those of the scores before.
        await store.mark(info.id, info.status, {**(info.summary or {}), "functions": means, "intervals": {}})
    named = [total for total in totals if total.function in names]
    if session.json:
        functions = {total.function: total for total in named}
        session.show(RescoredRun(info.id, listener.done, before, functions, not_scored))
    else:
        print_rescored(output, listener.done, before, named)
    if interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.FAILED if not_scored or any(total.errors for total in named) else 0


def _functions(
    session: _Session, info: RunInfo, eval_fns: list[str], *, keep_going: bool
) -> tuple[list[FunctionRef], list[Failure]]:
    from osmosis_ai.discovery.repository import find_repository
    from osmosis_ai.runtime.run.prepare import find_functions

    repository = find_repository(None, session.root)
    refs, problems = find_functions(eval_fns, repository, Path.cwd())
    if problems and not (keep_going and refs):
        raise FunctionError.of_all((failure.message for failure in problems), others=bool(refs))
    if not refs:
        raise UsageError(
            f"nothing to score with: no @osmosis_reward function in {session.root / 'reward_fn'}; "
            "write one, or name a function with --eval-fn MODULE:FUNCTION"
            + ("; an agent loop's own rewards need a new run" if info.config.get("agent") else "")
        )
    return refs, problems


def _filter(run: RunInfo, *, failed: bool, tool_errors: bool, not_passed: bool, below: float | None) -> RolloutFilter:
    from osmosis_ai.store.queries import RolloutFilter

    bounds = [run.pass_threshold] if not_passed else []
    if below is not None:
        bounds.append(below)
    # Both bounds must hold, so the lower one decides.
    return RolloutFilter(failed=failed, tool_errors=tool_errors, below=min(bounds, default=None))


def _given(wanted: RolloutFilter) -> str:
    """Name the options that chose these rollouts."""
    given = {
        f"--run-index {wanted.run_index}": wanted.run_index is not None,
        "--failed": wanted.failed,
        "--tool-errors": wanted.tool_errors,
        f"--below {wanted.below}": wanted.below is not None,
    }
    return " ".join(filter(given.get, given))


def _nothing_there(store: RunStore, run: RunInfo, wanted: RolloutFilter) -> str:
    from osmosis_ai.store.queries import RolloutFilter

    if store.count_rollouts(run.id, RolloutFilter(row=wanted.row)):
        return f"run {run.id} has row {wanted.row}, but no rollout of it for {_given(wanted)}"
    span = store.row_span(run.id)
    there = "it has no rollouts yet" if span is None else f"its rows are within {span[0]} … {span[1]}"
    return f"run {run.id} has no row {wanted.row}; {there}"


def _writable(file: str | None) -> Path | None:
    from osmosis_ai.runtime.run.prepare import check_output

    path = check_output(file, Path.cwd())
    # The file is replaced by a rename, for which its folder must be writable.
    if path is not None and path.is_file() and not os.access(path.resolve().parent, os.W_OK):
        raise UsageError(f"-o {file} can't be replaced: its folder isn't writable")
    return path


@contextmanager
def _session(
    context: typer.Context, root: str | None, store_dir: str | None, json: bool, *, create: bool = False
) -> Iterator[_Session]:
    """Find and open the store, or `create` it; errors in the block are printed and set the exit code."""
    from osmosis_ai.store.run_store import RunStore
    from osmosis_ai.store.schema import database_path

    shared = shared_options(context, root, store_dir, json)
    with command_session() as session:
        repository, folder = stored_runs(session.cwd, shared)
        session.use(repository)
        if not (create or database_path(folder).is_file()):
            where = "" if shared.root is None else f"--root {shared.root}: "
            raise StoreError(
                f"{where}no runs yet in {folder}; `osmosis test` and `osmosis eval` create one, "
                "--root DIR names another repository, and --store DIR another folder of runs"
            )
        with RunStore.open(repository, folder=folder, masker=session.masker, create=create) as opened:
            # An export writes to stdout itself.
            STATUS.clear()
            yield _Session(repository, opened, session.output, session.masker, shared.json)
