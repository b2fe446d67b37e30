"""Users, their tokens and their workspaces. A token is shown once; only its hash is stored."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sqlite3
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from osmosis_ai.errors import UsageError
from osmosis_ai.platform.database import Database
from osmosis_ai.platform.errors import ApiError
from osmosis_ai.platform.paging import iso, now
from osmosis_ai.records import JsonObject

__all__ = ["Accounts", "Holder", "Workspace"]

IDENTITY = re.compile(r"[a-z0-9._-]{1,100}/[a-z0-9._-]{1,100}")
USER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX = "osm_"
LOGIN_SECONDS = 900
"""Validity of a login's code."""
MAX_LOGINS = 100
"""Pending logins, which anyone can begin without a token."""
CODE_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""No vowels, so that a code never spells a word."""


class Holder(NamedTuple):
    """The user of a valid token."""

    token_id: str
    user_id: str
    name: str
    email: str
    expires_at: float | None


class Workspace(NamedTuple):
    """A repository, and the places to clone its code from."""

    id: str
    identity: str
    remote: str | None
    path: str | None


class Accounts:
    """The users, tokens and workspaces of a platform."""

    def __init__(self, database: Database, *, local_paths: bool) -> None:
        self._database = database
        self._local_paths = local_paths

    def create_token(self, user: str, label: str, *, days: float | None = None) -> tuple[str, str]:
        """Create a token, and its user if new; return the token's id and the token itself. Raises UsageError.

        Args:
            user: The user's name.
            label: A label to recognise the token by.
            days: How long it is valid; None for no expiry.
        """
        _check_user(user)
        token, token_id, at = PREFIX + secrets.token_urlsafe(32), str(uuid.uuid4()), now()
        expires_at = None if days is None else at + days * 86400
        with self._database.write("creating a token") as db:
            db.execute(
                "INSERT INTO users VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING",
                # Clients require an email address.
                (str(uuid.uuid4()), user, f"{user}@localhost", at),
            )
            (owner,) = db.execute("SELECT id FROM users WHERE name = ?", (user,)).fetchone()
            db.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, NULL)",
                (token_id, owner, label, _hash(token), at, expires_at),
            )
        return token_id, token

    def begin_login(self, name: str) -> JsonObject:
        """Start the login of a device without a token; raise ApiError if too many logins are pending."""
        code, user_code, at = secrets.token_urlsafe(32), _user_code(), now()
        with self._database.write("beginning a login") as db:
            db.execute("DELETE FROM devices WHERE expires_at < ?", (at,))
            # Counted once the expired ones are gone, so that they can't block new ones.
            (waiting,) = db.execute("SELECT count(*) FROM devices").fetchone()
            if waiting >= MAX_LOGINS:
                raise ApiError(429, "too many logins wait for approval; try again in a few minutes", "RATE_LIMITED")
            expires = at + LOGIN_SECONDS
            db.execute("INSERT INTO devices VALUES (?, ?, ?, NULL, ?)", (_hash(code), user_code, name[:100], expires))
        return {"device_code": code, "user_code": user_code, "expires_in": LOGIN_SECONDS, "interval": 2}

    def approve_login(self, user_code: str, user: str) -> str:
        """Approve the login with this code, creating the user if new; return the device's name.

        Raises:
            UsageError: No login is waiting with this code.
        """
        _check_user(user)
        with self._database.write("approving a login") as db:
            waiting = (user_code.upper(), now())
            found = db.execute("SELECT name FROM devices WHERE user_code = ? AND expires_at > ?", waiting).fetchone()
            db.execute("UPDATE devices SET user = ? WHERE user_code = ? AND expires_at > ?", (user, *waiting))
        if found is None:
            raise UsageError(f"no login is waiting with the code {user_code[:20]}; codes are valid for 15 minutes")
        return str(found[0])

    def finish_login(self, code: str) -> tuple[str, Holder]:
        """Return the token of an approved device, once only; raise ApiError until it is approved."""
        row = self._database.one("SELECT * FROM devices WHERE code = ?", _hash(code))
        # These messages are the device flow's own words, which clients compare.
        if row is None or row["expires_at"] <= now():
            raise ApiError(400, "expired_token", "EXPIRED_TOKEN")
        if row["user"] is None:
            raise ApiError(400, "authorization_pending", "AUTHORIZATION_PENDING")
        with self._database.write("finishing a login") as db:
            # Of two concurrent requests, only one deletes the row and gets a token.
            if not db.execute("DELETE FROM devices WHERE code = ?", (_hash(code),)).rowcount:
                raise ApiError(400, "expired_token", "EXPIRED_TOKEN")
        _, token = self.create_token(row["user"], f"login of {row['name']}")
        return token, self.holder(f"Bearer {token}")

    def tokens(self) -> list[JsonObject]:
        """List all tokens: their metadata, not the tokens themselves."""
        rows = self._database.all(
            "SELECT t.*, u.name AS user_name FROM tokens t JOIN users u ON u.id = t.user ORDER BY t.created_at"
        )
        times = ("created_at", "expires_at", "revoked_at")
        return [
            {
                "id": row["id"],
                "user": row["user_name"],
                "label": row["label"],
                **{name: iso(row[name]) for name in times},
            }
            for row in rows
        ]

    def revoke(self, token_id: str, *, owner: str | None = None) -> bool:
        """Revoke a token; return False if there is none, or if it isn't `owner`'s."""
        with self._database.write("revoking a token") as db:
            done = db.execute(
                "UPDATE tokens SET revoked_at = coalesce(revoked_at, ?1) WHERE id = ?2 AND user = coalesce(?3, user)",
                (now(), token_id, owner),
            )
            return bool(done.rowcount)

    def holder(self, authorization: str | None) -> Holder:
        """Return the user that an Authorization header identifies; raise ApiError if its token isn't valid."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise _refused("a token is missing: set OSMOSIS_TOKEN, or run `osmosis auth login`", "TOKEN_MISSING")
        row = self._database.one(
            "SELECT t.id, t.user, u.name, u.email, t.expires_at, t.revoked_at "
            "FROM tokens t JOIN users u ON u.id = t.user WHERE t.hash = ?",
            _hash(token.strip()),
        )
        if row is None:
            raise _refused("this platform doesn't know the token", "TOKEN_INVALID")
        if row["revoked_at"] is not None:
            raise _refused("the token is revoked", "TOKEN_REVOKED")
        if row["expires_at"] is not None and row["expires_at"] <= now():
            raise _refused("the token has expired", "TOKEN_EXPIRED")
        return Holder(*tuple(row)[:5])

    def is_valid(self, token_id: str) -> bool:
        """Return True if a token is neither revoked nor expired."""
        row = self._database.one("SELECT expires_at, revoked_at FROM tokens WHERE id = ?", token_id)
        return (
            row is not None and row["revoked_at"] is None and (row["expires_at"] is None or row["expires_at"] > now())
        )

    def workspace(self, identity: str | None, remote: str | None, path: str | None) -> Workspace:
        """Return the workspace of a request, and register it if new; raise ApiError if a header is invalid.

        Args:
            identity: `owner/repo`, from the header X-Osmosis-Git.
            remote: The URL of its origin, from X-Osmosis-Remote.
            path: Its folder on this machine, from X-Osmosis-Path; None for requests from elsewhere.
        """
        if not identity:
            raise ApiError(400, "the header X-Osmosis-Git names no repository", "GIT_SCOPE_HEADER_REQUIRED")
        identity = identity.lower()
        if not IDENTITY.fullmatch(identity) or {".", ".."} & set(identity.split("/")):
            raise ApiError(400, "the header X-Osmosis-Git must be owner/repo", "GIT_SCOPE_HEADER_INVALID")
        if remote is not None and not _is_remote(remote):
            raise ApiError(400, "the header X-Osmosis-Remote isn't the URL of a repository", "GIT_SCOPE_HEADER_INVALID")
        if path is not None and (not self._local_paths or not os.path.isabs(path) or "\0" in path):  # noqa: PTH117
            # From another machine, a path would let a remote user read any repository here.
            path = None
        found = self._find(identity)
        # Every request for a workspace comes through here, and few of them change anything.
        if found is not None and (remote in (None, found.remote)) and (path in (None, found.path)):
            return found
        with self._database.write("registering a workspace") as db:
            db.execute(
                "INSERT INTO workspaces VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (identity) DO UPDATE SET "
                "remote = coalesce(?3, remote), path = coalesce(?4, path)",
                (str(uuid.uuid4()), identity, remote, path, now()),
            )
        found = self._find(identity)
        assert found is not None
        return found

    def workspaces(self) -> list[JsonObject]:
        """List the workspaces in the API's format."""
        rows = self._database.all("SELECT id, identity FROM workspaces ORDER BY identity")
        return [
            {"id": row["id"], "name": row["identity"], "connected_repo": {"repo_full_name": row["identity"]}}
            for row in rows
        ]

    def workspaces_by_id(self, ids: Sequence[str]) -> list[Workspace]:
        """Return the workspaces with these ids, ordered by name."""
        marks = ", ".join("?" * len(ids))
        rows = self._database.all(f"{_WORKSPACES} WHERE id IN ({marks}) ORDER BY identity", *ids)
        return [Workspace(*row) for row in rows]

    def _find(self, identity: str) -> Workspace | None:
        row: sqlite3.Row | None = self._database.one(f"{_WORKSPACES} WHERE identity = ?", identity)
        return None if row is None else Workspace(*row)


_WORKSPACES = "SELECT id, identity, remote, path FROM workspaces"


def _check_user(user: str) -> None:
    if not USER_NAME.fullmatch(user):
        raise UsageError(f"{user[:70]!r} can't be a user's name: use letters, digits, dots, dashes and underscores")


def _user_code() -> str:
    letters = "".join(secrets.choice(CODE_LETTERS) for _ in range(8))
    return f"{letters[:4]}-{letters[4:]}"


def _is_remote(text: str) -> bool:
    # Git would run `ext::COMMAND`, parse a leading dash as an option, and clone a path of this machine.
    return re.fullmatch(r"(https?|ssh|git)://[^\s-]\S*|[\w.-]+@[\w.-]+:[^\s:-]\S*", text) is not None


def _hash(token: str) -> bytes:
    # Not a password: the token is random, so one round is enough.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _refused(message: str, code: str) -> ApiError:
    return ApiError(401, message, code)
