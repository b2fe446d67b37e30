"""Compare output with committed text files, and rewrite them on request."""

from __future__ import annotations

import os
from pathlib import Path

UPDATE = "OSMOSIS_UPDATE_SNAPSHOTS"


def check_snapshot(file: Path, shown: str) -> None:
    """Assert that a file holds this text exactly. With OSMOSIS_UPDATE_SNAPSHOTS=1, write it instead."""
    if os.environ.get(UPDATE):
        file.write_text(shown, encoding="utf-8")
    assert file.is_file(), f"{file.name} is missing; write it with {UPDATE}=1 pytest {file.parent.parent}"
    assert shown == file.read_text(encoding="utf-8"), f"if this is right, rewrite it with {UPDATE}=1"
