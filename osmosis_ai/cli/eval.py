"""`osmosis eval`: run the agent over a dataset and score it, with statistics. Also a group of subcommands."""

from __future__ import annotations

import typer

from osmosis_ai.cli.eval_rubric import eval_rubric
from osmosis_ai.cli.not_offered import EVAL_COMMANDS, add_commands
from osmosis_ai.cli.options import Given, OutputConfig, takes
from osmosis_ai.config import RunConfig

__all__ = ["app"]

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.command("rubric")(eval_rubric)
add_commands(app, EVAL_COMMANDS, "osmosis eval")


@app.callback()
@takes(RunConfig, OutputConfig, command="eval")
def evaluate(context: typer.Context, given: Given) -> None:
    """Run the agent over a dataset and score what comes out, with statistics."""
    if context.invoked_subcommand is not None:
        return
    if given.get("watch"):
        from osmosis_ai.cli.watch import watch_command

        raise typer.Exit(watch_command(given, "eval"))
    from osmosis_ai.cli.run import run_command

    raise typer.Exit(run_command(given, "eval"))
