"""Delete what is no longer needed: the code of ended runs, unused dataset files, and abandoned uploads."""

from __future__ import annotations

import shutil

from osmosis_ai.platform.database import Database
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.paging import now

__all__ = ["clean", "drop_code", "drop_unused_file"]

GIVEN_UP_SECONDS = 7 * 86400
"""Age from which an unfinished upload counts as abandoned; until then, a client may continue it."""


def clean(database: Database, home: Home) -> None:
    """Delete what an earlier server left behind."""
    for part in home.datasets.glob("*.part"):
        part.unlink(missing_ok=True)
    long_ago = now() - GIVEN_UP_SECONDS
    with database.write("giving up old uploads") as db:
        db.execute(
            "UPDATE datasets SET status = 'cancelled' WHERE status IN ('pending', 'uploading') AND updated_at < ?",
            (long_ago,),
        )
        db.execute("DELETE FROM imports WHERE NOT finalized AND run IS NULL AND created_at < ?", (long_ago,))
    awaited = "SELECT id FROM datasets WHERE status IN ('pending', 'uploading', 'processing')"
    uploads = {row["id"] for row in database.all(awaited)}
    for file in home.datasets.iterdir():
        if file.stem not in uploads:
            drop_unused_file(database, home, file.name)
    known = {row["id"] for row in database.all("SELECT id FROM imports WHERE NOT finalized")}
    for folder in (home.folder / "imports").glob("*"):
        if folder.name not in known:
            shutil.rmtree(folder, ignore_errors=True)
    active = {row["id"] for row in database.all("SELECT id FROM runs WHERE completed_at IS NULL")}
    for folder in (home.folder / "runs").glob("*"):
        if folder.name not in active:
            drop_code(home, folder.name)


def drop_code(home: Home, run_id: str) -> None:
    """Delete the code of an ended run; a retry checks it out again from the clone."""
    shutil.rmtree(home.run(run_id) / "code", ignore_errors=True)


def drop_unused_file(database: Database, home: Home, name: str) -> None:
    """Delete a dataset file that no dataset and no waiting run uses. Runs that have started hold a hard link."""
    sha256 = name.partition(".")[0]
    users = database.count(
        "SELECT (SELECT count(*) FROM datasets WHERE sha256 = ?1 AND status IN ('uploaded', 'processing')) + "
        "(SELECT count(*) FROM runs WHERE dataset_sha256 = ?1 AND completed_at IS NULL)",
        sha256,
    )
    if not users:
        (home.datasets / name).unlink(missing_ok=True)
