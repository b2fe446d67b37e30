"""`osmosis test`: run the agent over a dataset."""

from __future__ import annotations

from typing import Annotated

import typer

from osmosis_ai.cli.options import Given, OutputConfig, takes
from osmosis_ai.config import RunConfig
from osmosis_ai.errors import UsageError

__all__ = ["test"]


@takes(RunConfig, OutputConfig, command="test")
def test(
    given: Given,
    interactive: Annotated[
        bool,
        typer.Option("-i", "--interactive", help="Stop at each model call; n goes on, ? lists the commands."),
    ] = False,  # noqa: PT028 - a command, no test
    row: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="With --interactive: the row to begin with.")
    ] = None,  # noqa: PT028
) -> None:
    """Run the agent over a dataset and score it with every reward function of the repository."""
    if interactive:
        from osmosis_ai.cli.interactive import interact

        raise typer.Exit(interact(given, row))
    if row is not None:
        raise UsageError("--row goes with --interactive; --offset and --limit choose the rows of a run")
    if given.get("watch"):
        from osmosis_ai.cli.watch import watch_command

        raise typer.Exit(watch_command(given, "test"))
    from osmosis_ai.cli.run import run_command

    raise typer.Exit(run_command(given, "test"))
