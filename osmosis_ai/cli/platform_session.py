"""Shared by all platform commands: the client, the workspace, and the three forms of output.

By default, commands print tables and text; with `--plain`, tab-separated fields; with `--json`, one envelope on one
line. Every reported error exits with 1, as scripts written for the hosted platform expect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from osmosis_ai.cli.session import CommandSession, ExitCode
from osmosis_ai.errors import OsmosisError

if TYPE_CHECKING:
    from osmosis_ai.cli.tables import Column
    from osmosis_ai.platform.client import Client, Credentials, Server
    from osmosis_ai.platform.home import Home
    from osmosis_ai.platform.workspace import LocalWorkspace
    from osmosis_ai.records import JsonObject

__all__ = ["All", "Format", "Limit", "Plain", "PlatformUrl", "Session", "Yes", "platform_session"]

SCHEMA_VERSION = 1
"""Version of the envelopes, the one that scripts for the hosted platform read."""

Plain = Annotated[bool, typer.Option("--plain", help="Print fields separated by tabs, without headings.")]
PlatformUrl = Annotated[
    str | None,
    typer.Option(
        "--platform", metavar="URL", help="The platform. Default: OSMOSIS_PLATFORM_URL, else the one on this machine."
    ),
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Don't ask.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, max=50, metavar="N", help="List N items. Default: 50.")]
All = Annotated[bool, typer.Option("--all", help="List all items.")]


class Format(NamedTuple):
    """The requested form of output; tables and text if neither flag is set."""

    json: bool = False
    plain: bool = False


class Session:
    """The working environment of a platform command; `client` and `workspace` are looked up at first use."""

    def __init__(self, command: str, form: Format, platform: str | None, *, scoped: bool) -> None:
        self.command = command
        self.form = form
        self.session = CommandSession(quiet=form.json or form.plain)
        self.output = self.session.output
        self._platform = platform
        self._scoped = scoped
        self._workspace: LocalWorkspace | None = None
        self._client: Client | None = None

    @property
    def cwd(self) -> Path:
        """The working directory."""
        return self.session.cwd

    @property
    def home(self) -> Home:
        """The folder of this machine's platform."""
        from osmosis_ai.platform.home import find_home

        return find_home(None, self.session.environ, self.cwd)

    @property
    def credentials(self) -> Credentials:
        """The tokens of logins."""
        from platformdirs import user_config_path

        from osmosis_ai.platform.client import Credentials

        named = self.session.environ.get("OSMOSIS_CREDENTIALS")
        folder = user_config_path("osmosis", appauthor=False)
        return Credentials(Path(named) if named else folder / "credentials.json")

    @property
    def config_folder(self) -> Path:
        """This user's existing folder of credentials."""
        folder = self.credentials.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    @property
    def server(self) -> Server:
        """The platform and its token; raises ClientError."""
        from osmosis_ai.platform.client import find_server

        return find_server(self._platform, self.session.environ, self.home, self.credentials)

    @property
    def workspace(self) -> LocalWorkspace:
        """The workspace; raises ClientError."""
        from osmosis_ai.platform.workspace import find_workspace

        # Kept, because each look-up starts git twice.
        if self._workspace is None:
            self._workspace = find_workspace(self.cwd)
        return self._workspace

    @property
    def client(self) -> Client:
        """The client, for the workspace if the command needs one; raises ClientError."""
        from osmosis_ai.platform.client import Client

        if self._client is None:
            headers = self.workspace.headers if self._scoped else {}
            server = self.server
            self._client = Client(server, headers)
            if server.token is not None:
                self.session.use(self.cwd, keys=[server.token])
        return self._client

    def begin(self) -> None:
        """Read `.env` files, and find the workspace if the command needs one; raises OsmosisError."""
        self.session.use(self.cwd)
        if self._scoped:
            self.session.use(self.workspace.root)

    def items(
        self,
        items: Sequence[JsonObject],
        columns: Sequence[Column],
        cells: Callable[[JsonObject], Sequence[str]],
        total: int,
        *,
        more: JsonObject | None = None,
        empty: str,
    ) -> None:
        """Print a list; `more` holds further members of its envelope."""
        if self.form.json:
            end = len(items)
            page = {"total_count": total, "has_more": end < total, "next_offset": end if end < total else None}
            self._json({"items": items, **page, **(more or {}), **self._place})
        elif self.form.plain:
            self._lines(cells(item) for item in items)
        elif not items:
            self.output.say(empty)
        else:
            from osmosis_ai.cli.tables import Table

            table = Table(*columns)
            for item in items:
                table.add(*cells(item))
            self.output.table(table)
            if total > len(items):
                self.output.say(f"{len(items)} of {total:,}; --all lists all")

    def sections(self, sections: Mapping[str, Sequence[JsonObject]], empty: str, name: str) -> None:
        """Print lists with one column, the items' `name`."""
        if self.form.json:
            pages = {
                title: {"items": items, "total_count": len(items), "has_more": False, "next_offset": None}
                for title, items in sections.items()
            }
            self._json({"sections": pages, **self._place})
        elif self.form.plain:
            self._lines([title, item[name]] for title, items in sections.items() for item in items)
        elif not any(sections.values()):
            self.output.say(empty)
        else:
            for title, items in sections.items():
                for item in items:
                    self.output.line(f"{item[name]}  ({title})")

    def detail(self, data: JsonObject, lines: Sequence[tuple[str, str]]) -> None:
        """Print a single item: its data for `--json`, else labelled lines."""
        if self.form.json:
            self._json({"data": {**data, **self._place}})
        else:
            width = 0 if self.form.plain else max((len(label) for label, _ in lines), default=0) + 1
            for label, value in lines:
                self.output.line(f"{label + ':':<{width}} {_one_line(value) if self.form.plain else value}")

    def operation(
        self,
        operation: str,
        message: str,
        *,
        status: str = "success",
        resource: JsonObject | None = None,
        next_steps: Sequence[JsonObject] = (),
        hints: Sequence[str] = (),
        more: JsonObject | None = None,
    ) -> None:
        """Print what was done, and what to do next."""
        if self.form.json:
            placed = None if resource is None else {"resource": {**resource, **self._place}}
            steps = {"next_steps_structured": list(next_steps)} if next_steps else {}
            self._json(
                {
                    "status": status,
                    "operation": operation,
                    **(placed or {}),
                    "message": message,
                    **steps,
                    **(more or {}),
                }
            )
            return
        self.output.line(message)
        for hint in hints:
            self.output.line(f"  {hint}")

    def warn(self, message: str, code: str = "NOTE") -> None:
        """Print a warning to stderr."""
        if not self.form.json:
            self.output.warn(f"warning: {message}")
            return
        from osmosis_ai import __version__

        self._error({"cli_version": __version__, "warning": {"code": code, "message": message}})

    def confirm(self, operation: str, question: str, context: Sequence[tuple[str, str]] = (), *, yes: bool) -> bool:
        """Ask before an operation, and report if the user declines; raise ClientError without a terminal."""
        if yes:
            return True
        from osmosis_ai.platform.client import ClientError

        if self.form.json or self.form.plain or not sys.stdin.isatty():
            details = {"prompt": question, "summary": [list(pair) for pair in context], "flags": ["--yes"]}
            raise ClientError(f"{question} Can't ask without a terminal: add --yes", "INTERACTIVE_REQUIRED", details)
        for label, value in context:
            self.output.say(f"{label + ':':<14} {value}")
        # On stderr, because stdout may be redirected to a file.
        confirmed = bool(typer.confirm(question, default=True, err=True))
        if not confirmed:
            self.operation(operation, "cancelled: nothing was done", status="cancelled")
        return confirmed

    def fail(self, error: OsmosisError) -> None:
        """Print an error to stderr."""
        code, details = getattr(error, "code", "VALIDATION"), getattr(error, "details", {})
        if not self.form.json:
            self.output.fail(str(error))
            return
        from osmosis_ai import __version__

        failed = {"code": code, "message": str(error), "details": details}
        self._error({"command": self.command, "cli_version": __version__, "error": failed})

    @property
    def _place(self) -> JsonObject:
        return self.workspace.shown() if self._scoped else {}

    def _json(self, content: JsonObject) -> None:
        import msgspec

        self.output.json(msgspec.json.encode({"schema_version": SCHEMA_VERSION, **content}))

    def _error(self, content: JsonObject) -> None:
        import msgspec

        data = self.output.masker.encoded(msgspec.json.encode({"schema_version": SCHEMA_VERSION, **content}))
        sys.stderr.write(f"{data.decode('utf-8')}\n")

    def _lines(self, rows: Iterator[Sequence[str]]) -> None:
        for row in rows:
            self.output.line("\t".join(map(_one_line, row)))


