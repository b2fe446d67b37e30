"""Rollout servers that die at any point: every other rollout completes, and none is recorded twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from commands import run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text

SERVER = Path(__file__).parents[1] / "runtime" / "worker" / "workflows" / "plain_rollout.py"
DEATHS = ["die when asked", "die", "die in a call", "die between calls", "die while grading"]


def answer(request: Request) -> Reply:
    replied = text("42")
    # The server dies before this reply.
    return replied.after(0.5) if request.messages[1]["content"] == "die in a call" else replied


def evaluate(root: Path, tasks: list[str], *options: str) -> dict[str, Any]:
    """Run rows with these tasks; return the rollouts' records by task."""
    folder = root / "rollouts" / "plain"
    folder.mkdir(parents=True)
    shutil.copy(SERVER, folder / "main.py")
    rows = [{"system_prompt": "Compute.", "user_prompt": task, "ground_truth": "42"} for task in tasks]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        given = ["--rollout", "rollouts/plain", "-d", "rows.jsonl", "--base-url", endpoint.url, "--model", "scripted"]
        finished = run_osmosis("eval", *given, "--batch-size", "4", *options, cwd=root)
    assert finished.code == 1, finished.stderr
    shown = run_osmosis("runs", "show", "--json", cwd=root).json["rollouts"]
    ended = {tasks[rollout["row_index"]]: rollout for rollout in shown}
    assert len(shown) == len(ended) == len(tasks)
    return ended


def test_a_server_may_die_at_every_point(tmp_path: Path) -> None:
    for task, rollout in evaluate(tmp_path, ["one", *DEATHS, "two", "die when done", "three"]).items():
        if task in DEATHS:
            failure = rollout["failure"]
            assert (failure["origin"], failure["kind"]) == ("worker", "died"), task
            assert failure["message"] == "the rollout server ended with code 3"
        else:
            assert (rollout["failure"], rollout["scores"]["plain"]["value"]) == (None, 1.0), task


def test_a_workflow_past_its_deadline_costs_only_itself_even_if_it_blocks_its_server(tmp_path: Path) -> None:
    for task, rollout in evaluate(tmp_path, ["one", "block", "two", "hang", "three"], "--timeout", "2").items():
        if task in ("block", "hang"):
            assert rollout["failure"]["origin"] == "timeout", rollout["failure"]
        else:
            assert (rollout["failure"], rollout["scores"]["plain"]["value"]) == (None, 1.0), task
