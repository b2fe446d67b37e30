"""`osmosis import`: other tools' logs as runs, their datasets as rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osmosis_ai.cli.options import Json
from osmosis_ai.cli.session import ExitCode, SharedOptions, Store, command_session, stored_runs
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path, replaced_file
from osmosis_ai.text import counted

if TYPE_CHECKING:
    from osmosis_ai.cli.session import CommandSession
    from osmosis_ai.importers.base import ImportedRow, ImportFormat, Problem
    from osmosis_ai.store.views import ImportedFiles, ImportProblem, RunView

__all__ = ["import_files"]

SHOWN_PROBLEMS = 20
SYSTEM_PROMPT = "You are a helpful assistant."
"""For rows of formats that know no system prompt, which a dataset requires."""


def import_files(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Logs, traces, configs or datasets of other tools.")
    ],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="inspect|verifiers|vf-eval|promptfoo|eval-protocol",
            help="The files' format. Default: detected from their content.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name the imported run.")] = None,
    file: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write rows to this .jsonl file.")
    ] = None,
    system_prompt: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="The system prompt of rows that have none. Default: that of a helpful assistant.",
            show_default=False,
        ),
    ] = SYSTEM_PROMPT,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="The repository. Default: that of the working directory."),
    ] = None,
    store_dir: Store = None,
    json: Json = False,
) -> None:
    """Import runs and rows from other tools' files.

    Logs of inspect_ai and traces of verifiers become runs, on which all commands for runs work; their ids are printed.
    Configs of promptfoo and datasets of eval-protocol become rows in the file that -o names. Data that a file lacks,
    such as prices, stays unknown. An unreadable sample is reported and left out.
    """
    with command_session() as session:
        from osmosis_ai.importers import IMPORT_FORMATS, file_in, recognised

        if format is not None and format not in IMPORT_FORMATS:
            raise UsageError(f"--format {format} is not one of {', '.join(IMPORT_FORMATS)}")
        paths = [file_in(given_path(each, session.cwd)) for each in files]
        found = [(path, IMPORT_FORMATS[format] if format else recognised(path)) for path in paths]
        kinds = {each.read_run is None for _, each in found}
        if len(kinds) > 1:
            raise UsageError("some of these files are runs and some are rows; import them with separate commands")
        if kinds == {True}:
            _rows(session, found, file, name, system_prompt, json=json)
        else:
            if file is not None:
                raise UsageError("-o: the files are runs, which go to the store; `osmosis runs export` writes them")
            if name is not None and len(found) > 1:
                raise UsageError("--name names one run; import the files one by one")
            _runs(session, found, name, SharedOptions(root, store_dir, json))


def _runs(
    session: CommandSession, found: Sequence[tuple[Path, ImportFormat]], name: str | None, shared: SharedOptions
) -> None:
    import asyncio

    from osmosis_ai.cli.runs_output import imported_words
    from osmosis_ai.runtime.run.imported import import_run
    from osmosis_ai.store.run_store import RunStore
    from osmosis_ai.store.views import ImportedFiles, run_view

    repository, folder = stored_runs(session.cwd, shared)
    session.use(repository)
    output = session.output
    views: list[RunView] = []
    problems: list[ImportProblem] = []
    with RunStore.open(repository, folder=folder, masker=session.masker) as store:
        for path, format_ in found:
            imported = asyncio.run(import_run(store, format_, path, name))
            run = imported.run
            views.append(run_view(run))
            problems += _reported(session, path, imported.problems)
            if shared.json:
                continue
            if imported.new:
                output.say(f"{path.name}: {counted(run.rollouts, 'rollout')}, {imported_words(run.config['imported'])}")
            else:
                output.say(f"{path.name}: already imported")
            for reason, number in imported.left_out.items():
                output.warn(f"{number} left out: {reason}")
            for note in imported.notes:
                output.warn(note)
            output.line(run.id)
    if shared.json:
        _show(session, ImportedFiles(views, 0, None, problems))
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _rows(
    session: CommandSession,
    found: Sequence[tuple[Path, ImportFormat]],
    file: str | None,
    name: str | None,
    system_prompt: str,
    *,
    json: bool,
) -> None:
    from osmosis_ai.importers.base import Problem
    from osmosis_ai.runtime.run.prepare import check_output
    from osmosis_ai.store.views import ImportedFiles

    if name is not None:
        raise UsageError("--name names a run, and the files are rows")
    if file is None or not file.endswith(".jsonl"):
        raise UsageError("the files are rows: name the dataset to write with -o rows.jsonl")
    if not system_prompt.strip():
        raise UsageError("--system-prompt is empty, and rows need one")
    path = check_output(file, session.cwd)
    assert path is not None
    written = without = 0
    problems: list[ImportProblem] = []
    try:
        with replaced_file(path) as sink:
            for source, format_ in found:
                assert format_.read_rows is not None
                bad: list[Problem] = []
                for row in format_.read_rows(source):
                    if isinstance(row, Problem):
                        bad.append(row)
                        continue
                    sink.write(session.masker.encoded(_encoded(row, system_prompt)) + b"\n")
                    written += 1
                    without += not row.system_prompt
                problems += _reported(session, source, bad)
            if not written:
                # Raised inside the block, so that an earlier file stays.
                raise UsageError(f"{found[0][0]}: no row could be imported; {file} was not written")
    except OSError as error:
        raise UsageError(f"-o {file} could not be written: {error.strerror or error}") from None
    if json:
        _show(session, ImportedFiles([], written, str(path), problems))
    else:
        session.output.say(f"{counted(written, 'row')} written to {file}")
        if without:
            session.output.say(f"{without:,} had no system prompt and got “{system_prompt}” (--system-prompt)")
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _encoded(row: ImportedRow, system_prompt: str) -> bytes:
    import msgspec

    columns = {
        "system_prompt": row.system_prompt or system_prompt,
        "user_prompt": row.user_prompt,
        "ground_truth": row.ground_truth,
    }
    # A column of the same name in any case would make the row unusable.
    taken = {*columns, "solution"}
    others = {f"original_{key}" if key.casefold() in taken else key: value for key, value in row.extra.items()}
    return msgspec.json.encode({**columns, **others})


def _reported(session: CommandSession, path: Path, problems: Sequence[Problem]) -> list[ImportProblem]:
    from osmosis_ai.store.views import ImportProblem

    for problem in problems[:SHOWN_PROBLEMS]:
        where = f", {problem.where}" if problem.where else ""
        session.output.warn(f"{path}{where}: {problem.reason}")
    if len(problems) > SHOWN_PROBLEMS:
        session.output.warn(f"{path}: {len(problems) - SHOWN_PROBLEMS:,} more could not be read")
    return [ImportProblem(str(path), problem.where, problem.reason) for problem in problems]


def _show(session: CommandSession, view: ImportedFiles) -> None:
    from osmosis_ai.store.views import encode_view

    session.output.json(encode_view(view))
