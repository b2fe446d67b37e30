"""The command line's root: which commands there are, and how their errors are shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from osmosis_ai.cli import cache, config, eval, eval_rubric, init, not_offered, preview, runs, serve, test, validate
from osmosis_ai.config import RunConfig
from osmosis_ai.errors import OsmosisError
from osmosis_ai.options import declared_options

__all__ = ["app", "run"]

COULD_NOT_START = 2

# Root of what typer raises for a command line it can't read; of the whole family it exports only this member.
_BadCommandLine: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="osmosis",
    help="Run, score and debug rollouts of an MCP repository, locally.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("test")(test.test)
app.add_typer(eval.app, name="eval")
app.command("eval-rubric")(eval_rubric.eval_rubric)
app.command("preview")(preview.preview)
app.command("validate")(validate.validate)
app.command("init")(init.init)
app.command("config")(config.config)
app.add_typer(runs.app, name="runs")
app.add_typer(cache.app, name="cache")
app.command("serve")(serve.serve)
not_offered.add_commands(app, not_offered.COMMANDS)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version and exit.")
) -> None:
    if version:
        from osmosis_ai import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> int:
    """Run the command line and give its exit code."""
    try:
        return int(app(standalone_mode=False) or 0)
    except OsmosisError as error:
        print(f"error: {error}", file=sys.stderr)
    except _BadCommandLine as error:
        print(f"error: {error.format_message()}{_hint(error)}", file=sys.stderr)
        if error.ctx is not None:
            print(f"See {error.ctx.command_path} --help", file=sys.stderr)
    return COULD_NOT_START


def _hint(error: Any) -> str:
    """What to write instead when a dataset stands where a command is expected, or an option of `eval` in `test`."""
    message = error.format_message()
    name = message.removeprefix("No such command '").removesuffix("'.")
    if name != message and Path(name).is_file():
        return f" Name a dataset with -d {name}."
    option = getattr(error, "option_name", None)
    command = error.ctx.info_name if error.ctx is not None else ""
    of_eval = {flag for declared in declared_options(RunConfig) for flag in declared.flags}
    return "; it is an option of osmosis eval" if command == "test" and option in of_eval else ""
