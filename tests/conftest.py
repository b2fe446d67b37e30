"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples in every run, however slow the machine: what fails once fails again.
settings.register_profile("osmosis", derandomize=True, deadline=None)
settings.load_profile("osmosis")


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, the only event loop the runtime uses."""
    return "asyncio"
