"""Rollouts on disk: whose they are, what is written, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loops import KEY, TRAINER_KEY, Adding, health, init, serving, until

from osmosis_ai.rollout import RolloutRequest, create_app
from osmosis_ai.rollout.server.ledger import Ledger, OpenRollout
from osmosis_ai.rollout.testing import Gate, TrainerDouble, serve_app, text

KILLED = "the server was killed before the rollout had ended"


def request(rollout_id: str, **fields: str) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, server_url="http://localhost:1", messages=[], **fields)


def test_a_rollout_is_a_private_file_without_its_key_and_conversation(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "undelivered")
    assert not (tmp_path / "undelivered").exists()
    file = ledger.new_file()
    ledger.add(file, request("a", api_key=TRAINER_KEY))
    assert json.loads(file.read_bytes()) == {"rollout_id": "a", "server_url": "http://localhost:1", "has_key": True}
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.unlink()
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_living_servers_rollouts_are_its_own(tmp_path: Path) -> None:
    one, other = Ledger(tmp_path), Ledger(tmp_path)
    one.add(one.new_file(), request("a"))
    assert list(other.lost()) == []
    # Its lock ends as it does when the server is killed.
    one.close()
    ((rollout, _),) = other.lost()
    assert rollout == OpenRollout("a", "http://localhost:1", False)
    assert list(Ledger(tmp_path).lost()) == []


def test_a_broken_file_is_no_rollout(tmp_path: Path) -> None:
    folder = tmp_path / "open" / "dead"
    folder.mkdir(parents=True)
    (folder / "half.json").write_text('{"rollout_id": "a"', encoding="utf-8")
    (folder / "huge.json").write_text(" " * 100_000, encoding="utf-8")
    ledger = Ledger(tmp_path)
    assert list(ledger.lost()) == []
    ledger.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rollout_is_on_disk_while_it_runs(tmp_path: Path) -> None:
    gate = Gate()
    with serving(Adding(), TrainerDouble([text("hi").after(gate)]), undelivered_dir=tmp_path) as (url, trainer):
        assert init(url, trainer.request("hello", rollout_id="a")).status == 202
        (file,) = tmp_path.glob("open/*/*.json")
        assert json.loads(file.read_bytes())["rollout_id"] == "a"
        gate.open()
        until(lambda: not file.exists(), "it is delivered")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("server_key", [KEY, None])
def test_a_lost_rollouts_key_comes_from_the_environment_for_trainers_that_have_the_servers(
    server_key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_TRAINER_API_KEY", TRAINER_KEY)
    with TrainerDouble(api_key=TRAINER_KEY).run_in_thread() as trainer:
        killed = Ledger(tmp_path)
        killed.add(killed.new_file(), trainer.request("hello", rollout_id="a"))
        killed.close()
        with serve_app(create_app(Adding(), api_key=server_key, undelivered_dir=tmp_path)) as url:
            if server_key:
                assert trainer.wait_for_completion("a").error_message == KILLED
            else:
                until(lambda: health(url)["undelivered_rollouts"] == 1, "it is kept")
                assert trainer.deliveries == []
    assert len(list(tmp_path.iterdir())) == (0 if server_key else 1)
