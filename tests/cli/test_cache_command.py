"""The reply cache: a second run makes no model call and gets the same results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, Osmosis
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, status, text, tool_call
from repos import write_repo

ROW = {"system_prompt": "Use the tools.", "user_prompt": "What is 1 + 2?", "ground_truth": "3"}
KEY = "sk-a-key-that-nobody-may-see"


def adding(request: Request) -> Reply:
    """Calls the tool, then answers with its result."""
    if request.turn:
        return text(request.messages[-1]["content"])
    a, b = request.messages[1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
    return tool_call("add", a=int(a), b=int(b))


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(adding).run_in_thread() as endpoint:
        yield endpoint


def run(osmosis: Osmosis, command: str, endpoint: ScriptedEndpoint, cwd: Path, *more: str) -> Finished:
    return osmosis(command, "--base-url", endpoint.url, "--model", "scripted", "--json", *more, cwd=cwd)


def last_run(osmosis: Osmosis, cwd: Path) -> list[dict[str, Any]]:
    """The latest run's rollouts, in order."""
    done = osmosis("runs", "export", "latest", "--format", "jsonl", cwd=cwd)
    assert done.code == 0, done.stderr
    rollouts = [json.loads(line) for line in done.stdout.splitlines()]
    return sorted(rollouts, key=lambda rollout: (rollout["row_index"], rollout["run_index"]))


def test_a_second_run_asks_nothing_and_comes_to_the_same(
    osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint
) -> None:
    first = run(osmosis, "test", endpoint, repo, "--cache", "--api-key", KEY, "--workers", "2")
    assert first.code == 0, first.stderr
    original = last_run(osmosis, repo)
    assert len(endpoint.chats) == 6
    assert first.json["summary"]["total_tokens"] == 90

    # Another key is no other request, and neither are other processes.
    second = run(osmosis, "test", endpoint, repo, "--cache", "--api-key", KEY + "-too", "--workers", "1")
    assert second.code == 0, second.stderr
    assert len(endpoint.chats) == 6
    assert second.json["summary"]["total_tokens"] == 0
    assert [result["token_usage"]["total_tokens"] for result in second.json["results"]] == [0, 0, 0]
    for name in ("row_index", "success", "reward", "finish_reason"):
        assert [r[name] for r in second.json["results"]] == [r[name] for r in first.json["results"]]
    replayed = last_run(osmosis, repo)
    assert [rollout["messages"] for rollout in replayed] == [rollout["messages"] for rollout in original]
    assert "from the cache" in osmosis("runs", "show", "latest", "--row", "0", cwd=repo).stdout

    # Without the option nothing is looked up.
    third = run(osmosis, "test", endpoint, repo, "--workers", "1")
    assert third.json["summary"]["total_tokens"] == 90
    assert len(endpoint.chats) == 12
    assert KEY.encode() not in b"".join(file.read_bytes() for file in (repo / ".osmosis").rglob("*") if file.is_file())


def test_what_changes_the_request_misses(osmosis: Osmosis, tmp_path: Path, endpoint: ScriptedEndpoint) -> None:
    repo = write_repo(tmp_path / "repo", rows=[ROW])

    def requests_of(*options: str) -> int:
        before = len(endpoint.chats)
        done = run(osmosis, "test", endpoint, repo, "--cache", "--workers", "1", *options)
        assert done.code == 0, done.stderr
        return len(endpoint.chats) - before

    def change(file: str, old: str, new: str) -> None:
        content = (repo / file).read_text(encoding="utf-8")
        assert old in content
        (repo / file).write_text(content.replace(old, new), encoding="utf-8")

    assert requests_of("--temperature", "0.5", "--param", "top_p=0.9") == 2
    assert requests_of("--param", "top_p=0.9", "--temperature", "0.5") == 0
    assert requests_of("--temperature", "0.6", "--param", "top_p=0.9") == 2
    assert requests_of("--temperature", "0.5", "--param", "top_p=0.8") == 2
    assert requests_of() == 2
    # Only what the request holds counts: a reward function isn't part of it.
    change("reward_fn/rewards.py", "1.0", "0.5")
    assert requests_of() == 0
    # What a tool returns is part of the second turn's request.
    change("mcp/main.py", "return a + b", "return a + b + 1000")
    assert requests_of() == 1
    change("mcp/main.py", "a: int, b: int", "a: int, b: float")
    assert requests_of() == 2
    change("test_data.jsonl", "1 + 2", "1 + 3")
    assert requests_of() == 2
    assert requests_of() == 0


