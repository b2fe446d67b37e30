"""The record of a training run."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from osmosis_ai.errors import UsageError
from osmosis_ai.training.record import TrainingRecord


def test_looking_at_the_lock_does_not_block_training(tmp_path: Path) -> None:
    record = TrainingRecord(tmp_path, "first")
    record.create()
    with (record.folder / "lock").open("w", encoding="utf-8") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        timer = threading.Timer(0.02, fcntl.flock, (looking, fcntl.LOCK_UN))
        timer.start()
        with record.locked():
            assert record.is_locked
            with pytest.raises(UsageError, match="is running in another process"), record.locked():
                pass
        timer.join()
