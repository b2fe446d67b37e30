"""Paths as users give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.folders import given_path


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("rows.jsonl", "/repo/rows.jsonl"),
        ("/data/rows.jsonl", "/data/rows.jsonl"),
        ("~/rows.jsonl", f"{Path.home()}/rows.jsonl"),
        ("~nobody-of-this-name/rows.jsonl", "/repo/~nobody-of-this-name/rows.jsonl"),
    ],
)
def test_a_path_starts_from_the_working_directory_or_a_home_folder(text: str, path: str) -> None:
    assert given_path(text, Path("/repo")) == Path(path)
