"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, the only event loop the runtime uses."""
    return "asyncio"
