"""`osmosis preview`: show a rubric file or a dataset as Osmosis reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from osmosis_ai.errors import UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.text import counted

__all__ = ["preview"]


def preview(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A rubric file (YAML), judging records or a dataset.", show_default=False),
    ] = None,
    path: Annotated[str | None, typer.Option("--path", metavar="FILE", help="FILE under an earlier name.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show at most N entries.")] = None,
) -> None:
    """Check a rubric file or a dataset and show every entry."""
    import itertools
    import os

    import msgspec

    from osmosis_ai.cli.console import Output
    from osmosis_ai.masking import Masker

    if (file is None) == (path is None):
        raise UsageError("name one file: osmosis preview FILE")
    name = file or path or ""
    summary, entries, keys = _load(given_path(name, Path()))
    masker = Masker.from_environment(os.environ, keys)
    output = Output(masker.text)
    output.line(f"Loaded {summary} from {name}")
    for entry in itertools.islice(entries, limit):
        output.line(msgspec.json.format(masker.encoded(msgspec.json.encode(entry)), indent=2).decode("utf-8"))


def _load(file: Path) -> tuple[str, Iterable[Any], list[str]]:
    """Return the number and kind of entries as text, the entries, and their API keys."""
    suffix = file.suffix.lower()
    if suffix in (".yaml", ".yml"):
        from osmosis_ai.reward_rubric.configs import load_rubrics

        rubrics = load_rubrics(file)
        keys = [rubric.model_info["api_key"] for rubric in rubrics if rubric.model_info.get("api_key")]
        return counted(len(rubrics), "rubric"), rubrics, keys
    if suffix == ".jsonl":
        from osmosis_ai.reward_rubric.data import holds_solutions, load_records

        if holds_solutions(file):
            records = load_records(file)
            return counted(len(records), "record"), [record.values for record in records], []
    from osmosis_ai.data.dataset import open_dataset
    from osmosis_ai.data.formats import format_of, suffixes

    if format_of(file) is None and file.exists():
        raise UsageError(
            f"{file}: unknown suffix {suffix!r}. A rubric file is .yaml or .yml, a dataset one of {suffixes()}."
        )
    dataset = open_dataset(file)
    return counted(dataset.check().count, "row"), dataset.rows(), []