def test_several_attempts_stay_several_samples(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=[ROW])
    numbers = itertools.count()
    with ScriptedEndpoint(lambda _: text(f"sample {next(numbers)}")).run_in_thread() as endpoint:

        def samples(n: int) -> list[str]:
            done = run(osmosis, "eval", endpoint, repo, "--cache", "--n", str(n))
            assert done.code == 0, done.stderr
            return [rollout["messages"][-1]["content"] for rollout in last_run(osmosis, repo)]

        original = samples(3)
        assert len(set(original)) == 3
        assert samples(3) == original
        assert len(endpoint.chats) == 3
        assert samples(5)[:3] == original
        assert len(endpoint.chats) == 5


def test_failed_requests_are_asked_again(osmosis: Osmosis, tmp_path: Path) -> None:
    repo = write_repo(tmp_path / "repo", rows=[ROW])
    replies = [status(400), text("3")]
    with ScriptedEndpoint(lambda _: replies.pop(0)).run_in_thread() as endpoint:
        assert run(osmosis, "test", endpoint, repo, "--cache").code == 1
        assert run(osmosis, "test", endpoint, repo, "--cache").json["summary"]["passed"] == 1
        assert run(osmosis, "test", endpoint, repo, "--cache").json["summary"]["passed"] == 1
        assert len(endpoint.chats) == 2


def test_offline_models_leave_no_replies(osmosis: Osmosis, repo: Path) -> None:
    assert osmosis("test", "--model", "offline/oracle", "--cache", "-q", cwd=repo).code == 0
    assert osmosis("cache", "--json", cwd=repo).json["entries"] == 0


def test_show_and_clear(osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint) -> None:
    nothing = {"path": str(repo / ".osmosis" / "cache.db"), "entries": 0, "bytes": 0, "hits": 0}
    assert osmosis("cache", "--json", cwd=repo).json == nothing
    for _ in range(2):
        run(osmosis, "test", endpoint, repo, "--cache")
    shown = osmosis("cache", "--json", cwd=repo / "mcp").json
    assert (shown["path"], shown["entries"], shown["hits"]) == (nothing["path"], 6, 6)
    assert shown["bytes"] > 500
    done = osmosis("cache", cwd=repo)
    assert (done.code, done.stderr) == (0, "")
    assert "6 replies" in done.stdout
    assert "used 6 times" in done.stdout

    cleared = osmosis("cache", "clear", "--root", str(repo), "--json").json
    assert cleared == {"path": nothing["path"], "removed": {"entries": 6, "bytes": shown["bytes"]}}
    assert osmosis("cache", "--json", cwd=repo).json == nothing
    assert "removed 0 replies" in osmosis("cache", "clear", cwd=repo).stdout
    run(osmosis, "test", endpoint, repo, "--cache")
    assert len(endpoint.chats) == 12
    missing = osmosis("cache", "--root", "nowhere", cwd=repo)
    assert (missing.code, missing.stdout) == (2, "")
    assert "nowhere" in missing.stderr


def test_a_damaged_cache_stops_the_run_before_any_request(
    osmosis: Osmosis, repo: Path, endpoint: ScriptedEndpoint
) -> None:
    (repo / ".osmosis").mkdir()
    (repo / ".osmosis" / "cache.db").write_bytes(b"no database at all" * 100)
    done = run(osmosis, "test", endpoint, repo, "--cache")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    for part in ("cache.db", "osmosis cache clear", "--no-cache"):
        assert part in done.stderr
    assert endpoint.requests == []
    assert run(osmosis, "test", endpoint, repo, "--no-cache").code == 0
    assert osmosis("cache", cwd=repo).code == 2
    cleared = osmosis("cache", "clear", cwd=repo)
    assert (cleared.code, cleared.stderr) == (0, "")
    assert "damaged" in cleared.stdout
    assert run(osmosis, "test", endpoint, repo, "--cache").code == 0
