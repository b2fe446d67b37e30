"""Rollouts on disk: whose they are, what is written, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loops import KEY, TRAINER_KEY, Adding, health, init, serving, until

from osmosis_ai.rollout import RolloutRequest, create_app
from osmosis_ai.rollout.server.ledger import Ledger, OpenRollout
from osmosis_ai.rollout.testing import Gate, TrainerDouble, serve_app, text

KILLED = "the server was killed before the rollout had ended"


def request(rollout_id: str, **fields: str) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, server_url="http://localhost:1", messages=[], **fields)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What is in the only file of a folder."""
    (file,) = folder.glob("open/*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split()]


def test_an_accepted_rollout_is_in_a_private_file_without_its_key_and_conversation(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "undelivered")
    assert list(tmp_path.iterdir()) == []
    number = ledger.accept(request("a", api_key=TRAINER_KEY))
    kept = {"rollout_id": "a", "server_url": "http://localhost:1", "has_key": True}
    assert lines(tmp_path / "undelivered") == [{"number": number, "rollout": kept}]
    (file,) = tmp_path.glob("undelivered/open/*")
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [0o600, 0o700, 0o700]
    ledger.end(number)
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_servers_rollouts_are_its_own(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    one.end(one.accept(request("ended")))
    one.accept(request("a"))
    assert other.lost() == []
    # Its lock ends as it does when the server is killed.
    one.close()
    ((number, rollout),) = other.lost()
    assert rollout == OpenRollout("a", "http://localhost:1", False)
    # They are in the other one's file by now.
    assert [line["number"] for line in lines(tmp_path)] == [number]
    assert Ledger(tmp_path).lost() == []


def test_the_file_doesnt_grow_with_the_rollouts_that_have_ended(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    first = ledger.accept(request("open"))
    for number in range(3000):
        ledger.end(ledger.accept(request(str(number))))
    assert len(lines(tmp_path)) < 1100
    ledger.close()
    ((_, rollout),) = Ledger(tmp_path).lost()
    assert rollout.rollout_id == "open"
    assert first == 1


def test_truncated_lines_are_ignored(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.accept(request("a"))
    (file,) = tmp_path.glob("open/*")
    with file.open("ab") as cut:
        cut.write(b'\n{"number": 7, "rollout": {"rollout_id": "b", "ser')
    ledger.accept(request("c"))
    ledger.close()
    assert [rollout.rollout_id for _, rollout in Ledger(tmp_path).lost()] == ["a", "c"]


def test_a_rollout_is_in_the_file_while_it_runs(tmp_path: Path) -> None:
    gate = Gate()
    with serving(Adding(), TrainerDouble([text("hi").after(gate)]), undelivered_dir=tmp_path) as (url, trainer):
        assert init(url, trainer.request("hello", rollout_id="a")).status == 202
        (line,) = lines(tmp_path)
        assert line["rollout"]["rollout_id"] == "a"
        gate.open()
        until(lambda: {"number": line["number"]} in lines(tmp_path), "it is delivered")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server_key", [KEY, None])
def test_a_lost_rollouts_key_comes_from_the_environment_for_trainers_that_have_the_servers(
    server_key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_TRAINER_API_KEY", TRAINER_KEY)
    with TrainerDouble(api_key=TRAINER_KEY).run_in_thread() as trainer:
        killed = Ledger(tmp_path)
        killed.accept(trainer.request("hello", rollout_id="a"))
        killed.close()
        with serve_app(create_app(Adding(), api_key=server_key, undelivered_dir=tmp_path)) as url:
            if server_key:
                assert trainer.wait_for_completion("a").error_message == KILLED
            else:
                until(lambda: health(url)["undelivered_rollouts"] == 1, "it is kept")
                assert trainer.deliveries == []
    assert len(list(tmp_path.iterdir())) == (0 if server_key else 1)
