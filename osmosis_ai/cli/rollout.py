"""`osmosis rollout`: create, list, check and serve the rollouts of a workspace."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json
from osmosis_ai.cli.platform_data import list_submitted
from osmosis_ai.cli.platform_session import Plain, PlatformUrl
from osmosis_ai.cli.session import CommandSession, ExitCode, Store, command_session, interrupts
from osmosis_ai.errors import RepositoryError, UsageError

if TYPE_CHECKING:
    from osmosis_ai.discovery.workflows import WorkflowSource

__all__ = ["app"]

NAME = re.compile(r"[a-z][a-z0-9-]*")

app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Create, list, check and serve workflow rollouts.")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A folder in rollouts/, or a path to one.")]
_OwnSdk = Annotated[
    bool, typer.Option("--own-sdk", help="Run on this command's SDK, ignoring the one that the rollout declares.")
]


@app.command(cls=HelpCommand)
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Small letters, digits and dashes.")],
    force: Annotated[bool, typer.Option("-f", "--force", help="Overwrite files that exist.")] = False,
) -> None:
    """Create a rollout that runs offline right away: a workflow and a grader, with configs and rows.

    The files go into the workspace of the working directory.
    """
    from osmosis_ai.cli.scaffold import TEMPLATES, template, write_new
    from osmosis_ai.discovery.workflows import workspace_above

    if not NAME.fullmatch(name) or name == "default":
        raise UsageError(f"a rollout can't be called {name!r}: begin with a small letter; digits and dashes may follow")
    with command_session() as session:
        root, folder = workspace_above(session.cwd), Path("rollouts", name)
        places = {
            "main.py": folder / "main.py",
            "pyproject.toml": folder / "pyproject.toml",
            "README.md": folder / "README.md",
            "eval.toml": Path("configs", "eval", f"{name}.toml"),
            "training.toml": Path("configs", "training", f"{name}.toml"),
            "rows.jsonl": Path("data", f"{name}.jsonl"),
        }
        texts = {root / place: template(TEMPLATES / "rollout" / f"{file}.txt", name) for file, place in places.items()}
        write_new(root, texts, "init overwrites nothing without -f", overwrite=force)
        for place in places.values():
            session.output.line(place.as_posix())
        session.output.say("\nnext:")
        session.output.say(f"  osmosis rollout validate {name}")
        session.output.say(f"  osmosis eval run configs/eval/{name}.toml --model offline/oracle")


@app.command("list", cls=HelpCommand)
def list_(
    context: typer.Context,
    remote: Annotated[
        bool, typer.Option("--remote", help="List the rollouts submitted to the platform instead.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option("--branch", metavar="NAME", help="With --remote: only rollouts of this branch.")
    ] = None,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """List the workspace's rollouts, each with its SDK and the configs that name it."""
    if remote:
        list_submitted(context, branch, json=json, plain=plain, platform=platform)
        return
    from osmosis_ai.discovery.workflows import list_rollouts, workspace_above

    with command_session() as session:
        root = workspace_above(session.cwd)
        found = list_rollouts(root)
        if json:
            session.output.json(msgspec.json.encode({"rollouts": found}))
        elif not found:
            session.output.say(f"no rollouts in {root / 'rollouts'}; `osmosis rollout init NAME` creates one")
        else:
            from osmosis_ai.cli.tables import Column, Table

            table = Table(Column("rollout", "name"), Column("SDK", "label"), Column("configs", "list"))
            for one in found:
                sdk = "this command's" if one.sdk == "own" else one.requires or "none declared"
                table.add(one.name, sdk, ", ".join(one.configs) or "none")
            session.output.table(table)


@app.command(cls=HelpCommand)
def validate(
    name: _Name,
    dataset: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--dataset",
            metavar="FILE",
            help="Try a row of this file. Default: the dataset of its eval config, or a made-up row.",
        ),
    ] = None,
    own_sdk: _OwnSdk = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit for the workflow, and for the grader.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Check a rollout with one row and no model: it starts, runs, is graded, and its reward is a finite number.

    The row's solution or ground truth stands in for the model's replies. Codes are listed in docs/checks.md.
    """
    with command_session() as session:
        from osmosis_ai.cli.validate_output import print_rollout
        from osmosis_ai.validate.rollouts import validate_rollout

        source, root = _find(session, name, None, own_sdk=own_sdk)
        data = None if dataset is None else _dataset(dataset, session.cwd)
        validation = validate_rollout(source, root, data, timeout)
        if json:
            found = {"findings": validation.findings, "ignored": validation.ignored}
            session.output.json(msgspec.json.encode({"components": validation.components, **found}))
        else:
            print_rollout(validation, session.output)
    raise typer.Exit(ExitCode.FAILED if any(one.severity == "error" for one in validation.findings) else ExitCode.OK)


@app.command(cls=HelpCommand)
def serve(
    name: _Name,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The port for the server.")] = 8000,
    own_sdk: _OwnSdk = False,
    store_dir: Store = None,
) -> None:
    """Start only a rollout's server, for a trainer that sends rollouts to it.

    The server's environment names its port and a folder for artifacts; its output goes to stderr.
    """
    import asyncio

    with command_session() as session:
        source, _ = _find(session, name, store_dir, own_sdk=own_sdk)
        code = asyncio.run(_serve(source, port, session))
    raise typer.Exit(code)


async def _serve(source: WorkflowSource, port: int, session: CommandSession) -> int:
    import anyio

    from osmosis_ai.cli.status import STATUS
    from osmosis_ai.runtime.worker.workflows.environments import interpreter_of
    from osmosis_ai.runtime.worker.workflows.server_process import ServerCommand, ServerProcess

    show: Callable[[str], None] = session.output.say
    STATUS.wait_for(f"preparing the environment of {source.name}")
    with anyio.CancelScope() as scope, interrupts(scope.cancel):
        python = await anyio.to_thread.run_sync(interpreter_of, source)
        STATUS.wait_for(f"starting {source.name}")
        command = ServerCommand(str(python), source.entrypoint, source.artifacts)
        async with ServerProcess.open(command, show, port=port) as running:
            STATUS.clear()
            show(f"{source.name} listens on port {port}; artifacts go to {source.artifacts}; press Ctrl-C to stop")
            code = await running.wait()
        raise RepositoryError(f"{source.entrypoint}: the rollout server ended with code {code}")
    # Only Ctrl-C, which cancels the scope, leads here.
    return ExitCode.INTERRUPTED


def _find(session: CommandSession, name: str, store: str | None, *, own_sdk: bool) -> tuple[WorkflowSource, Path]:
    """Return a rollout and its workspace, after reading the workspace's `.env`."""
    from osmosis_ai.config import StoreConfig
    from osmosis_ai.discovery.workflows import find_workflow, workflow_root
    from osmosis_ai.runtime.run.prepare import find_store

    source = find_workflow(name, session.cwd, Path(), own_sdk=own_sdk)
    root = workflow_root(source.entrypoint, session.cwd)
    session.use(root)
    artifacts = find_store(StoreConfig(store), root, session.cwd) / "artifacts"
    return msgspec.structs.replace(source, artifacts=str(artifacts.absolute())), root


def _dataset(given: str, cwd: Path) -> Path:
    from osmosis_ai.folders import given_path

    path = given_path(given, cwd)
    if not path.is_file():
        raise UsageError(f"-d {given}: there is no such file")
    return path
