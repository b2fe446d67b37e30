"""`osmosis platform`: start, stop and administer the platform on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json, Nodes, WorkersPerNode
from osmosis_ai.cli.platform_session import Plain, PlatformUrl, Session, platform_session
from osmosis_ai.cli.session import ExitCode

if TYPE_CHECKING:
    from osmosis_ai.platform.accounts import Accounts
    from osmosis_ai.platform.home import Home
    from osmosis_ai.platform.queue import Limits
    from osmosis_ai.records import JsonObject

__all__ = ["app"]

START_SECONDS = 60.0
"""How long `up` waits for the server to answer."""
STOP_SECONDS = 30.0
"""How long `down` waits before it kills the server, which first ends its jobs."""
PORT = 8640

app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Run a platform on this machine.")
token_app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Create, list and revoke tokens of users.")
app.add_typer(token_app, name="token")

Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="The platform's folder. Default: OSMOSIS_PLATFORM_DATA, else one in the user's data folder.",
    ),
]


@app.command(cls=HelpCommand)
def up(
    context: typer.Context,
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in the foreground, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0 for a free one.")] = PORT,
    data: Data = None,
    public_host: Annotated[
        str | None,
        typer.Option("--public-host", metavar="HOST", help="The host and port of a proxy in front of the platform."),
    ] = None,
    max_runs: Annotated[int, typer.Option(min=1, metavar="N", help="Run at most N runs at a time.")] = 2,
    max_runs_per_model: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run at most N runs of the same model at a time.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option("--trainer", metavar="COMMAND", help="Run training runs with this command.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="auto|ray://HOST:PORT|local", help="Run evaluations on the nodes of a Ray cluster."),
    ] = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    json: Json = False,
    plain: Plain = False,
) -> None:
    """Start the platform in the background. Interrupted runs continue.

    The first start creates a token for this user, which commands find automatically.
    """
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        from osmosis_ai.config import WorkersConfig
        from osmosis_ai.runtime.run.prepare import check_cluster
        from osmosis_ai.urls import is_loopback

        check_cluster(WorkersConfig(cluster=cluster, nodes=nodes, workers_per_node=workers_per_node))
        given = {"cluster": cluster, "nodes": nodes, "workers_per_node": workers_per_node}
        placed = {name: value for name, value in given.items() if value is not None}
        home = _home(session, data)
        home.create()
        if not is_loopback(host):
            session.warn(
                f"{host} is reached by other machines: every request needs a token, but without TLS anyone between can "
                "read it; put a TLS proxy in front, and listen on 127.0.0.1"
            )
        if foreground:
            from osmosis_ai.platform.queue import Limits

            _serve(home, host, port, public_host, Limits(max_runs, max_runs_per_model, trainer, placed))
            return
        if home.is_served():
            known = home.read_info()
            session.operation(
                "platform.up",
                f"the platform is already running at {known.url if known else home.folder}",
                status="noop",
            )
            return
        words = ["--host", host, "--port", str(port), "--data", str(home.folder), "--max-runs", str(max_runs)]
        if public_host is not None:
            words += ["--public-host", public_host]
        if max_runs_per_model is not None:
            words += ["--max-runs-per-model", str(max_runs_per_model)]
        if trainer is not None:
            words += ["--trainer", trainer]
        for name, value in placed.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        _start(home, words)
        known = home.read_info()
        assert known is not None
        session.operation(
            "platform.up",
            f"the platform is at {known.url}",
            resource={"url": known.url, "pid": known.pid, "data": str(home.folder), "token_file": str(home.token)},
            next_steps=[{"action": "eval_submit"}],
            hints=["osmosis dataset upload FILE", "osmosis eval submit configs/eval/my-rollout.toml"],
        )


@app.command(cls=HelpCommand)
def down(context: typer.Context, data: Data = None, json: Json = False, plain: Plain = False) -> None:
    """Stop the platform. Unfinished runs continue at the next start."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        home = _home(session, data)
        known = home.read_info()
        # The lock decides: the last server's pid may belong to another process by now.
        if known is None or not home.is_served():
            session.operation("platform.down", f"no platform is running in {home.folder}", status="noop")
            return
        os.kill(known.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while home.is_served():
            if time.monotonic() > deadline:
                # Its jobs see EOF on their stdin, and end too.
                os.kill(known.pid, signal.SIGKILL)
            time.sleep(0.05)
        session.operation("platform.down", "the platform is stopped")


@app.command(cls=HelpCommand)
def status(context: typer.Context, data: Data = None, json: Json = False, plain: Plain = False) -> None:
    """Show if the platform is running, and what it is doing. Exits with 1 if it isn't running."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        home = _home(session, data)
        known, served = home.read_info(), home.is_served()
        url, pid = (known.url, known.pid) if known is not None and served else (None, None)
        counts = _run_counts(home)
        found: JsonObject = {"running": served, "url": url, "pid": pid, "data": str(home.folder), "runs": counts}
        lines = [
            ("Running", "yes" if served else "no; start it with `osmosis platform up`"),
            ("Address", url or "–"),
            ("Folder", str(home.folder)),
            ("Runs", ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"),
        ]
        session.detail(found, lines)
    raise typer.Exit(ExitCode.OK if served else ExitCode.FAILED)


@app.command("open", cls=HelpCommand)
def open_(
    context: typer.Context,
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="The run to open first: its name or id.")] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address; don't open a browser.")] = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Let a browser see this workspace's runs, with a URL whose token is valid for ten minutes."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from urllib.parse import urlencode

        from osmosis_ai.cli.view import open_browser
        from osmosis_ai.platform.client import quoted

        client = session.client
        page = None if run is None else client.get(f"/api/cli/eval-runs/{quoted(run)}")["platform_url"]
        ticket = client.post("/api/cli/pages", {})
        url = ticket["url"] if page is None else f"{page}?{urlencode({'token': ticket['token']})}"
        session.operation("platform.open", f"the runs are at {url}", resource={"url": url})
        if not no_open and not session.form.json:
            open_browser(url, session.config_folder)


@app.command(cls=HelpCommand)
def logs(
    context: typer.Context,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, metavar="N", help="Print the last N lines.")] = 50,
    data: Data = None,
) -> None:
    """Print the end of the server's log; for the log of a run, use `osmosis eval logs`."""
    with platform_session(context, scoped=False) as session:
        log = _home(session, data).log
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        for line in text.splitlines()[-lines:]:
            session.output.line(line)


@app.command(cls=HelpCommand)
def backup(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The archive to write, as in platform.tar.")],
    data: Data = None,
    json: Json = False,
    plain: Plain = False,
) -> None:
    """Back up the database, the key, the datasets and the runs to an archive, even while the platform is running."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        from osmosis_ai.folders import given_path
        from osmosis_ai.platform.backup import write_backup

        target = given_path(file, session.cwd)
        size = write_backup(_home(session, data), target)
        session.operation(
            "platform.backup", f"{target} has {size / 1e6:,.1f} MB", resource={"file": str(target), "size": size}
        )


@token_app.command(cls=HelpCommand)
def create(
    context: typer.Context,
    user: Annotated[str, typer.Argument(metavar="USER", help="The user's name; a new one is created.")],
    label: Annotated[str, typer.Option(metavar="TEXT", help="A label that says what the token is for.")] = "",
    days: Annotated[float | None, typer.Option(min=0, metavar="N", help="Let it expire after N days.")] = None,
    data: Data = None,
    json: Json = False,
    plain: Plain = False,
) -> None:
    """Create a token for a user and print it once. Only its hash is stored."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        token_id, token = _accounts(session, data).create_token(user, label, days=days)
        message = f"{token}\n  (of {user}, shown once; id {token_id})"
        session.operation("token.create", message, resource={"id": token_id, "user": user, "token": token})


@token_app.command(cls=HelpCommand)
def approve(
    context: typer.Context,
    code: Annotated[str, typer.Argument(metavar="CODE", help="The code that `osmosis auth login` shows.")],
    user: Annotated[str, typer.Argument(metavar="USER", help="The user to log in as; a new one is created.")],
    data: Data = None,
    json: Json = False,
    plain: Plain = False,
) -> None:
    """Approve a login that is waiting on another machine, and give it a token of a user."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        device = _accounts(session, data).approve_login(code, user)
        done = {"user": user, "device": device}
        session.operation("token.approve", f"{device} is logged in as {user}", resource=done)


@token_app.command("list", cls=HelpCommand)
def list_(context: typer.Context, data: Data = None, json: Json = False, plain: Plain = False) -> None:
    """List tokens by their ids."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        from osmosis_ai.cli.tables import Column

        tokens = _accounts(session, data).tokens()
        session.items(
            tokens,
            [Column("id", "label"), Column("user", "name"), Column("for", "text"), Column("state", "label")],
            lambda one: [one["id"], one["user"], one["label"], "revoked" if one["revoked_at"] else "valid"],
            len(tokens),
            empty="no tokens yet; the first `osmosis platform up` creates one",
        )


@token_app.command(cls=HelpCommand)
def revoke(
    context: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="The token's id, as `token list` shows it.")],
    data: Data = None,
    json: Json = False,
    plain: Plain = False,
) -> None:
    """Revoke a token, with immediate effect."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        from osmosis_ai.platform.client import ClientError

        if not _accounts(session, data).revoke(token):
            raise ClientError(
                f"there is no token with the id {token}; `osmosis platform token list` shows them", "NOT_FOUND"
            )
        session.operation("token.revoke", f"the token {token} is revoked", resource={"id": token})


def _home(session: Session, data: str | None) -> Home:
    from osmosis_ai.platform.home import find_home

    return find_home(data, session.session.environ, session.cwd)


def _accounts(session: Session, data: str | None) -> Accounts:
    """Return the accounts in the platform's folder; whoever can read the folder needs no token."""
    from osmosis_ai.platform.accounts import Accounts
    from osmosis_ai.platform.database import Database

    home = _home(session, data)
    home.create()
    return Accounts(Database(home.database), local_paths=False)


