"""Two commands with one reply cache at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commands import Finished, Osmosis, run_installed, run_osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call
from repos import write_repo


def adding(request: Request) -> Reply:
    """Calls the tool, then answers with its result."""
    if request.turn:
        return text(request.messages[-1]["content"])
    a, b = request.messages[1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
    return tool_call("add", a=int(a), b=int(b))


def test_two_runs_at_once(tmp_path: Path) -> None:
    rows = [
        {"system_prompt": "Use the tools.", "user_prompt": f"What is {a} + 2?", "ground_truth": str(a + 2)}
        for a in range(40)
    ]
    repo = write_repo(tmp_path / "repo", rows=rows)
    with ScriptedEndpoint(adding).run_in_thread() as endpoint:

        def run(osmosis: Osmosis, *more: str) -> Finished:
            return osmosis(
                "test", "--base-url", endpoint.url, "--model", "scripted", "--json", "--cache", *more, cwd=repo
            )

        with ThreadPoolExecutor() as threads:
            for done in [threads.submit(run, run_installed, "--workers", "1") for _ in range(2)]:
                assert done.result().code == 0, done.result().stderr
                assert done.result().json["summary"]["functions"]["reward_fn.rewards:exact"]["mean"] == 1.0
        asked = len(endpoint.chats)
        assert 80 <= asked <= 160
        assert run_osmosis("cache", "--json", cwd=repo).json["entries"] == 80
        assert run(run_osmosis).json["summary"]["total_tokens"] == 0
        assert len(endpoint.chats) == asked
