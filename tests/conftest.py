"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import inspect
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from commands import Osmosis, fork_with_litellm, run_osmosis
from repos import write_repo
from stage import Stage

# In CI, output is escaped for the runner that reads it; tests of that set the variable themselves.
os.environ.pop("CI", None)

# Under nohup, commands would ignore it, and tests send it to them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one process run all tests whose workers call LiteLLM, so that only its fork server imports it."""
    for item in items:
        if item.get_closest_marker("litellm") is not None:
            item.add_marker(pytest.mark.xdist_group("litellm"))


@pytest.fixture(autouse=True)
def _fork_server(request: pytest.FixtureRequest) -> None:
    fork_with_litellm(request.node.get_closest_marker("litellm") is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the mark `in_process` beside the commands that it starts."""
    if pyfuncitem.get_closest_marker("in_process") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    Stage().play(functools.partial(pyfuncitem.obj, **arguments))
    return True
