"""Secrets of users and workspaces, encrypted at rest. Only a job that needs a value can read it back."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from osmosis_ai.errors import StoreError
from osmosis_ai.platform.accounts import Holder, Workspace
from osmosis_ai.platform.database import Database, Row
from osmosis_ai.platform.errors import invalid, not_found
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.paging import Window, iso, now, page
from osmosis_ai.records import JsonObject

__all__ = ["Cipher", "Scope", "Vault"]

SECRET_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,254}")
MAX_VALUE = 64 * 1024
"""Characters of a secret; Linux bounds an environment variable to 128 KiB."""

Scope = Literal["workspace", "user"]


class Cipher:
    """Encrypts with the key in the platform's folder, and creates the key if there is none."""

    def __init__(self, home: Home) -> None:
        from cryptography.fernet import Fernet

        # The caller holds the folder's lock, so no other server creates a key at the same time.
        if not home.key.exists():
            home.write_private(home.key, base64.urlsafe_b64encode(os.urandom(32)).decode("ascii"))
        self._key = home.key.read_bytes().strip()
        try:
            self._fernet = Fernet(self._key)
        except ValueError:
            raise StoreError(f"{home.key} doesn't hold a key: put back the one that secrets were stored with") from None

    def encrypt(self, data: bytes) -> bytes:
        """Encrypt and authenticate data."""
        return self._fernet.encrypt(data)

    def decrypt(self, data: bytes) -> bytes:
        """Decrypt data; raise StoreError if it was tampered with, or encrypted with another key."""
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(data)
        except InvalidToken:
            raise StoreError(
                "a secret can't be decrypted: the platform's key was replaced; set the secret again"
            ) from None

    def sign(self, text: str) -> str:
        """Return the signature of a URL."""
        return hmac.new(self._key, text.encode("utf-8"), hashlib.sha256).hexdigest()