def _serve(home: Home, host: str, port: int, public_host: str | None, limits: Limits) -> None:
    from osmosis_ai.platform.app import Place
    from osmosis_ai.platform.server import serve_platform
    from osmosis_ai.rollout.server.serve import open_socket

    # The lock comes first: a second server mustn't take the port, or open the database.
    with home.locked(), open_socket(host, port) as listener:
        place = Place(host, listener.getsockname()[1], public_host)
        serve_platform(home, listener, place, limits)


def _start(home: Home, words: list[str]) -> None:
    """Start the server in the background, and wait until it answers; raise ClientError with the end of its output."""
    from osmosis_ai.platform.client import ClientError

    with home.log.open("ab") as log:
        # Only what this start writes may be quoted in an error.
        begins = log.tell()
        process = subprocess.Popen(  # noqa: S603 - this command itself
            [sys.executable, "-m", "osmosis_ai", "platform", "up", "--foreground", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # The server outlives this command's terminal.
            start_new_session=True,
            cwd=home.folder,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        known = home.read_info()
        # The file may still be that of an earlier server.
        if known is not None and known.pid == process.pid and _answers(known.url):
            # The server outlives this command, and Popen's destructor would warn about a running child.
            process.returncode = 0
            return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    said = _tail(home.log, begins)
    raise ClientError(f"the platform didn't start: {said or f'see {home.log}'}", "PLATFORM_ERROR")


def _answers(url: str) -> bool:
    from urllib.request import ProxyHandler, build_opener

    try:
        # A proxy of the environment can't reach this machine's loopback address.
        with build_opener(ProxyHandler({})).open(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def _tail(log: Path, begins: int) -> str:
    with log.open("rb") as file:
        file.seek(begins)
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""


def _run_counts(home: Home) -> dict[str, int]:
    if not home.database.is_file():
        return {}
    from osmosis_ai.platform.database import Database

    rows = Database(home.database).all("SELECT status, count(*) FROM runs GROUP BY status ORDER BY status")
    return {str(row[0]): int(row[1]) for row in rows}
