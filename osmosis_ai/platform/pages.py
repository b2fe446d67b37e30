"""Access to a platform's viewer pages: which browser may see which workspaces' runs.

`osmosis platform open` gets a URL with a ticket, which the browser exchanges for a cookie. A cookie belongs to one
token and lists the workspaces opened with it; revoking the token invalidates it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import anyio.to_thread
import msgspec
from starlette.types import ASGIApp

from osmosis_ai.errors import StoreError
from osmosis_ai.platform.accounts import Accounts, Holder, Workspace
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.paging import now
from osmosis_ai.platform.vault import Cipher
from osmosis_ai.records import Record
from osmosis_ai.viewer.addresses import run_path
from osmosis_ai.viewer.app import build_app
from osmosis_ai.viewer.stores import Repository, Stores

__all__ = ["PagesAccess", "page_name", "page_path"]

TICKET_SECONDS = 600
"""A ticket is in a URL, and so in a browser's history: it soon becomes useless."""
SESSION_SECONDS = 14 * 86400
"""Validity of a cookie, which ends earlier if its token is revoked."""
MAX_WORKSPACES = 20
"""Bounds the cookie, which browsers limit to 4 KiB."""
KEPT_APPS = 32
"""Applications kept, one for each combination of opened workspaces."""


class Ticket(Record, frozen=True, tag="ticket"):
    """Lets a browser see a workspace's runs, if it is exchanged before it expires."""

    token_id: str
    workspace: str
    expires: float


class BrowserSession(Record, frozen=True, tag="session"):
    """The content of a cookie: its token's id, and the opened workspaces."""

    token_id: str
    workspaces: list[str]
    expires: float


def page_name(identity: str) -> str:
    """Return a workspace's name in the pages' URLs, where a slash would end it."""
    # No identity contains a tilde, so names stay unique.
    return identity.replace("/", "~")


def page_path(identity: str, run: str | None) -> str:
    """Return the path of a run's page, or that of the list of runs."""
    return "/" if run is None else run_path(page_name(identity), run)


class PagesAccess:
    """Decides which browser may see which runs, for `viewer.security.Guard`."""

    hint = "run `osmosis platform open` in the workspace: it prints a URL for this browser"

    def __init__(self, home: Home, accounts: Accounts, cipher: Cipher, stopping: Callable[[], bool]) -> None:
        self._home = home
        self._accounts = accounts
        self._cipher = cipher
        self._stopping = stopping
        self._repositories: dict[str, Repository] = {}
        self._apps: OrderedDict[tuple[str, ...], ASGIApp] = OrderedDict()

    def ticket(self, holder: Holder, workspace: Workspace) -> str:
        """Return a ticket, for the URL that this user opens."""
        return self._sealed(Ticket(holder.token_id, workspace.id, now() + TICKET_SECONDS))

    async def enter(self, token: str, cookies: Sequence[str]) -> str | None:
        """Exchange a URL's ticket for a cookie that keeps the workspaces already opened; return None if invalid."""
        return await anyio.to_thread.run_sync(self._enter, token, cookies)

    async def admit(self, cookies: Sequence[str]) -> ASGIApp | None:
        """Return the pages that a browser with these cookies may see, or None if there are none."""
        found = await anyio.to_thread.run_sync(self._workspaces, cookies)
        return None if found is None else self._app(found)

    def close(self) -> None:
        """Close the run stores."""
        for repository in self._repositories.values():
            repository.runs.close()

    def _enter(self, token: str, cookies: Sequence[str]) -> str | None:
        ticket = self._opened(token)
        if not isinstance(ticket, Ticket):
            return None
        known = self._session(cookies)
        # The cookie of another token must not pass its workspaces on: that token can be revoked on its own.
        before = known.workspaces if known is not None and known.token_id == ticket.token_id else []
        opened = [*(each for each in before if each != ticket.workspace), ticket.workspace][-MAX_WORKSPACES:]
        return self._sealed(BrowserSession(ticket.token_id, opened, now() + SESSION_SECONDS))

    def _workspaces(self, cookies: Sequence[str]) -> list[Workspace] | None:
        session = self._session(cookies)
        return None if session is None else self._accounts.workspaces_by_id(session.workspaces)

    def _session(self, cookies: Iterable[str]) -> BrowserSession | None:
        for cookie in cookies:
            session = self._opened(cookie)
            # A ticket, which the same key seals, doesn't count as a cookie.
            if isinstance(session, BrowserSession):
                return session
        return None

    def _app(self, workspaces: Sequence[Workspace]) -> ASGIApp:
        names = tuple(sorted(each.id for each in workspaces))
        app = self._apps.pop(names, None) or build_app(Stores.of(map(self._repository, workspaces)), self._stopping)
        # At the end again, so that the first one is the least recently used.
        self._apps[names] = app
        while len(self._apps) > KEPT_APPS:
            self._apps.popitem(last=False)
        return app

    def _repository(self, workspace: Workspace) -> Repository:
        found = self._repositories.get(workspace.id)
        if found is None:
            folder = self._home.store(workspace.id)
            found = self._repositories[workspace.id] = Repository(page_name(workspace.identity), folder, folder)
        return found

    def _sealed(self, content: Ticket | BrowserSession) -> str:
        return self._cipher.encrypt(msgspec.json.encode(content)).decode("ascii")

    def _opened(self, text: str) -> Ticket | BrowserSession | None:
        """Return the sealed content, if it hasn't expired and its token is still valid."""
        try:
            data = self._cipher.decrypt(text.encode("utf-8", "replace"))
        except StoreError:
            return None
        found: Ticket | BrowserSession = msgspec.json.decode(data, type=Ticket | BrowserSession)
        return found if found.expires > now() and self._accounts.is_valid(found.token_id) else None
