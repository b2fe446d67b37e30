"""The folder that keeps a rollout's files, its trajectory and its diagnostics."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import anyio.to_thread

from osmosis_ai.rollout.vocabulary import ARTIFACT_ROOT_VARIABLE

__all__ = ["artifact_root", "artifacts_dir"]

logger = logging.getLogger(__name__)

_CHECK_FILE = ".osmosis-health-check"


def artifact_root() -> Path:
    """Return the folder with one subfolder per rollout: `_OSMOSIS_ROLLOUT_ARTIFACT_ROOT`, else `~/.osmosis`."""
    named = os.environ.get(ARTIFACT_ROOT_VARIABLE)
    return Path(named) if named else Path.home() / ".osmosis"


async def artifacts_dir(root: Path, rollout_id: str) -> Path | None:
    """Create the folder for a rollout's own files, and return it; None, with a warning, if it can't be written."""
    return await anyio.to_thread.run_sync(_create, root / rollout_id)


def _create(folder: Path) -> Path | None:
    found = folder / "artifacts"
    try:
        found.mkdir(parents=True, exist_ok=True)
        # Test by writing a file, because a mounted folder may exist and still refuse files. The file goes beside the
        # artifacts, not among them.
        (folder / _CHECK_FILE).touch()
    except OSError as error:
        logger.warning("a rollout runs without a folder for its files: %s", error)
        return None
    return found
