"""Fixtures of the tests of workflow rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from workflows import Controller


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of rollouts' files, instead of the user's."""
    monkeypatch.setenv("_OSMOSIS_ROLLOUT_ARTIFACT_ROOT", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


@pytest.fixture
def controller() -> Iterator[Controller]:
    """A controller that accepts every callback."""
    with Controller().run_in_thread() as controller:
        yield controller
