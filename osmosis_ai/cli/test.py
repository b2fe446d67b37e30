"""`osmosis test`: run the agent over a dataset."""

from __future__ import annotations

import typer

from osmosis_ai.cli.options import RunOptions, run_options, takes

__all__ = ["test"]


@takes(run_options)
def test(options: RunOptions) -> None:
    """Run the agent over a dataset and score it with every reward function of the repository."""
    from osmosis_ai.cli.start import start

    raise typer.Exit(start(options.request("test"), options))
