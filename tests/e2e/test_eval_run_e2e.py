"""`osmosis eval run` at a terminal, where a secret that is nowhere else is asked for and not shown; and its journal, of
which a killed command leaves what has happened.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from commands import clean_environment, run_osmosis
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, by_turn, text
from running import running
from terminal import Terminal
from waiting import PATIENCE, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "workflow"


def test_a_missing_secret_is_typed(tmp_path: Path) -> None:
    workspace = shutil.copytree(EXAMPLE, tmp_path / "workspace", ignore=shutil.ignore_patterns(".osmosis"))
    with ScriptedEndpoint(by_turn(text("408"))).run_in_thread() as endpoint:
        given = ["configs/eval/products-openai.toml", "--limit", "1", "--base-url", endpoint.url, "--workers", "1"]
        terminal = Terminal(["eval", "run", *given], workspace, clean_environment())
        try:
            terminal.wait_for("OPENAI_API_KEY: ")
            terminal.type("typed-secret\n")
            assert terminal.end() == 0, terminal.shown
        finally:
            terminal.close()
    assert "1 of 1 rollouts completed" in terminal.shown
    assert "typed-secret" not in terminal.shown


def journal(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def test_a_killed_command_leaves_its_journal_which_the_next_one_continues(tmp_path: Path) -> None:
    workspace = shutil.copytree(EXAMPLE, tmp_path / "workspace", ignore=shutil.ignore_patterns(".osmosis"))
    gate = Gate()
    first = json.loads((workspace / "data" / "products.jsonl").read_text(encoding="utf-8").partition("\n")[0])

    def script(request: Request) -> Reply:
        said = [message["content"] for message in request.messages]
        return text("408") if request.is_probe or first["user_prompt"] in said else text("408").after(gate)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        given = ["eval", "run", "configs/eval/products-openai.toml", "--limit", "2", "--n", "1", "--name", "mine"]
        given += ["--base-url", endpoint.url, "--workers", "1", "--max-in-flight", "1", "-o", "out"]
        env = {"OPENAI_API_KEY": "none"}
        with running(*given, cwd=workspace, env=env) as command:
            gate.reached.wait(PATIENCE)
            eventually(lambda: len(journal(workspace / "out" / "mine")) == 2)
            command.process.kill()
            command.wait()
        gate.open()
        left = journal(workspace / "out" / "mine")
        assert [event["type"] for event in left] == ["run_started", "item_completed"]
        finished = run_osmosis(*given, cwd=workspace, env=env)
        assert finished.code == 0, finished.stderr
    events = journal(workspace / "out" / "mine")
    assert [event["type"] for event in events] == ["run_started", "item_completed", "item_completed", "run_finished"]
    assert events[1]["rollout_id"] == left[1]["rollout_id"]
    assert [event["row_index"] for event in events[1:3]] == [0, 1]
