"""`osmosis view`: show runs in the browser."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from osmosis_ai.cli.options import Json
from osmosis_ai.cli.session import ExitCode, SharedOptions, Store, command_session, shared_options, stored_runs
from osmosis_ai.cli.status import STATUS
from osmosis_ai.errors import OutputError, StoreError, UsageError
from osmosis_ai.folders import given_path, private_file, replaced_file
from osmosis_ai.text import counted

if TYPE_CHECKING:
    from osmosis_ai.cli.session import CommandSession
    from osmosis_ai.config import RunConfig
    from osmosis_ai.store.queries import RunInfo
    from osmosis_ai.viewer.stores import Repository, Stores

__all__ = ["BesideRun", "view"]

CLOSE_SECONDS = 5.0
"""How long a viewer beside a run may take to stop."""


def view(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Open this run: its id, the beginning of one, or `latest`."),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(
            "--root", metavar="DIR", help="A repository (repeatable). Default: that of the working directory."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0 for a free one.")] = 0,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow a --host that other machines can reach.")
    ] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address; don't open a browser.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the run as one HTML file, and serve nothing.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="With --html: only rows that failed or could not be scored.")
    ] = False,
    rows: Annotated[str | None, typer.Option(metavar="ROWS", help="With --html: only these rows: 0-49,60.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="The run to compare with; it comes before RUN.")
    ] = None,
    flipped: Annotated[
        bool, typer.Option("--flipped", help="With --html and --against: only rows that flipped.")
    ] = False,
    store_dir: Store = None,
    json: Json = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True, help="Stop at EOF on stdin.")] = False,
) -> None:
    """Show runs in the browser, even while they are running."""
    with command_session() as session:
        from osmosis_ai.rollout.server.serve import open_socket
        from osmosis_ai.urls import is_loopback

        if not (allow_remote or is_loopback(host)):
            raise UsageError(f"--host {host} lets other machines reach the viewer: add --allow-remote if they may")
        shared = shared_options(context, None, store_dir, json)
        roots: list[str | None] = [*root] if root else [shared.root]
        if shared.store is not None and len(roots) > 1:
            raise UsageError("--store names the runs of one repository, but there are several --root")
        found = [stored_runs(session.cwd, SharedOptions(each, shared.store)) for each in roots]
        session.use(*(repository for repository, _ in found))
        with _opened(found) as stores:
            if html is not None:
                file, written = _write(stores, run or "latest", against, session, html, failed, rows, flipped)
                if shared.json:
                    session.output.json(msgspec.json.encode({"file": file, "rows": written}))
                else:
                    session.output.say(f"{counted(written, 'row')} written to {file}")
                return
            for name, given in (("--failed", failed), ("--rows", rows is not None), ("--flipped", flipped)):
                if given:
                    raise UsageError(
                        f"{name} chooses the rows of a file: add --html FILE; a page has filters of its own"
                    )
            path = _path(stores, run, against)
            with open_socket(host, port) as listener:
                if until_eof:
                    threading.Thread(target=_stop_at_eof, daemon=True).start()
                _serve(stores, listener, host, path, session, json=shared.json, opens=not no_open)


def open_browser(url: str, folder: Path) -> None:
    """Open a URL that holds a token, if there is a screen."""
    # Imported here, because every command imports this module.
    import webbrowser
    from html import escape

    # A text browser would take over the terminal.
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & os.environ.keys():
        return
    # Every user of the machine sees the arguments of a browser's process, so they name a file that leads to the URL.
    file = folder / "open.html"
    private_file(file)
    file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">', encoding="utf-8")
    with suppress(webbrowser.Error):
        webbrowser.open(file.as_uri())


class BesideRun:
    """A viewer in a process of its own, beside a command. As a context manager it ends with its block."""

    def __init__(self, session: CommandSession, config: RunConfig, *, shown: bool) -> None:
        self._session = session
        self._config = config
        self._shown = shown
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BesideRun:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            # Closing its stdin stops it.
            self._process.stdin.close()
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def open(self, run: str) -> None:
        """Show a run, if the user wants to see it. Doesn't wait for the viewer."""
        if not self._shown:
            return
        from osmosis_ai.runtime.run.prepare import find_agent, find_store

        _, repository = find_agent(self._config.agent, self._session.cwd)
        store = find_store(self._config.store, repository.root, self._session.cwd)
        where = ["--root", str(repository.root), "--store", str(store), "--json", "--until-eof"]
        self._process = subprocess.Popen(  # noqa: S603 - this command itself
            [sys.executable, "-m", "osmosis_ai", "view", run, *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C ends the run, whose last rollouts are worth watching.
            start_new_session=True,
        )
        threading.Thread(target=self._introduce, args=(self._process,), daemon=True).start()

    def stay(self) -> None:
        """Keep the viewer open until Ctrl-C, if there is a terminal to type it at."""
        if self._process is None or not (sys.stdin is not None and sys.stdin.isatty()):
            return
        self._session.output.say("the viewer stays open; press Ctrl-C to close it")
        with suppress(KeyboardInterrupt):
            self._process.wait()

    def _introduce(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if line:
            self._session.output.say(f"the viewer is at {msgspec.json.decode(line)['url']}")
            # A full pipe would stop the viewer.
            while process.stderr.read(1 << 16):
                pass
            return
        reason = process.stderr.read().decode("utf-8", "replace").strip()
        # Any other code means that it was stopped before it was ready.
        if process.wait() == ExitCode.COULD_NOT_START:
            self._session.output.warn(f"the viewer could not start: {reason}")


@contextmanager
def _opened(found: Sequence[tuple[Path, Path]]) -> Iterator[Stores]:
    from osmosis_ai.viewer.stores import Stores

    stores = Stores(found)
    try:
        yield stores
    finally:
        stores.close()


def _find(stores: Stores, run: str) -> tuple[Repository, RunInfo]:
    """Find a run in one of the repositories; raises StoreError."""
    errors: list[StoreError] = []
    for repository in stores:
        try:
            return repository, repository.runs.find_run(run)
        except StoreError as error:
            errors.append(error)
    raise errors[0]


def _path(stores: Stores, run: str | None, against: str | None) -> str:
    """Return the path of the page to open first; raises StoreError if there is no such run."""
    from osmosis_ai.viewer.addresses import compare_path, run_path

    if against is not None:
        repository, found = _find(stores, run or "latest")
        before = repository.runs.find_run(against)
        return compare_path(repository.name, before.id, found.id)
    if run is None:
        return "/"
    if run == "latest":
        # This page follows the runs of `--watch`, and waits for the first one.
        return run_path(next(iter(stores)).name, "latest")
    repository, found = _find(stores, run)
    return run_path(repository.name, found.id)


def _write(
    stores: Stores,
    run: str,
    against: str | None,
    session: CommandSession,
    file: str,
    failed: bool,
    rows: str | None,
    flipped: bool,
) -> tuple[str, int]:
    """Write the file of `--html`; return its path and the number of rows in it."""
    from osmosis_ai.viewer.report import Wanted, parse_rows, write_report
    from osmosis_ai.viewer.site import Site

    if flipped and against is None:
        raise UsageError("--flipped needs a run to compare with: add --against RUN")
    path = given_path(file, session.cwd)
    repository, found = _find(stores, run)
    before = None if against is None else repository.runs.find_run(against)
    wanted = Wanted("failed" if failed else None, None if rows is None else parse_rows(rows), before, flipped)
    try:
        with replaced_file(path) as sink:
            return file, write_report(sink, Site(stores, session.masker, masked=True), repository, found, wanted)
    except OSError as error:
        raise OutputError(f"{file} could not be written: {error.strerror or error}") from error


def _serve(
    stores: Stores, listener: socket.socket, host: str, path: str, session: CommandSession, *, json: bool, opens: bool
) -> None:
    import tempfile

    from osmosis_ai.rollout.server.serve import address_of
    from osmosis_ai.viewer.server import serve_viewer

    output = session.output
    own = next((str(each.folder) for each in stores if each.exists), None)
    # In the store's private folder, because the file for the browser holds the token.
    with tempfile.TemporaryDirectory(prefix="view-", dir=own) as folder:

        def ready(token: str) -> None:
            STATUS.clear()
            address = address_of(listener)
            # No browser on another machine can open a wildcard address.
            if host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison
                address = f"http://{socket.gethostname()}:{listener.getsockname()[1]}"
            url = f"{address}{path}?token={token}"
            if json:
                output.json(msgspec.json.encode({"url": url}))
            else:
                output.say(f"the viewer is at {url}")
                output.say("press Ctrl-C to stop")
            if opens:
                open_browser(url, Path(folder))

        # Ctrl-C is the normal way to stop it; the exit code reports it as for every command.
        serve_viewer(stores, listener, host, session.masker, ready)


def _stop_at_eof() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGINT)
