"""`osmosis preview`: show a rubric file or a dataset as Osmosis reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.records import JsonValue
from osmosis_ai.text import counted

__all__ = ["preview"]

ENTRIES = 20
"""Entries shown, unless --limit or --full says otherwise."""
CHARACTERS = 1000
"""Characters shown of a text, unless --full is given."""


def preview(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A rubric file (YAML), judging records or a dataset.", show_default=False),
    ] = None,
    path: Annotated[
        str | None, typer.Option("--path", metavar="FILE", help="The earlier name of the argument FILE.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"Show at most N entries. Default: {ENTRIES}.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every entry, and long values whole.")] = False,
) -> None:
    """Check a rubric file or a dataset and show its entries."""
    import itertools
    import os

    import msgspec

    from osmosis_ai.cli.console import Output
    from osmosis_ai.masking import Masker

    if (file is None) == (path is None):
        raise UsageError("name one file: osmosis preview FILE")
    name = file or path or ""
    count, summary, entries, keys = _load(given_path(name, Path()))
    masker = Masker.from_environment(os.environ, keys)
    output = Output(masker)
    output.line(f"Loaded {summary} from {name}")
    most = count if full and limit is None else limit or ENTRIES
    for entry in itertools.islice(entries, most):
        shown = msgspec.to_builtins(entry)
        encoded = msgspec.json.encode(shown if full else _shortened(shown))
        output.json(msgspec.json.format(encoded, indent=2))
    if count > most:
        output.say(f"… and {count - most:,} more; --limit N shows more of them, --full all")


def _shortened(value: JsonValue) -> JsonValue:
    """Cut long texts at any depth."""
    if isinstance(value, str) and len(value) > CHARACTERS:
        return f"{value[:CHARACTERS]}… ({len(value):,} characters; --full shows all)"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return {key: _shortened(item) for key, item in value.items()} if isinstance(value, dict) else value


def _load(file: Path) -> tuple[int, str, Iterable[Any], list[str]]:
    """Return the number of entries, their number and kind as text, the entries, and their API keys."""
    suffix = file.suffix.lower()
    if suffix in (".yaml", ".yml"):
        from osmosis_ai.reward_rubric.configs import load_rubrics

        rubrics = load_rubrics(file)
        keys = [rubric.model_info["api_key"] for rubric in rubrics if rubric.model_info.get("api_key")]
        return len(rubrics), counted(len(rubrics), "rubric"), rubrics, keys
    if suffix == ".jsonl":
        from osmosis_ai.reward_rubric.data import holds_solutions, load_records

        if holds_solutions(file):
            records = load_records(file)
            return len(records), counted(len(records), "record"), [record.values for record in records], []
    from osmosis_ai.data.dataset import open_dataset
    from osmosis_ai.data.formats import format_of, suffixes

    if format_of(file) is None and file.exists():
        raise UsageError(
            f"{file}: unknown suffix {suffix!r}. A rubric file is .yaml or .yml, a dataset one of {suffixes()}."
        )
    dataset = open_dataset(file)
    # Checked first, so that no row of an unusable file is printed.
    count = dataset.check().count
    return count, counted(count, "row"), dataset.rows(), []
