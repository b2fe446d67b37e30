"""Rollout servers that die at any point: every other rollout completes, and none is recorded twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from commands import run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text

SERVER = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"
DEATHS = ["die when asked", "die", "die in a call", "die between calls", "die while grading"]


def answer(request: Request) -> Reply:
    replied = text("42")
    # The server dies before this reply.
    return replied.after(0.5) if request.messages[1]["content"] == "die in a call" else replied


def test_a_server_may_die_at_every_point(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts" / "plain"
    folder.mkdir(parents=True)
    shutil.copy(SERVER, folder / "main.py")
    tasks = ["one", *DEATHS, "two", "die when done", "three"]
    rows = [{"system_prompt": "Compute.", "user_prompt": task, "ground_truth": "42"} for task in tasks]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", "--base-url", endpoint.url, "--model", "scripted"]
        finished = run_osmosis("eval", *given, "--batch-size", "4", cwd=tmp_path)
    assert finished.code == 1, finished.stderr
    shown = run_osmosis("runs", "show", "--json", cwd=tmp_path).json["rollouts"]
    ended = {tasks[rollout["row_index"]]: rollout for rollout in shown}
    assert len(shown) == len(ended) == len(tasks)
    for task, rollout in ended.items():
        if task in DEATHS:
            failure = rollout["failure"]
            assert (failure["origin"], failure["kind"]) == ("worker", "died"), task
            assert failure["message"] == "the rollout server ended with code 3"
        else:
            assert (rollout["failure"], rollout["scores"]["plain"]["value"]) == (None, 1.0), task
