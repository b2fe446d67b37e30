"""The logs of runs and datasets, read page by page with a cursor."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from osmosis_ai.platform.database import Database, Row
from osmosis_ai.platform.errors import invalid
from osmosis_ai.platform.paging import iso, now, number
from osmosis_ai.records import JsonObject

__all__ = ["Logs"]

MAX_PAGE = 200
DEFAULT_PAGE = 50


class Logs:
    """The log entries of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, subject: str, level: str, step: str, message: str, details: JsonObject | None = None) -> None:
        """Add an entry."""
        encoded = None if details is None else msgspec.json.encode(details).decode()
        with self._database.write("adding to a log") as db:
            db.execute(
                "INSERT INTO logs (subject, at, level, step, message, details) VALUES (?, ?, ?, ?, ?, ?)",
                (subject, now(), level, step, message, encoded),
            )

    def page(self, subject: str, query: Mapping[str, str]) -> JsonObject:
        """Return a page, oldest entry first: the last one, or that before or after a cursor."""
        limit = number(query, "limit", DEFAULT_PAGE, least=1, most=MAX_PAGE)
        direction = query.get("direction", "older")
        if direction not in ("older", "newer"):
            raise invalid("direction must be older or newer", "direction")
        older = direction == "older"
        # Without a cursor, older entries begin at the end: no entry has a number that high.
        cursor = number(query, "cursor", 2**53 if older else 0)
        comparison, order = ("<", "DESC") if older else (">", "ASC")
        rows = self._database.all(
            f"SELECT * FROM logs WHERE subject = ? AND pk {comparison} ? ORDER BY pk {order} LIMIT ?",  # noqa: S608
            subject,
            cursor,
            # One more than asked for shows that there are more.
            limit + 1,
        )
        rows, more = rows[:limit], len(rows) > limit
        # A client that follows the log needs a cursor to ask with again, even if there is nothing new.
        last = rows[-1]["pk"] if rows else cursor
        following = str(last) if more or not older else None
        entries = rows[::-1] if older else rows
        return {"logs": [entry(row) for row in entries], "next_cursor": following, "has_more": more}

    def after(self, subject: str, cursor: int) -> list[Row]:
        """Return the entries after a cursor."""
        return self._database.all(
            "SELECT * FROM logs WHERE subject = ? AND pk > ? ORDER BY pk LIMIT 500", subject, cursor
        )


def entry(row: Row) -> JsonObject:
    """Return an entry in the API's format."""
    return {
        "timestamp": iso(row["at"]),
        "level": row["level"],
        "step": row["step"],
        "message": row["message"],
        "details": None if row["details"] is None else msgspec.json.decode(row["details"]),
    }