class Vault:
    """The stored secrets."""

    def __init__(self, database: Database, cipher: Cipher) -> None:
        self._database = database
        self._cipher = cipher

    def set(self, holder: Holder, workspace: Workspace, name: str, value: str, scope: str) -> JsonObject:
        """Store a secret, replacing one of the same name and scope; raise ApiError if it isn't valid."""
        owner = _owner(holder, scope)
        _check_name(name)
        if not value or len(value) > MAX_VALUE or "\0" in value:
            raise invalid(f"the value of {name} is empty, too long, or holds a character that no variable can", "value")
        # A value may come from an environment variable whose bytes aren't UTF-8, which Python reads as surrogates.
        at, encrypted = now(), self._cipher.encrypt(value.encode("utf-8", "surrogatepass"))
        with self._database.write("storing a secret") as db:
            db.execute(
                "INSERT INTO secrets VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?7, ?7) ON CONFLICT (workspace, owner, name) "
                "DO UPDATE SET value = ?5, updater = ?6, updated_at = ?7",
                (str(uuid.uuid4()), workspace.id, owner, name, encrypted, holder.user_id, at),
            )
        row = self._database.one(f"{_SELECT} AND s.owner = ? AND s.name = ?", workspace.id, owner, name)
        assert row is not None
        return _item(row)

    def delete(self, holder: Holder, workspace: Workspace, name: str, scope: str) -> None:
        """Delete a secret; raise ApiError if there is none."""
        owner = _owner(holder, scope)
        with self._database.write("deleting a secret") as db:
            done = db.execute(
                "DELETE FROM secrets WHERE workspace = ? AND owner = ? AND name = ?", (workspace.id, owner, name)
            )
            if done.rowcount:
                return
        other = "workspace" if scope == "user" else "personal"
        known = {row["name"]: row["owner"] for row in self._visible(holder, workspace)}
        hint = f"; there is one in the {other} scope: add --scope {other}" if name in known else ""
        raise not_found(f"there is no such secret {name[:255]}{hint}")

    def listed(self, holder: Holder, workspace: Workspace, scope: str, window: Window) -> JsonObject:
        """List the names of secrets that a user may use."""
        if scope not in ("all", "workspace", "user"):
            raise invalid(f"scope is {scope[:40]!r}; it must be all, workspace or user", "scope")
        rows = [
            row
            for row in self._visible(holder, workspace)
            if scope == "all" or (row["owner"] == "") == (scope == "workspace")
        ]
        items = [_item(row) for row in rows[window[1] : window[1] + window[0]]]
        return page("environment_secrets", items, len(rows), window)

    def scopes(self, user_id: str, workspace_id: str, names: Iterable[str]) -> dict[str, str | None]:
        """Map each name to the scope that a run would take it from, or None if there is no such secret."""
        return {
            name: None if not found else _scope_word(found)
            for name, found in self._found(user_id, workspace_id, names).items()
        }

    def values(self, user_id: str, workspace_id: str, names: Iterable[str]) -> dict[str, str]:
        """Return the values for a job; a user's own secrets override the workspace's."""
        found = self._found(user_id, workspace_id, names)
        chosen = {name: by_owner.get(user_id, by_owner.get("")) for name, by_owner in found.items()}
        return {name: self._decrypted(value) for name, value in chosen.items() if value is not None}

    def seal(self, values: Mapping[str, str]) -> bytes | None:
        """Encrypt the values provided for one run."""
        for name, value in values.items():
            _check_name(name)
            if not value or len(value) > MAX_VALUE or "\0" in value:
                raise invalid(f"the value provided for {name} can't be used", "secrets.provided")
        return self._cipher.encrypt(msgspec.json.encode(values)) if values else None

    def unseal(self, sealed: bytes | None) -> dict[str, str]:
        """Return the values provided for one run."""
        return {} if sealed is None else msgspec.json.decode(self._cipher.decrypt(sealed), type=dict[str, str])

    def _decrypted(self, value: bytes) -> str:
        return self._cipher.decrypt(value).decode("utf-8", "surrogatepass")

    def _visible(self, holder: Holder, workspace: Workspace) -> list[Row]:
        order = "ORDER BY s.name, s.owner"
        return self._database.all(f"{_SELECT} AND s.owner IN ('', ?) {order}", workspace.id, holder.user_id)

    def _found(self, user_id: str, workspace_id: str, names: Iterable[str]) -> dict[str, dict[str, bytes]]:
        found: dict[str, dict[str, bytes]] = {name: {} for name in names}
        rows = self._database.all(
            "SELECT owner, name, value FROM secrets WHERE workspace = ? AND owner IN ('', ?)", workspace_id, user_id
        )
        for row in rows:
            if row["name"] in found:
                found[row["name"]][row["owner"]] = row["value"]
        return found


_SELECT = (
    "SELECT s.id, s.name, s.owner, s.created_at, s.updated_at, c.name AS creator_name, u.name AS updater_name "
    "FROM secrets s JOIN users c ON c.id = s.creator JOIN users u ON u.id = s.updater WHERE s.workspace = ?"
)


def _item(row: Row) -> JsonObject:
    return {
        "id": row["id"],
        "name": row["name"],
        "scope": "user" if row["owner"] else "workspace",
        "created_at": iso(row["created_at"]),
        "updated_at": iso(row["updated_at"]),
        "creator_name": row["creator_name"],
        "updater_name": row["updater_name"],
    }


def _owner(holder: Holder, scope: str) -> str:
    if scope not in ("workspace", "user"):
        raise invalid(f"scope is {scope[:40]!r}; it must be workspace or user", "scope")
    # Empty rather than NULL, which a UNIQUE constraint would allow several times.
    return holder.user_id if scope == "user" else ""


def _scope_word(found: Mapping[str, bytes]) -> str:
    if "" not in found:
        return "user"
    return "workspace" if len(found) == 1 else "user_override"


def _check_name(name: str) -> None:
    if not SECRET_NAME.fullmatch(name):
        raise invalid("a secret's name has up to 255 capital letters, digits and _, and begins with a letter", "name")
