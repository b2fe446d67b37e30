"""The command line's root: register the commands and print their errors."""

from __future__ import annotations

import copy
import errno
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from osmosis_ai.cli import (
    account,
    cache,
    config,
    eval_rubric,
    import_files,
    init,
    platform,
    preview,
    rollout,
    runs,
    validate,
    view,
)
from osmosis_ai.cli.help import CONTEXT, HelpCommand, HelpGroup
from osmosis_ai.cli.options import Given, OutputConfig, takes
from osmosis_ai.cli.platform_data import dataset_app, model_app, secret_app
from osmosis_ai.cli.platform_runs import add_eval_commands, train_app
from osmosis_ai.cli.streams import discard_stdout
from osmosis_ai.compat import COMMANDS
from osmosis_ai.config import Command, RunConfig
from osmosis_ai.errors import OsmosisError, UsageError
from osmosis_ai.options import declared_options
from osmosis_ai.serve.config import ServeConfig

__all__ = ["app", "run"]

COULD_NOT_START = 2

# Base class of typer's errors for a bad command line; typer exports only this subclass.
_BadCommandLine: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="osmosis",
    cls=HelpGroup,
    help="Run, score and debug rollouts of an MCP repository, locally.",
    # Older versions of typer show local variables in tracebacks, and those may hold keys.
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
# `osmosis eval` is both a command with options and a group of subcommands.
eval_app = typer.Typer(cls=HelpGroup, invoke_without_command=True)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "-V", "--version", help="Show the version and exit."),
    # Scripts written for the hosted platform give these before the command; each command explains its own.
    json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
    plain: Annotated[bool, typer.Option("--plain", hidden=True)] = False,
    platform: Annotated[str | None, typer.Option("--platform", hidden=True)] = None,
) -> None:
    context.meta.update({"osmosis.json": json, "osmosis.plain": plain, "osmosis.platform": platform})
    if version:
        from osmosis_ai import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@takes(RunConfig, OutputConfig, command="test")
def run_test(
    given: Given,
    interactive: Annotated[
        bool,
        typer.Option(
            "-i",
            "--interactive",
            help="Step through rollouts at a prompt; ? lists the commands.",
            rich_help_panel="Interactive",
        ),
    ] = False,
    row: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="With -i: the row to start with.", rich_help_panel="Interactive"),
    ] = None,
) -> None:
    """Run the agent over a dataset and score it with every reward function."""
    if interactive:
        from osmosis_ai.cli.interactive import interact

        raise typer.Exit(interact(given, row))
    if row is not None:
        raise UsageError("--row goes with --interactive; --offset and --limit choose the rows of a run")
    _run(given, "test")


@eval_app.callback()
@takes(RunConfig, OutputConfig, command="eval")
def evaluate(context: typer.Context, given: Given) -> None:
    """Run the agent over a dataset and score its rollouts, with statistics."""
    if context.invoked_subcommand is None:
        _run(given, "eval")


@eval_app.command("run", cls=HelpCommand)
@takes(RunConfig, OutputConfig, command="eval")
def evaluate_config(
    given: Given,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="The run config, as in configs/eval/my-rollout.toml.")
    ],
    dataset_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Read the rows from this file; the same as -d.", rich_help_panel="Config"),
    ] = None,
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Run up to N rollouts at a time; the same as --batch-size.",
            rich_help_panel="Config",
        ),
    ] = None,
    secrets_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Read the config's secrets from this dotenv file; - is stdin.",
            rich_help_panel="Config",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the server's output; the same as --debug.", rich_help_panel="Config")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", hidden=True)] = False,
    upload: Annotated[bool, typer.Option("--upload", hidden=True)] = False,
    rollout_port: Annotated[int | None, typer.Option("--rollout-port", metavar="PORT", hidden=True)] = None,
) -> None:
    """Evaluate the rollout, model and dataset that a run config names; options override it.

    -o DIR writes the run's files into a folder of its name in DIR. The exit code is 0 once every rollout is recorded,
    even if some failed.
    """
    from osmosis_ai.cli.eval_run import evaluate_config

    # The options of earlier versions. Nothing is ever asked, so --yes changes nothing.
    if upload:
        raise UsageError("--upload: results stay on this machine; -o DIR and `osmosis runs export` write them to files")
    if rollout_port is not None:
        raise UsageError(
            "--rollout-port: each server has a free port of its own, because a new one starts while the old one ends; "
            "leave the option out, and let main.py listen on the port in _OSMOSIS_ROLLOUT_PORT"
        )
    also = {"dataset": dataset_file, "batch_size": max_in_flight, "debug": verbose or None}
    typed = {**{name: value for name, value in also.items() if value is not None}, **given}
    raise typer.Exit(evaluate_config(config, typed, secrets_file))


