"""Reading `.env` files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from osmosis_ai.environment import MAX_BYTES, environment_of
from osmosis_ai.errors import UsageError


def test_variables_that_exist_win_and_folders_are_read_in_order(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".env").write_text(f"A={name}\nB={name}\n{name.upper()}=1\n", encoding="utf-8")
    found = environment_of({"A": "given"}, tmp_path / "first", tmp_path / "second", tmp_path / "none")
    assert found == {"A": "given", "B": "first", "FIRST": "1", "SECOND": "1"}


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".env")
    with pytest.raises(UsageError, match="not a regular file"):
        environment_of({}, tmp_path)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / ".env").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        environment_of({}, tmp_path)
