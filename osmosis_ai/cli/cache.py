"""`osmosis cache`: show or clear the reply cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json
from osmosis_ai.cli.session import SharedOptions, Store, command_session, shared_options, stored_runs

if TYPE_CHECKING:
    from osmosis_ai.cli.console import Output

__all__ = ["app"]

app = typer.Typer(cls=HelpGroup, invoke_without_command=True)

_Root = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", help="The repository. Default: that of the working directory."),
]


class _Session(NamedTuple):
    """The context of a subcommand."""

    path: Path
    output: Output
    json: bool

    def show(self, values: dict[str, object], text: str) -> None:
        if self.json:
            self.output.json(msgspec.json.encode({"path": str(self.path), **values}))
        else:
            self.output.line(text)


@app.callback()
def cache(context: typer.Context, root: _Root = None, store_dir: Store = None, json: Json = False) -> None:
    """Show how many model replies --cache has stored, their size, and how often they were used."""
    context.obj = SharedOptions(root, store_dir, json)
    if context.invoked_subcommand is not None:
        return
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.models.cache import cache_contents

        found = cache_contents(session.path)
        session.show(
            {"entries": found.entries, "bytes": found.bytes, "hits": found.hits},
            f"{session.path}: {found.entries:,} replies, {_size(found.bytes)}, used {found.hits:,} times",
        )


@app.command(cls=HelpCommand)
def clear(context: typer.Context, root: _Root = None, store_dir: Store = None, json: Json = False) -> None:
    """Remove every stored reply. Runs that use the cache continue and fill it again."""
    with _session(context, root, store_dir, json) as session:
        from osmosis_ai.models.cache import clear_cache

        removed = clear_cache(session.path)
        if removed is None:
            session.show({"removed": None}, f"{session.path} was damaged; removed the whole file")
        else:
            session.show(
                {"removed": {"entries": removed.entries, "bytes": removed.bytes}},
                f"{session.path}: removed {removed.entries:,} replies, {_size(removed.bytes)}",
            )


@contextmanager
def _session(context: typer.Context, root: str | None, store_dir: str | None, json: bool) -> Iterator[_Session]:
    """Find the cache; errors in the block are printed and set the exit code."""
    from osmosis_ai.models.cache import cache_path

    shared = shared_options(context, root, store_dir, json)
    with command_session() as session:
        _, folder = stored_runs(session.cwd, shared)
        yield _Session(cache_path(folder), session.output, shared.json)


def _size(count: int) -> str:
    """Format a number of bytes in the largest unit of which there is at least one."""
    size, units = float(count), iter(("bytes", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
