"""`osmosis config`: show the effective options of a run and their sources."""

from __future__ import annotations

import msgspec

from osmosis_ai.cli.options import Given, Json, effective_config, takes
from osmosis_ai.cli.session import command_session
from osmosis_ai.config import RunConfig
from osmosis_ai.text import json_text

__all__ = ["config"]


@takes(RunConfig)
def config(given: Given, json: Json = False) -> None:
    """Show every option of a run with its value and its source.

    The command line wins, then the environment (OSMOSIS_ and the option's name), then [tool.osmosis] in the
    repository's pyproject.toml, then the default. Options given to this command count as the command line.
    """
    from osmosis_ai.cli.console import FAINT
    from osmosis_ai.cli.tables import Cell, Column, Table

    with command_session() as session:
        settings = effective_config(RunConfig, given, session.cwd).settings
        values = ["[masked]" if one.option.option.secret and one.value else one.value for one in settings]
        if json:
            shown = {
                one.option.name: {"value": value, "source": one.source}
                for one, value in zip(settings, values, strict=True)
            }
            session.output.json(msgspec.json.encode(shown))
            return
        table = Table(Column("option", "label"), Column("value", "text"), Column("source", "label"))
        for one, value in zip(settings, values, strict=True):
            text = value if isinstance(value, str) else json_text(value)
            default = one.source == "default"
            cells = (one.option.flag, one.option.default_text if default else text, one.source)
            table.add(*(Cell(cell, FAINT if default else "") for cell in cells))
        session.output.table(table)
