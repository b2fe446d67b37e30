"""The file of a run's rollouts in flight."""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.masking import Masker
from osmosis_ai.store.live import MOST, RunningRollout, live_path, read_live
from osmosis_ai.store.run_store import RunStore


def running(count: int = 1, waiting_on: str = "the model (turn 1)") -> list[RunningRollout]:
    return [RunningRollout(index, 0, 1000.0, waiting_on) for index in range(count)]


def test_the_file_says_what_is_in_flight_and_is_removed(tmp_path: Path) -> None:
    with RunStore.open(tmp_path, masker=Masker(["sk-secret"])) as store:
        assert read_live(store.path, "r") == []
        file = store.live_file("r")
        file.show(running())
        assert read_live(store.path, "r") == running()
        file.show(running(waiting_on="tool sk-secret"))
        assert read_live(store.path, "r")[0].waiting_on == "tool [masked]"
        file.show(running(MOST + 1))
        assert len(read_live(store.path, "r")) == MOST
        file.remove()
        file.remove()
        assert list((tmp_path / ".osmosis" / "live").iterdir()) == []


def test_the_file_is_written_only_when_something_changed(tmp_path: Path) -> None:
    with RunStore.open(tmp_path) as store:
        file, path = store.live_file("r"), live_path(store.path, "r")
        file.show(running())
        before = path.stat().st_ino
        file.show([RunningRollout(0, 0, 1000.5, "the model (turn 1)")])
        assert path.stat().st_ino == before
        file.show(running(waiting_on="tool add"))
        assert path.stat().st_ino != before


def test_a_file_that_can_t_be_written_or_read_costs_nothing(tmp_path: Path) -> None:
    with RunStore.open(tmp_path) as store:
        (tmp_path / ".osmosis" / "live").write_text("in the way", encoding="utf-8")
        store.live_file("r").show(running())
        store.live_file("r").remove()
        assert read_live(store.path, "r") == []
