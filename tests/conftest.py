"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hypothesis import settings

from commands import Osmosis, run_osmosis
from repos import write_repo

# The same examples in every run, however slow the machine: what fails once fails again.
settings.register_profile("osmosis", derandomize=True, deadline=None)
settings.load_profile("osmosis")


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, the only event loop the runtime uses."""
    return "asyncio"


@pytest.fixture
def osmosis(tmp_path: Path) -> Osmosis:
    """Runs the command line in a folder and returns what it printed."""
    return functools.partial(run_osmosis, cwd=tmp_path)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A small git-sync repository: one adding tool, one reward function, three rows."""
    return write_repo(tmp_path / "repo")