def _one_line(text: str) -> str:
    # A tab or a line break in a value would shift the fields.
    return " ".join(text.split())


@contextmanager
def platform_session(
    context: typer.Context, *, json: bool = False, plain: bool = False, platform: str | None = None, scoped: bool = True
) -> Iterator[Session]:
    """Print the error of a command's block and raise typer.Exit with 1. `scoped` commands belong to a workspace.

    `json`, `plain` and `platform` may also be given before the command's name.
    """
    from osmosis_ai.cli.streams import discard_stdout

    meta = context.meta
    form = Format(json or meta.get("osmosis.json", False), plain or meta.get("osmosis.plain", False))
    command = context.command_path.partition(" ")[2]
    session = Session(command, form, platform or meta.get("osmosis.platform"), scoped=scoped)
    try:
        if form.json and form.plain:
            from osmosis_ai.platform.client import ClientError

            raise ClientError("--json and --plain are mutually exclusive")
        session.begin()
        yield session
    except OsmosisError as error:
        session.fail(error)
        raise typer.Exit(ExitCode.FAILED) from error
    except BrokenPipeError as error:
        # The reader, such as `head`, has seen enough.
        discard_stdout()
        raise typer.Exit from error
    except KeyboardInterrupt as error:
        session.output.warn("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from error
