"""`osmosis validate`: check a repository before it is pushed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from osmosis_ai.cli.options import Json
from osmosis_ai.cli.session import CommandSession, ExitCode, command_session
from osmosis_ai.compat import FLAGS
from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path

if TYPE_CHECKING:
    from osmosis_ai.validate.validation import Validation

__all__ = ["validate"]

FORMATS = ("text", "json", "github")


def validate(
    repo: Annotated[
        Path,
        typer.Argument(
            metavar="REPO", help="The repository. Default: that of the working directory.", show_default=False
        ),
    ] = Path(),
    dataset: Annotated[
        str | None,
        typer.Option(
            "-d", "--dataset", *FLAGS["--dataset"], metavar="FILE", help="The rows. Default: test_data.jsonl in REPO."
        ),
    ] = None,
    answer_form: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEMPLATE",
            help="Also try right answers in this form, such as 'Result: {answer}' (repeatable).",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--module",
            *FLAGS["--module"],
            metavar="MODULE:ATTR",
            help="Check this agent loop instead, as `osmosis serve` does before serving it.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="CODE", help="Ignore findings of this code, such as OSM310 (repeatable)."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="With -m: show each tool's description and schema.")
    ] = False,
    static: Annotated[bool, typer.Option("--static", help="Read source only; run no user code.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on warnings too.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit for loading tools, and for loading functions.")
    ] = 30.0,
    form: Annotated[str, typer.Option("--format", metavar="text|json|github", help="Report format.")] = "text",
    json: Json = False,
) -> None:
    """Check a repository before you push it: tools, rewards, dataset, configs, git.

    Tries every reward function with right, wrong, empty and odd answers, to show what it really rewards.
    docs/checks.md lists every finding's code with its cause and remedy.
    """
    import asyncio

    from osmosis_ai.discovery.agents import resolve_agent
    from osmosis_ai.discovery.repository import root_above
    from osmosis_ai.validate.ignoring import ignored_codes
    from osmosis_ai.validate.probes import parse_answer_form
    from osmosis_ai.validate.validation import ValidationOptions, validate_agent, validate_repository

    form = "json" if json else form
    if form not in FORMATS:
        raise UsageError(f"--format {form}: one of {', '.join(FORMATS)}")
    with command_session() as session:
        # Not resolve(): findings show the path that the user gave.
        root = Path(os.path.abspath(session.cwd / repo))  # noqa: PTH100
        if root == session.cwd:
            root = root_above(root)
        if not root.is_dir():
            what = "is a file, not a folder" if root.exists() else "doesn't exist"
            raise UsageError(f"{repo} {what}; name the repository's root")
        try:
            forms = tuple(parse_answer_form(template) for template in answer_form or [])
        except ValueError as error:
            raise UsageError(str(error)) from None
        data = None if dataset is None else given_path(dataset, session.cwd)
        if data is not None and not data.is_file():
            raise UsageError(f"-d {dataset}: there is no such file")
        if agent is not None and static:
            raise UsageError("-m runs the agent loop's module, which --static forbids; remove one of them")
        # An unreadable .env is reported as a finding.
        with suppress(UsageError):
            session.use(root)
        options = ValidationOptions(
            static=static,
            dataset=None if data is None else str(data),
            forms=forms,
            ignore=ignored_codes(ignore or [], root),
            load_seconds=timeout,
        )
        if agent is not None:
            validation = asyncio.run(validate_agent(resolve_agent(agent, root), options))
        else:
            validation = asyncio.run(validate_repository(root, options, session.environ))
        _report(validation, form, root, session, static=static, agent=agent is not None, verbose=verbose)
    counting = ("error", "warning") if strict else ("error",)
    counted = any(one.severity in counting for one in validation.findings)
    raise typer.Exit(ExitCode.FAILED if counted else ExitCode.OK)


def _report(
    validation: Validation, form: str, root: Path, session: CommandSession, *, static: bool, agent: bool, verbose: bool
) -> None:
    from osmosis_ai.cli.validate_output import print_agent, print_annotations, print_validation

    output = session.output
    if form == "json":
        found = {"findings": validation.findings, "ignored": validation.ignored}
        output.json(msgspec.json.encode({"components": validation.components, **found}))
    elif form == "github":
        print_annotations(validation, Path(os.path.relpath(root, session.cwd)), output)
    elif agent:
        print_agent(validation, output, verbose=verbose)
    else:
        print_validation(validation, output, static=static)
