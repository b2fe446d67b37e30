"""The platform as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from osmosis_ai.platform.accounts import Accounts
from osmosis_ai.platform.api import Api
from osmosis_ai.platform.cleaning import clean
from osmosis_ai.platform.database import Database
from osmosis_ai.platform.datasets import Datasets
from osmosis_ai.platform.errors import ApiError
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.imports import Imports
from osmosis_ai.platform.logs import Logs
from osmosis_ai.platform.pages import PagesAccess
from osmosis_ai.platform.queue import Limits, Queue
from osmosis_ai.platform.requests import error_response
from osmosis_ai.platform.runs import Runs
from osmosis_ai.platform.vault import Cipher, Vault
from osmosis_ai.urls import is_loopback
from osmosis_ai.viewer.security import Guard

__all__ = ["Place", "build_app"]


class Place(NamedTuple):
    """Where the server listens; `public` is the host name of a proxy in front of it."""

    host: str
    port: int
    public: str | None = None


class _Changes:
    """Wakes the requests that follow a run."""

    def __init__(self) -> None:
        self._events: dict[str, anyio.Event] = {}

    def of(self, run_id: str) -> anyio.Event:
        return self._events.setdefault(run_id, anyio.Event())

    def tell(self, run_id: str) -> None:
        event = self._events.pop(run_id, None)
        if event is not None:
            event.set()


def build_app(
    home: Home,
    database: Database,
    limits: Limits,
    place: Place,
    stopping: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """Build the application. Event streams end once `stopping` returns True."""
    # Otherwise anyone who can reach the server from elsewhere could read this machine's repositories.
    accounts = Accounts(database, local_paths=is_loopback(place.host))
    cipher, logs = Cipher(home), Logs(database)
    pages = PagesAccess(home, accounts, cipher, stopping)
    vault, datasets = Vault(database, cipher), Datasets(database, home)
    runs, changes = Runs(database, datasets, vault, logs), _Changes()
    # Filled by `lifespan`, because a queue needs the running event loop.
    queues: list[Queue] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Before the first request, because it deletes what looks like an abandoned upload.
        clean(database, home)
        queues.append(Queue(database, home, runs, datasets, logs, limits, changes.tell))
        async with anyio.create_task_group() as group:
            group.start_soon(queues[0].run)
            yield
            group.cancel_scope.cancel()
        pages.close()

    async def missing(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = "no such path" if status == 404 else "this path doesn't support the method"
        answer = error_response(ApiError(status, what, "NOT_FOUND"))
        # Such as Allow, which lists the methods of a path.
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    guard = Guard(
        pages,
        host=place.host,
        port=place.port,
        cookie="osmosis-platform",
        addresses=[place.public.lower()] if place.public else (),
    )

    api = Api(
        home,
        accounts,
        cipher,
        vault,
        datasets,
        runs,
        Imports(database, home),
        logs,
        pages,
        has_trainer=limits.trainer is not None,
        wake=lambda: queues[0].wake(),
        stop=lambda run_id: queues[0].stop(run_id),
        changes=changes.of,
        stopping=stopping,
    )
    app = Starlette(routes=api.routes(), exception_handlers={404: missing, 405: missing}, lifespan=lifespan)

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        # The API takes tokens only, which no browser adds by itself; pages have cookies, so they need the guard.
        is_page = scope["type"] == "http" and scope["path"] != "/health" and not scope["path"].startswith("/api/")
        await (guard if is_page else app)(scope, receive, send)

    return choose
