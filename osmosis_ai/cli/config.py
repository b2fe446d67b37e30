"""`osmosis config`: the effective options of a run, and where each comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from osmosis_ai.cli.options import Given, effective_config, takes
from osmosis_ai.config import RunConfig
from osmosis_ai.text import json_text

__all__ = ["config"]


@takes(RunConfig)
def config(
    given: Given,
    json: Annotated[
        bool, typer.Option("--json", help="One object on one line of stdout, and nothing else there.")
    ] = False,
) -> None:
    """Show every option of a run with its value and where it comes from.

    The command line wins, then the environment (OSMOSIS_ and the option's name), then [tool.osmosis] in the
    repository's pyproject.toml, then the default. Options given here count as those of the command line.
    """
    from rich.table import Table

    from osmosis_ai.cli.session import command_session

    with command_session() as session:
        settings = effective_config(RunConfig, given, session.cwd).settings
        shown = {
            one.option.name: {
                "value": "[masked]" if one.option.option.secret and one.value else one.value,
                "source": one.source,
            }
            for one in settings
        }
        if json:
            session.output.line(json_text(shown))
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("option", "value", "source"):
            table.add_column(heading, overflow="fold")
        for one in settings:
            value = shown[one.option.name]["value"]
            text = (
                one.option.default_text
                if one.source == "default"
                else value
                if isinstance(value, str)
                else json_text(value)
            )
            table.add_row(one.option.flag, str(text), one.source, style="dim" if one.source == "default" else None)
        session.output.result(table)
