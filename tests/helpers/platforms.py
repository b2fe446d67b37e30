"""A platform's server in a thread of the test, and requests to it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import uvicorn

from osmosis_ai.platform.accounts import Accounts
from osmosis_ai.platform.app import Place, build_app
from osmosis_ai.platform.database import Database
from osmosis_ai.platform.home import Home, ServerInfo
from osmosis_ai.platform.queue import Limits
from osmosis_ai.platform.server import local_token
from osmosis_ai.rollout.server.serve import address_of, make_server, open_socket
from waiting import eventually

SERVER = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"


TWO = Limits(2)


class Reply(NamedTuple):
    """An answer of the server."""

    status: int
    body: dict[str, Any]


class Platform:
    """A running platform."""

    def __init__(self, home: Home, url: str, token: str, database: Database) -> None:
        self.home = home
        self.url = url
        self.token = token
        self.database = database
        self.accounts = Accounts(database, local_paths=True)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request of this user, in the workspace `acme/rollouts`."""
        known = {"Authorization": f"Bearer {token or self.token}", "X-Osmosis-Git": "acme/rollouts"}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        url = path if path.startswith("http") else f"{self.url}{path}"
        request = Request(url, data, {**known, **(headers or {})}, method=method)
        try:
            with urlopen(request, timeout=30) as answer:
                text, status = answer.read(), answer.status
        except HTTPError as error:
            text, status = error.read(), error.code
        return Reply(status, json.loads(text) if text[:1] == b"{" else {"raw": text})

    def upload(self, name: str, data: bytes, extension: str = "jsonl") -> Reply:
        """Upload a dataset in all its steps."""
        about = {"file_name": name, "file_size": len(data), "extension": extension}
        created = self.ask("POST", "/api/cli/datasets", about)
        if created.status != 201:
            return created
        sent = self.ask("PUT", created.body["upload"]["presigned_url"], data)
        assert sent.status == 200, sent
        return self.ask("POST", f"/api/cli/datasets/{created.body['id']}/complete", {"file_extension": extension})

    def wait(self, run: str, *statuses: str) -> dict[str, Any]:
        """Wait until a run has one of these statuses; by default, until it has ended."""
        wanted = statuses or ("finished", "failed", "stopped")
        shown = {}

        def reached() -> bool:
            shown.update(self.ask("GET", f"/api/cli/eval-runs/{run}").body)
            return shown["eval_run"]["status"] in wanted

        eventually(reached, lambda: f"{shown}\n{self.log(run)}")
        return shown

    def log(self, run: str) -> list[str]:
        """The log of a run, as `step: message`."""
        entries = self.ask("GET", f"/api/cli/eval-runs/{run}/logs?limit=200").body["logs"]
        return [f"{entry['step']}: {entry['message']}" for entry in entries]


@contextmanager
def serving(folder: Path, limits: Limits = TWO) -> Iterator[Platform]:
    """Serve a platform from a folder while the block runs."""
    home = Home(folder)
    home.create()
    with home.locked():
        database = Database(home.database)
        token = local_token(home, Accounts(database, local_paths=True))
        listener = open_socket("127.0.0.1", 0)
        place = Place("127.0.0.1", listener.getsockname()[1])
        app = build_app(home, database, limits, place, lambda: server.should_exit)
        server: uvicorn.Server = make_server(app, "warning", log_config=None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        url = address_of(listener)
        home.write_info(ServerInfo(url, 0))
        try:
            eventually(lambda: server.started)
            yield Platform(home, url, token, database)
        finally:
            server.should_exit = True
            thread.join()
            database.close()


def make_workspace(folder: Path, server: Path = SERVER) -> Path:
    """Make a workspace with one rollout, and commit it."""
    for name in ("rollouts/plain", "configs/eval", "configs/training", "data"):
        (folder / name).mkdir(parents=True)
        (folder / name / ".gitkeep").touch()
    shutil.copy(server, folder / "rollouts" / "plain" / "main.py")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder)
    return folder


def commit(folder: Path) -> str:
    """Commit everything, and return the commit."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=state")
    return git(folder, "rev-parse", "HEAD").strip()


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder."""
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def rows(count: int, task: str = "{n} + 0") -> bytes:
    """Rows that `offline/oracle` solves."""
    lines = [
        {"system_prompt": "Compute.", "user_prompt": task.format(n=n), "ground_truth": str(n)} for n in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def submission(**experiment: str) -> dict[str, Any]:
    """A submission as clients send it."""
    usual = {"rollout": "plain", "entrypoint": "main.py", "model_path": "offline/oracle", "dataset": "sums"}
    evaluation = {"limit": 2}
    return {"experiment_config": {**usual, **experiment}, "evaluation_config": evaluation, "secrets": {"required": []}}
