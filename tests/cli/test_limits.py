"""Limits of time, tokens, text, money and concurrency."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from commands import Finished, run_osmosis
from osmosis_ai.store.queries import Queries
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, by_turn, hang, status, text, tool_call
from repos import ADDING, EXACT, ROWS, copy_repo, write_repo
from running import running

FUNCTION = "reward_fn.rewards:exact"

WAITING = (
    ADDING
    + '''

@mcp.tool
async def wait() -> str:
    """Wait for ever, politely."""
    import asyncio

    await asyncio.Event().wait()


@mcp.tool
def much(characters: int) -> str:
    """Return much."""
    return "x" * characters
'''
)
SLOW_SCORES = (
    EXACT
    + """

@osmosis_reward
async def slow(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    import asyncio

    await asyncio.Event().wait()
    return 1.0


@osmosis_reward
async def blocking(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    import time

    time.sleep(3600)
    return 1.0
"""
)


def first_row(done: Finished) -> dict[str, Any]:
    return done.json["results"][0]


def test_a_rollout_out_of_time_keeps_what_it_has_and_is_scored_when_asked(tmp_path: Path) -> None:
    partial = """
from osmosis_ai import osmosis_reward


@osmosis_reward
def results(messages, ground_truth, metadata) -> float:
    return float([message["content"] for message in messages if message["role"] == "tool"].count("3"))
"""
    root = write_repo(tmp_path / "repo", rewards=partial, rows=ROWS[:1])

    def script(request: Request) -> Reply:
        return tool_call("add", a=1, b=2) if request.turn == 0 else hang()

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        options = ["--base-url", endpoint.url, "--model", "scripted", "--timeout", "2", "--json"]
        done = run_osmosis("test", *options, cwd=root)
        row = first_row(done)
        assert (done.code, row["success"], row["finish_reason"]) == (1, False, "timeout")
        assert row["error"] == "timeout: the rollout took longer than 2 s (--timeout)"
        assert (row["reward"], row["scores"], row["tool_calls"], row["token_usage"]["total_tokens"]) == (
            None,
            {},
            1,
            15,
        )
        queries = Queries(root / ".osmosis" / "runs.db")
        (found,) = queries.scored(done.json["config"]["run_id"], with_trajectory=True)
        assert [message["role"] for message in found.stored.rollout.messages] == ["system", "user", "assistant", "tool"]

        scored = first_row(run_osmosis("test", *options, "--score-partial", cwd=root))
        assert (scored["finish_reason"], scored["reward"]) == ("timeout", 1.0)
        assert scored["error"] == row["error"]


def test_a_tool_call_out_of_time_is_an_answer_for_the_model(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=WAITING, rows=ROWS[:1])
    with ScriptedEndpoint(by_turn(tool_call("wait"), text("3"))).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = run_osmosis("test", *model, "--tool-timeout", "1", "--json", cwd=root)
        assert (done.code, first_row(done)["reward"]) == (0, 1.0)
        assert done.json["summary"]["tools"]["wait"]["errors"] == {"timeout": 1}
        result = endpoint.chats[-1].messages[-1]["content"]
        assert result == "Error: tool 'wait' did not answer within 1 seconds"


def test_a_score_out_of_time_is_a_scoring_error(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", rewards=SLOW_SCORES)
    with ScriptedEndpoint(by_turn(text("3"))).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = run_osmosis("test", *model, "--reward-timeout", "1", "--json", cwd=root)
        assert done.code == 1
        for row, score in zip(done.json["results"], [1.0, 0.0, 0.0], strict=True):
            slow, blocking = "reward_fn.rewards:slow", "reward_fn.rewards:blocking"
            assert row["scores"] == {FUNCTION: score, slow: None, blocking: None}
            assert row["scoring_errors"][slow] == "reward: took longer than 1 s"
            assert re.fullmatch(
                r"reward: (took longer than 1 s|user code held the event loop for \d+ s)",
                row["scoring_errors"][blocking],
            )
        assert len(endpoint.chats) == 3


def test_tokens_and_tool_output_are_bounded(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=WAITING, rows=ROWS[:1])
    with ScriptedEndpoint(by_turn(tool_call("much", characters=5_000_000))).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        limits = ["--max-tokens-total", "40", "--max-tool-output", "1000"]
        done = run_osmosis("test", *model, *limits, "--json", cwd=root)
        # 15 tokens a turn: the third one passes 40.
        assert (first_row(done)["finish_reason"], first_row(done)["success"]) == ("max_tokens_total", True)
        assert [len(request.messages) for request in endpoint.chats] == [2, 4, 6]
        result = endpoint.chats[-1].messages[-1]["content"]
        assert len(result) < 1200
        assert result.startswith("xxxx")
        assert "5,000,000" in result or "5000000" in result, result[-200:]


MILLION = 1_000_000
"""A turn of this many prompt tokens costs $0.15 with gpt-4o-mini."""


@pytest.mark.litellm
def test_a_budget_stops_the_run_and_counts_attempts_that_were_lost(tmp_path: Path) -> None:
    rows = [{"user_prompt": prompt} for prompt in ("exits", "answer", "answer", "answer", "answer")]
    root = copy_repo("misbehaving", tmp_path, rows)

    def script(request: Request) -> Reply:
        body = json.loads((tool_call("exits") if request.messages[1]["content"] == "exits" else text("done")).body)
        body["usage"] = {"prompt_tokens": MILLION, "completion_tokens": 0, "total_tokens": MILLION}
        body["model"] = "gpt-4o-mini"
        return Reply(json.dumps(body).encode())

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        env = {"OPENAI_API_KEY": "sk-none-of-this-is-real", "OPENAI_BASE_URL": endpoint.url}
        options = ["--model", "openai/gpt-4o-mini", "--batch-size", "1", "--json"]
        done = run_osmosis("test", *options, "--max-cost", "0.5", cwd=root, env=env)
        assert done.code == 1
        assert "the budget of $0.5 (--max-cost) is spent" in done.stderr
        # The first row's tool took down two workers, after a turn in each; the other turns are the second row's and
        # the third's, and then nothing more is begun.
        assert len(endpoint.chats) == 4
        assert [row["cost_usd"] for row in done.json["results"]] == pytest.approx([0.15, 0.15, 0.15])
        assert (done.json["summary"]["missing"], done.json["summary"]["total"]) == (2, 5)

        rest = run_osmosis("test", *options, "--max-cost", "5", "--resume", cwd=root, env=env)
        assert [row["reward"] for row in rest.json["results"]] == [None, 0.75, 0.75, 0.75, 0.75]
        assert len(endpoint.chats) == 6


def test_a_budget_needs_a_known_price(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    with ScriptedEndpoint(by_turn(text("3"))).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        done = run_osmosis("test", *model, "--max-cost", "1", "-q", cwd=root)
        assert (done.code, done.stdout) == (2, "")
        assert "no price is known for scripted" in done.stderr
        assert "--max-cost" in done.stderr
        assert endpoint.requests == []


class Waves:
    """Turns away the first eight requests, then answers in waves of 4, 5, 6, 7 and 8.

    A wave is answered once all of its requests are here, and a moment later, so that one too many would be seen.
    """

    def __init__(self) -> None:
        self.sizes = [4, 5, 6, 7, 8]
        self.most = 0
        self._refused = 0
        self._wave: list[int] = []
        self._gate = Gate()

    def __call__(self, request: Request) -> Reply:
        if self._refused < 8:
            self._refused += 1
            refusal = status(429 if self._refused % 2 else 503, headers={"Retry-After": "0"})
            # All are on their way before the first hears of it: one round of refusals halves the number once.
            reply = refusal.after(self._gate)
            if self._refused == 8:
                self._gate.open()
                self._gate = Gate()
            return reply
        self._wave.append(1)
        reply = text("done").after(self._gate)
        if len(self._wave) == self.sizes[0]:
            threading.Timer(0.2, self._answer, [self._gate]).start()
        self.most = max(self.most, len(self._wave) - self.sizes[0])
        return reply

    def _answer(self, gate: Gate) -> None:
        self._gate = Gate()
        self._wave = []
        self.sizes = [*self.sizes[1:], 1000][:5]
        gate.open()


def test_an_overloaded_endpoint_is_asked_less_for_a_while(tmp_path: Path) -> None:
    rows = [{"user_prompt": str(number)} for number in range(4 + 5 + 6 + 7 + 8)]
    root = copy_repo("misbehaving", tmp_path, rows)
    waves = Waves()
    with ScriptedEndpoint(waves).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted", "--workers", "1", "--batch-size", "8"]
        done = run_osmosis("test", *model, "--timeout", "60", "--json", cwd=root)
        assert done.code == 0, done.stderr
        assert len(endpoint.chats) == len(rows) + 8
        assert set(waves.sizes) == {1000}
        # Never was one request more on its way than the number that had been crept back to.
        assert waves.most == 0


def test_progress_names_the_oldest_rollout_and_what_it_waits_for(tmp_path: Path) -> None:
    """One rollout hangs in a tool; the run is stopped as soon as the progress says so."""
    root = write_repo(tmp_path / "repo", main=WAITING)

    def script(request: Request) -> Reply:
        return tool_call("wait") if "3 + 4" in request.messages[1]["content"] else text("11")

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "scripted"]
        with running("test", *model, cwd=root) as command:
            command.until(lambda: "oldest: row" in command.said())
            command.interrupt()
            command.until(lambda: "again to quit now" in command.said())
            command.interrupt()
            done = command.wait()
    assert re.search(
        r"2/3 rollouts, oldest: row 1 for 1\d s, waiting for tool wait, "
        r"0 failed, mean score 0\.500, [\d.]+/s, 30 tokens, \d+:\d\d left\n",
        done.stderr,
    ), done.stderr
    assert done.stdout == ""
