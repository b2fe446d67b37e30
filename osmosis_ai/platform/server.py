"""Serve the platform: `osmosis platform up` starts `python -m osmosis_ai.platform.server`."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import socket

from osmosis_ai.platform.accounts import Accounts
from osmosis_ai.platform.app import Place, build_app
from osmosis_ai.platform.database import Database
from osmosis_ai.platform.home import Home, ServerInfo
from osmosis_ai.platform.queue import Limits
from osmosis_ai.rollout.server.serve import address_of, make_server

__all__ = ["local_token", "serve_platform"]

DEFAULT_USER = "local"


def serve_platform(home: Home, listener: socket.socket, place: Place, limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM. The caller holds the folder's lock."""
    database = Database(home.database)
    local_token(home, Accounts(database, local_paths=False))
    # `server` exists by the time of the first call.
    app = build_app(home, database, limits, place, lambda: server.should_exit)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    server = make_server(app, "warning", log_config=None, server_header=False)
    url = address_of(listener)
    # Commands on this machine can't connect to a wildcard address everywhere.
    if place.host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison
        url = f"http://127.0.0.1:{place.port}"
    home.write_info(ServerInfo(url, os.getpid()))
    logging.getLogger("osmosis.platform").info("serving at %s", url)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        database.close()


def local_token(home: Home, accounts: Accounts) -> str:
    """Return the token for this user's commands on this machine, created at the first start."""
    found = home.read_token()
    if found is None:
        _, found = accounts.create_token(_user(), "made by the first `osmosis platform up`")
        home.write_private(home.token, found)
    return found


def _user() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):
        # A user without a name, as in some containers, is a KeyError before Python 3.13.
        return DEFAULT_USER
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else DEFAULT_USER
