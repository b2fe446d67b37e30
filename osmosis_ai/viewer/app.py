"""The viewer as an ASGI application."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import parse_qsl

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from osmosis_ai.errors import StoreError
from osmosis_ai.masking import Masker
from osmosis_ai.store.views import encode_view, rollout_detail
from osmosis_ai.viewer.live import changes
from osmosis_ai.viewer.pages.compare import compare_page, compared_row_page
from osmosis_ai.viewer.pages.run import figures_part, run_page, table_part
from osmosis_ai.viewer.pages.runs import runs_page
from osmosis_ai.viewer.pages.training import training_page
from osmosis_ai.viewer.pages.trajectory import give_verdict, stored_rollout, trajectory_page
from osmosis_ai.viewer.rendering import prepare
from osmosis_ai.viewer.site import Site
from osmosis_ai.viewer.stores import Stores

__all__ = ["build_app"]

WITHOUT_ROWS = "x-without-rows"
"""The header that a page sends when it refreshes itself, to get only its rows."""
VERDICT_BYTES = 64 << 10
"""Room for the longest note, percent-encoded in a form."""
STATIC = Path(__file__).parent / "static"
# Only these, so that no name from a URL becomes part of a path.
_STATIC_FILES = {"view.css": "text/css", "view.js": "text/javascript"}


def build_app(stores: Stores, stopping: Callable[[], bool] = lambda: False, masker: Masker | None = None) -> Starlette:
    """Build the application that shows these repositories' runs. It authorizes no one: that is `security.Guard`'s job.

    Event streams end once `stopping`, which is called often, returns True. `masker` masks keys in notes that users
    write.
    """
    site = Site(stores, masker or Masker())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Compile the templates now, while the browser starts.
        threading.Thread(target=prepare, daemon=True).start()
        yield
        stores.close()

    def page(render: Callable[..., str]) -> Callable[[Request], Response]:
        # Not a coroutine, so that Starlette calls it in a thread, because queries block.
        def endpoint(request: Request) -> Response:
            try:
                return HTMLResponse(render(site, query=dict(request.query_params), **request.path_params))
            except StoreError as error:
                return HTMLResponse(site.error(str(error)), 404)

        return endpoint

    def run_or_figures(request: Request) -> Response:
        return page(partial(run_page, with_rows=WITHOUT_ROWS not in request.headers))(request)

    def raw(request: Request) -> Response:
        try:
            scored = stored_rollout(site, query=dict(request.query_params), **request.path_params)
        except StoreError as error:
            return HTMLResponse(site.error(str(error)), 404)
        return Response(encode_view(rollout_detail(scored)), media_type="application/json")

    async def verdict(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > VERDICT_BYTES:
                return PlainTextResponse("the note is too long", 413)
        # Parsed here, because Starlette's forms need another package and have no limit.
        given = dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
        record = partial(give_verdict, site, query=dict(request.query_params), given=given, **request.path_params)
        try:
            # In a thread, because the database file may be locked for a while.
            return RedirectResponse(await anyio.to_thread.run_sync(record), 303)
        except StoreError as error:
            return PlainTextResponse(f"the verdict isn't saved: {error}", 409)

    async def events(request: Request) -> Response:
        # A browser that reconnects sends the version of the last event; at first only the page's own URL has one.
        since = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return StreamingResponse(changes(stores, since, stopping), media_type="text/event-stream")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _STATIC_FILES:
            return Response(status_code=404)
        return FileResponse(STATIC / name, media_type=_STATIC_FILES[name])

    async def missing(request: Request, error: Exception) -> Response:
        # In a thread, because its first use compiles the template.
        text = await anyio.to_thread.run_sync(partial(site.error, "There is no such page."))
        return HTMLResponse(text, 404)

    run, compare = "/runs/{repository}/{name}", "/compare/{repository}/{a}/{b}"
    return Starlette(
        routes=[
            Route("/", page(runs_page)),
            Route(run, run_or_figures),
            Route(f"{run}/table", page(table_part)),
            Route(f"{run}/figures", page(figures_part)),
            Route(f"{run}/rows/{{row:int}}", page(trajectory_page)),
            Route(f"{run}/rows/{{row:int}}/raw", raw),
            Route(f"{run}/rows/{{row:int}}/verdict", verdict, methods=["POST"]),
            Route("/training/{repository}/{name}", page(training_page)),
            Route(compare, page(compare_page)),
            Route(f"{compare}/rows/{{row:int}}", page(compared_row_page)),
            Route("/live", events),
            Route("/static/{name}", static),
        ],
        exception_handlers={404: missing},
        lifespan=lifespan,
    )