def _run(given: Given, command: Command) -> None:
    if given.get("watch"):
        from osmosis_ai.cli.watch import watch_command

        raise typer.Exit(watch_command(lambda: given, command))
    from osmosis_ai.cli.run import run_command

    raise typer.Exit(run_command(given, command))


@takes(ServeConfig)
def serve(given: Given) -> None:
    """Serve an agent to a trainer, which supplies the model.

    Each requested rollout runs in a worker process. A loop that raises, hangs or crashes its process fails only its own
    rollout, which is reported to the trainer. With --mcp results have no reward: the trainer scores them.
    """
    from osmosis_ai.cli.serving import serve_agent

    raise typer.Exit(serve_agent(given))


_COMMANDS: dict[str, Callable[..., None]] = {
    "test": run_test,
    "eval-rubric": eval_rubric.eval_rubric,
    "preview": preview.preview,
    "validate": validate.validate,
    "init": init.init,
    "config": config.config,
    "view": view.view,
    "import": import_files.import_files,
    "serve": serve,
    "doctor": account.doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=HelpCommand)(_command)
_SECOND_NAMED: dict[str, Callable[..., None]] = {
    "auth login": account.login,
    "auth logout": account.logout,
    "auth whoami": account.whoami,
}
_GROUPS = {
    "eval": eval_app,
    "rollout": rollout.app,
    "runs": runs.app,
    "cache": cache.app,
    "platform": platform.app,
    "dataset": dataset_app,
    "secret": secret_app,
    "model": model_app,
    "train": train_app,
    "auth": account.auth_app,
}
for _name, _group in _GROUPS.items():
    app.add_typer(_group, name=_name)
add_eval_commands(eval_app)
# Earlier names of commands, which scripts still use.
for _name, _today in COMMANDS.items():
    (eval_app if _name.startswith("eval ") else app).command(_name.rpartition(" ")[2], cls=HelpCommand)(
        {**_COMMANDS, **_SECOND_NAMED}[_today]
    )


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        arguments: The command line without the program's name; None for this process's.
    """
    try:
        typed = sys.argv[1:] if arguments is None else arguments
        # Standalone, click would print errors in its own form and exit by itself.
        return int(_root_command(typed[0] if typed else "")(arguments, standalone_mode=False) or 0)
    except OsmosisError as error:
        _fail(str(error))
    except OSError as error:
        # A help page that can't be printed; commands report their own errors.
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        discard_stdout()
        _fail(f"stdout can't be written: {error.strerror}")
    except _BadCommandLine as error:
        _fail(f"{error.format_message()}{_hint(error)}")
        if error.ctx is not None:
            # The exit code says enough.
            with suppress(OSError):
                print(f"See {error.ctx.command_path} --help", file=sys.stderr)
    return COULD_NOT_START


@functools.cache
def _root_command(first: str) -> Any:
    """Return the commands that a command line with this first word may name."""
    # Typer reads the signatures of all commands that it is given, a quarter of what `osmosis runs` needs to start. And
    # a process may run many command lines.
    named = copy.copy(app)
    named.registered_commands = [each for each in app.registered_commands if each.name == first]
    named.registered_groups = [each for each in app.registered_groups if each.name == first]
    # Help, completion, options before the command, and a misspelt command need all of them.
    return typer.main.get_command(named if named.registered_commands or named.registered_groups else app)


def _fail(message: str) -> None:
    from osmosis_ai.cli.console import Output

    Output().fail(message)


def _hint(error: Any) -> str:
    """Return a hint for a dataset given in place of a command, or for an option of `eval` used with `test`."""
    message = error.format_message()
    # The error has no field for the name, so take it from click's text.
    name = message.removeprefix("No such command '").removesuffix("'.")
    if name != message and Path(name).is_file():
        return f" Name a dataset with -d {name}."
    option = getattr(error, "option_name", None)
    command = error.ctx.info_name if error.ctx is not None else ""
    of_eval = {flag for declared in declared_options(RunConfig) for flag in declared.flags}
    return "; it is an option of osmosis eval" if command == "test" and option in of_eval else ""
