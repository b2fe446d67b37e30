"""Datasets: uploaded to a signed URL, checked, stored once per content, and visible only once complete."""

from __future__ import annotations

import os
import re
import sqlite3
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread
import msgspec

from osmosis_ai.data.formats import FORMATS, suffixes
from osmosis_ai.platform.accounts import Holder, Workspace
from osmosis_ai.platform.cleaning import drop_unused_file
from osmosis_ai.platform.database import Database, Row
from osmosis_ai.platform.dataset_check import check_file
from osmosis_ai.platform.errors import ApiError, conflict, invalid, not_found
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.paging import Window, iso, now, page
from osmosis_ai.platform.uploads import UploadError, receive_file, sync_folder
from osmosis_ai.records import JsonObject

__all__ = ["Datasets"]

MAX_BYTES = 5 << 30
"""The hosted platform's limit, which released clients check too."""
DATASET_NAME = re.compile(r"[^\x00-\x1f\x7f/\\]{1,200}")
FILE_FORMATS = {one.suffix.removeprefix(".") for one in FORMATS}


class Datasets:
    """The datasets of all workspaces."""

    def __init__(self, database: Database, home: Home) -> None:
        self._database = database
        self._home = home

    def create(
        self, holder: Holder, workspace: Workspace, name: str, extension: str, size: int, replaces: str | None
    ) -> Row:
        """Register an upload, and return its row; raise ApiError if it isn't acceptable.

        Args:
            holder: The user who uploads.
            workspace: The dataset's workspace.
            name: The dataset's name, which must be free unless it is the one of `replaces`.
            extension: The file's extension, which selects the format.
            size: The file's size in bytes.
            replaces: The id of the dataset to replace; None for a new one.
        """
        extension = extension.lower().removeprefix(".")
        if not DATASET_NAME.fullmatch(name) or name in (".", "..") or name != name.strip():
            raise invalid(f"{name[:60]!r} can't be a dataset's name", "file_name")
        if extension not in FILE_FORMATS:
            raise invalid(f"a dataset is one of {suffixes(' or ')}", "extension")
        if not 0 < size <= MAX_BYTES:
            raise invalid(f"a dataset must have from 1 byte to {MAX_BYTES >> 30} GiB", "file_size")
        taken = self._named(workspace.id, name)
        if taken is not None and taken["id"] != replaces:
            raise conflict(f"a dataset {name} already exists", {"existing_dataset_id": taken["id"]})
        dataset_id, at = str(uuid.uuid4()), now()
        # If the dataset to replace was deleted meanwhile, there is nothing left to replace.
        with self._database.write("creating a dataset") as db:
            db.execute(
                "INSERT INTO datasets (id, workspace, name, format, size, status, replaces, creator, created_at, "
                "updated_at) VALUES (?1, ?2, ?3, ?4, ?5, 'pending', ?6, ?7, ?8, ?8)",
                (dataset_id, workspace.id, name, extension, size, replaces and taken and replaces, holder.user_id, at),
            )
        return self._by_id(dataset_id)

    async def receive(self, dataset_id: str, stream: AsyncIterator[bytes]) -> str:
        """Write an upload to disk durably, and return its hash; raise ApiError."""
        row = await anyio.to_thread.run_sync(self._by_id, dataset_id)
        if row["status"] not in ("pending", "uploading"):
            raise conflict("this dataset is uploaded already")
        try:
            digest = await receive_file(self._upload(row), stream, row["size"])
        except UploadError as error:
            raise invalid(str(error)) from None
        except OSError as error:
            raise ApiError(507, f"the upload can't be stored: {error.strerror}", "STORAGE_FULL") from error
        await anyio.to_thread.run_sync(self._received, dataset_id, digest)
        return digest

    def complete(self, workspace: Workspace, dataset_id: str) -> Row:
        """Check an upload, and publish it as the dataset of its name; raise ApiError. Safe to repeat."""
        row = self.find(workspace, dataset_id)
        # A client that lost the answer asks again.
        if row["status"] in ("uploaded", "error"):
            return row
        upload = self._upload(row)
        if row["sha256"] is None or not upload.is_file():
            raise conflict("nothing was uploaded to this dataset's URL yet")
        # From here on, `drop_unused_file` counts this dataset as a user of its file.
        self._set(row["id"], "processing")
        checked = check_file(upload, f"{row['name']}.{row['format']}")
        if checked.error is not None:
            upload.unlink(missing_ok=True)
            self._set(row["id"], "error", checked.error)
            raise invalid(checked.error, "file")
        # On disk before the database names it: after a crash there may be an unused file, but no dataset without one.
        target = self._file(row)
        os.replace(upload, target)  # noqa: PTH105 - the same content may be there
        sync_folder(target.parent)
        try:
            with self._database.write("completing a dataset") as db:
                if row["replaces"] is not None:
                    db.execute("UPDATE datasets SET status = 'cancelled' WHERE id = ?", (row["replaces"],))
                db.execute(
                    "UPDATE datasets SET status = 'uploaded', row_count = ?, preview = ?, statistics = ?, "
                    "updated_at = ? WHERE id = ?",
                    (
                        checked.row_count,
                        msgspec.json.encode(checked.preview).decode(),
                        msgspec.json.encode(checked.statistics).decode(),
                        now(),
                        row["id"],
                    ),
                )
        except Exception as error:
            # The unique index on names: another upload of this name was completed first.
            if isinstance(error.__cause__, sqlite3.IntegrityError):
                self._set(row["id"], "cancelled")
                raise conflict(f"a dataset {row['name']} already exists") from None
            raise
        if row["replaces"] is not None:
            drop_unused_file(self._database, self._home, self._file(self._by_id(row["replaces"])).name)
        return self._by_id(row["id"])

    def abort(self, workspace: Workspace, dataset_id: str) -> None:
        """Cancel an upload; raise ApiError if it is complete."""
        row = self.find(workspace, dataset_id)
        if row["status"] == "uploaded":
            raise conflict("this dataset is uploaded already")
        self._set(row["id"], "cancelled")
        self._upload(row).unlink(missing_ok=True)

    def delete(self, workspace: Workspace, name: str) -> None:
        """Delete a dataset; raise ApiError if there is none. Runs that have started keep their copy of the file."""
        row = self.find(workspace, name)
        self._set(row["id"], "cancelled")
        if row["sha256"] is not None:
            drop_unused_file(self._database, self._home, self._file(row).name)

    def listed(self, workspace: Workspace, window: Window) -> JsonObject:
        """List datasets, newest first."""
        where = "FROM datasets d JOIN users u ON u.id = d.creator WHERE d.workspace = ? AND d.status <> 'cancelled'"
        total = self._database.count(f"SELECT count(*) {where}", workspace.id)
        rows = self._database.all(
            f"SELECT d.*, u.name AS creator_name {where} ORDER BY d.pk DESC LIMIT ? OFFSET ?", workspace.id, *window
        )
        return page("datasets", [self.item(row) for row in rows], total, window)

    def find(self, workspace: Workspace, name: str) -> Row:
        """Return a dataset by its name or id; raise ApiError."""
        row = self._named(workspace.id, name) or self._database.one(
            f"{_SELECT} AND d.id = ? AND d.status <> 'cancelled'", workspace.id, name
        )
        if row is None:
            raise not_found(f"there is no dataset {name[:200]}; `osmosis dataset list` shows them")
        return row

    def item(self, row: Row) -> JsonObject:
        """Return a dataset in the API's format."""
        return {
            "id": row["id"],
            "file_name": row["name"],
            "file_size": row["size"],
            "status": row["status"],
            "file_format": row["format"],
            "original_file_format": row["format"],
            "row_count": row["row_count"],
            "original_file_size": row["size"],
            "creator_name": row["creator_name"],
            "created_at": iso(row["created_at"]),
            "updated_at": iso(row["updated_at"]),
            "sha256": row["sha256"],
            "error": row["error"],
        }

    def detail(self, row: Row) -> JsonObject:
        """Return a dataset in the API's format, with its first rows and column statistics."""
        return {
            **self.item(row),
            "data_preview": None if row["preview"] is None else msgspec.json.decode(row["preview"]),
            "statistics": None if row["statistics"] is None else msgspec.json.decode(row["statistics"]),
        }

    def file(self, dataset_id: str) -> tuple[Path, str]:
        """Return the file of a dataset and its name for download."""
        row = self._by_id(dataset_id)
        return self._file(row), f"{row['name']}.{row['format']}"

    def _received(self, dataset_id: str, digest: str) -> None:
        with self._database.write("storing an upload") as db:
            db.execute("UPDATE datasets SET status = 'uploading', sha256 = ? WHERE id = ?", (digest, dataset_id))

    def _set(self, dataset_id: str, status: str, error: str | None = None) -> None:
        with self._database.write("changing a dataset") as db:
            db.execute(
                "UPDATE datasets SET status = ?, error = ?, updated_at = ? WHERE id = ?",
                (status, error, now(), dataset_id),
            )

    def _named(self, workspace: str, name: str) -> Row | None:
        return self._database.one(f"{_SELECT} AND d.name = ? AND d.status = 'uploaded'", workspace, name)

    def _by_id(self, dataset_id: str) -> Row:
        row = self._database.one(
            "SELECT d.*, u.name AS creator_name FROM datasets d JOIN users u ON u.id = d.creator WHERE d.id = ?",
            dataset_id,
        )
        if row is None:
            raise not_found("there is no such dataset")
        return row

    def _upload(self, row: Row) -> Path:
        return self._home.datasets / f"{row['id']}.{row['format']}"

    def _file(self, row: Row) -> Path:
        return self._home.datasets / f"{row['sha256']}.{row['format']}"


_SELECT = "SELECT d.*, u.name AS creator_name FROM datasets d JOIN users u ON u.id = d.creator WHERE d.workspace = ?"
