"""`osmosis serve`: offer an agent to a trainer, over the remote rollout protocol."""

from __future__ import annotations

import typer

from osmosis_ai.cli.options import Given, takes
from osmosis_ai.serve.config import ServeConfig

__all__ = ["serve"]


@takes(ServeConfig)
def serve(given: Given) -> None:
    """Offer an agent to a trainer: each rollout it asks for runs in a worker process, against the trainer's model.

    A loop that raises, hangs or takes its process down costs its own rollout, which is reported to the trainer as
    failed.
    """
    from osmosis_ai.cli.serving import serve_agent

    raise typer.Exit(serve_agent(given))
