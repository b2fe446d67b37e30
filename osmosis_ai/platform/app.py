"""The platform as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from osmosis_ai.platform.accounts import Accounts
from osmosis_ai.platform.api import Api
from osmosis_ai.platform.database import Database
from osmosis_ai.platform.datasets import Datasets
from osmosis_ai.platform.errors import ApiError
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.logs import Logs
from osmosis_ai.platform.queue import Limits, Queue
from osmosis_ai.platform.requests import error_response
from osmosis_ai.platform.runs import Runs
from osmosis_ai.platform.vault import Cipher, Vault

__all__ = ["build_app"]


class _Changes:
    """Wakes those who follow a run."""

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
    *,
    local_paths: bool,
    stopping: Callable[[], bool] = lambda: False,
) -> Starlette:
    """Make the application.

    `local_paths` allows code from folders of this machine; once `stopping` returns True, streams of events end.
    """
    accounts, cipher, logs = Accounts(database, local_paths=local_paths), Cipher(home), Logs(database)
    vault, datasets = Vault(database, cipher), Datasets(database, home)
    runs, changes = Runs(database, datasets, vault, logs), _Changes()
    queues: list[Queue] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        datasets.clean()
        queues.append(Queue(database, home, runs, datasets, logs, limits, changes.tell))
        async with anyio.create_task_group() as group:
            group.start_soon(queues[0].run)
            yield
            group.cancel_scope.cancel()

    async def missing(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = "there is no such address" if status == 404 else "this address takes another method"
        return error_response(ApiError(status, what, "NOT_FOUND"))

    api = Api(
        home,
        accounts,
        cipher,
        vault,
        datasets,
        runs,
        logs,
        wake=lambda: queues[0].wake(),
        stop=lambda run_id: queues[0].stop(run_id),
        changes=changes.of,
        stopping=stopping,
    )
    return Starlette(routes=api.routes(), exception_handlers={404: missing, 405: missing}, lifespan=lifespan)
