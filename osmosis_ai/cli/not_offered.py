"""Commands that belong to the platform. They are not offered yet, and say what works locally instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from osmosis_ai.errors import UsageError

__all__ = ["COMMANDS", "EVAL_COMMANDS", "add_commands"]

PANEL = "Not offered yet"

_ACCOUNT = "everything here runs locally, without an account"
_RUNS = "`osmosis eval` runs here, and `osmosis runs` lists what has run"
COMMANDS = {
    "login": _ACCOUNT,
    "logout": _ACCOUNT,
    "whoami": _ACCOUNT,
    "workspace": f"{_ACCOUNT}: the folder you are in is the workspace",
    "train": "`osmosis validate` checks configs/training, and `osmosis serve` offers an agent to a trainer of yours",
    "dataset": "name a file with -d FILE; `osmosis preview` shows its rows",
    "secret": "put keys into the environment or into a .env file",
}
EVAL_COMMANDS = {
    "submit": f"{_RUNS}; `osmosis validate` checks configs/eval",
    "list": _RUNS,
    "info": "`osmosis runs show RUN` shows a run of this machine",
    "stop": "Ctrl-C stops a run here, and --resume goes on with it",
}


def add_commands(app: typer.Typer, commands: dict[str, str], group: str = "osmosis") -> None:
    """Add commands that exist, and say that they are not offered yet.

    Args:
        app: Where.
        commands: What works locally instead, by the command's name.
        group: What stands before the name.
    """
    for name, instead in commands.items():
        app.command(
            name,
            help=f"Not offered yet: {instead}.",
            rich_help_panel=PANEL,
            # Whatever belongs to it: the answer is the same.
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_refusing(f"{group} {name}", instead))


def _refusing(name: str, instead: str) -> Callable[..., None]:
    def command(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        raise UsageError(f"`{name}` is not offered yet; {instead}")

    return command
