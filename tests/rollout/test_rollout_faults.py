"""An accepted rollout always ends with a result, whatever the loop or the trainer does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from loops import TRAINER_KEY, Adding, call, health, init, loop_that, serving, until

from osmosis_ai.rollout import RolloutContext, RolloutResult, RolloutStatus
from osmosis_ai.rollout.client import TrainerPool
from osmosis_ai.rollout.runner import run_loop
from osmosis_ai.rollout.testing import (
    Gate,
    Reply,
    TrainerDouble,
    broken_json,
    by_turn,
    drop,
    hang,
    raw_json,
    status,
    text,
    tool_call,
    with_faults,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry without the waits of production."""
    monkeypatch.setenv("OSMOSIS_ROLLOUT_CLIENT_RETRY_BASE_DELAY", "0.001")
    monkeypatch.setenv("OSMOSIS_ROLLOUT_CLIENT_MAX_RETRIES", "3")
    monkeypatch.setenv("OSMOSIS_ROLLOUT_CLIENT_COMPLETE_ROLLOUT_RETRIES", "3")


def kept_in(folder: Path) -> list[dict[str, Any]]:
    """Wait for kept results and return them."""
    until(lambda: folder.is_dir() and list(folder.glob("*.json")), "a result is kept")
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


# The callback.


@pytest.mark.parametrize(
    "faults",
    [[status(500)], [status(503), status(502)], [drop()], [drop(), status(500), drop()]],
    ids=["500", "503-502", "drop", "drop-500-drop"],
)
def test_a_callback_that_fails_is_tried_again_and_accepted_once(tmp_path: Path, faults: list[Reply]) -> None:
    trainer = TrainerDouble(by_turn(text("hi")), completed=faults)
    with serving(Adding(), trainer, undelivered_dir=tmp_path / "undelivered") as (url, _):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
        until(lambda: health(url)["completed_rollouts"] == 1, "the rollout is done")
    assert len(trainer.deliveries) == len(faults) + 1
    assert len({delivery.raw for delivery in trainer.deliveries}) == 1
    assert len(trainer.completions) == 1
    assert not (tmp_path / "undelivered").exists()


def test_a_callback_without_an_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_CLIENT_TIMEOUT_SECONDS", "0.2")
    trainer = TrainerDouble(by_turn(text("hi")), completed=[hang()])
    with serving(Adding(), trainer) as (url, _):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
    assert len(trainer.deliveries) == 2


def test_a_callback_that_is_refused_is_not_tried_again_but_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = status(422, body={"detail": f"no rollout for {TRAINER_KEY}"})
    trainer = TrainerDouble(by_turn(text("hi")), completed=[refusal], api_key=TRAINER_KEY)
    folder = tmp_path / ".osmosis" / "undelivered"
    with serving(Adding(), trainer, undelivered_dir=folder) as (url, _):
        (tmp_path / ".osmosis").mkdir()
        init(url, trainer.request("hello", rollout_id="a/b"))
        (kept,) = kept_in(folder)
        until(lambda: health(url)["undelivered_rollouts"] == 1, "it is counted")

    assert len(trainer.deliveries) == 1
    assert kept["server_url"].startswith("http://127.0.0.1:")
    assert kept["reason"].endswith("/v1/rollout/completed answered 422: no rollout for ***")
    assert kept["response"] == trainer.deliveries[0].body
    assert kept["response"]["final_messages"][-1]["content"] == "hi"
    assert (tmp_path / ".osmosis" / ".gitignore").read_text(encoding="utf-8") == "*\n"
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1
    assert "'a/b': its result can't be delivered" in logged[0]
    assert "kept in" in logged[0]
    for seen in (json.dumps(kept), caplog.text):
        assert TRAINER_KEY not in seen


@pytest.mark.parametrize("key", ["s", ":", '"'])
def test_whatever_the_key_the_kept_body_is_the_one_to_send(key: str, tmp_path: Path) -> None:
    trainer = TrainerDouble(by_turn(text("yes: it is")), completed=[status(400)], api_key=key)
    with serving(Adding(), trainer, undelivered_dir=tmp_path) as (url, _):
        init(url, trainer.request("hello"))
        (kept,) = kept_in(tmp_path)
    assert kept["response"] == trainer.deliveries[0].body


def test_a_key_that_the_conversation_holds_is_not_kept(tmp_path: Path) -> None:
    key = 'trainer-"key"-0123456789'
    loop = loop_that(lambda ctx: ctx.complete([{"role": "tool", "content": f"env: KEY={ctx.request.api_key}"}]))
    trainer = TrainerDouble(completed=[status(400)], api_key=key)
    with serving(loop, trainer, undelivered_dir=tmp_path) as (url, _):
        init(url, trainer.request("hello"))
        (kept,) = kept_in(tmp_path)
    assert kept["response"]["final_messages"] == [{"role": "tool", "content": "env: KEY=[masked]"}]
    assert trainer.deliveries[0].body["final_messages"][0]["content"] == f"env: KEY={key}"


def test_a_result_that_can_never_be_delivered_is_kept(tmp_path: Path) -> None:
    trainer = TrainerDouble(by_turn(text("hi")), completed=lambda request: status(503))
    with serving(Adding(), trainer, undelivered_dir=tmp_path) as (url, _):
        init(url, trainer.request("hello"))
        (kept,) = kept_in(tmp_path)
    assert len(trainer.deliveries) == 4
    assert "answered 503" in kept["reason"]
    assert kept["reason"].endswith("(after 4 attempts)")
    assert kept["response"]["status"] == "COMPLETED"


def test_a_trainer_that_isnt_there_costs_its_rollout_only(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with serving(Adding(), TrainerDouble(by_turn(text("hi"))), undelivered_dir=tmp_path) as (url, trainer):
        init(url, trainer.request("hello", server_url=nowhere, rollout_id="lost"))
        init(url, trainer.request("hello", rollout_id="other"))
        assert trainer.wait_for_completion("other").status is RolloutStatus.COMPLETED
        (kept,) = kept_in(tmp_path)
    assert kept["response"]["rollout_id"] == "lost"
    assert kept["response"]["status"] == "ERROR"
    assert f"nothing answers at {nowhere}/v1/chat/completions" in kept["response"]["error_message"]
    assert f"nothing answers at {nowhere}/v1/rollout/completed" in kept["reason"]


def test_a_folder_that_cant_be_written_is_logged_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    trainer = TrainerDouble(by_turn(text("hi")), completed=[status(400)])
    with serving(Adding(), trainer, undelivered_dir=tmp_path / "file" / "folder") as (url, _):
        init(url, trainer.request("hello"))
        until(lambda: health(url)["completed_rollouts"] == 1, "the first is done with")
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
    assert "it is lost" in caplog.text
    assert "is in no file, and lost if the server is killed" in caplog.text


# The trainer's replies to model calls.


@pytest.mark.parametrize("fault", [status(500), status(503), drop()], ids=["500", "503", "drop"])
def test_a_model_call_that_fails_for_a_moment_is_tried_again(fault: Reply) -> None:
    replies = [fault, tool_call("add", a=1, b=2), fault, fault, text("3")]
    with serving(Adding(), TrainerDouble(replies)) as (url, trainer):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
        (result,) = trainer.completions
    assert result.status is RolloutStatus.COMPLETED
    assert result.final_messages[-1]["content"] == "3"
    assert len(trainer.requests) == 5


@pytest.mark.parametrize(
    ("reply", "calls", "message"),
    [
        (status(400), 1, "answered 400"),
        (status(401), 1, "answered 401"),
        (status(429), 1, "answered 429"),
        (status(307, headers={"Location": "http://127.0.0.1:1/"}), 1, "a redirect to http://127.0.0.1:1/, which"),
        (status(500), 4, "(after 4 attempts)"),
        (drop(), 4, "dropped the connection"),
        (broken_json(), 1, "broken JSON"),
        (raw_json({"choices": []}), 1, "no `choices[0].message`"),
    ],
    ids=["400", "401", "429", "307", "500", "drop", "broken", "empty"],
)
def test_a_model_call_that_fails_for_good_is_an_error_with_the_conversation_so_far(
    reply: Reply, calls: int, message: str
) -> None:
    script = by_turn(tool_call("add", a=1, b=2), reply)
    with serving(Adding(), TrainerDouble(script)) as (url, trainer):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
        (result,) = trainer.completions
    assert result.status is RolloutStatus.ERROR
    assert result.finish_reason == "error"
    assert result.error_message is not None
    assert message in result.error_message
    assert "Traceback" not in result.error_message
    assert [found["role"] for found in result.final_messages] == ["user", "assistant", "tool"]
    assert len(trainer.requests) == 1 + calls


def test_among_many_rollouts_none_is_lost_and_none_doubled() -> None:
    script = with_faults(by_turn(tool_call("add", a=1, b=2), text("3")), 0.2, seed=1)
    completed = with_faults(lambda request: raw_json({}), 0.2, seed=2)
    trainer = TrainerDouble(script, completed=completed)
    with serving(Adding(), trainer) as (url, _):
        expected = {f"r{number}" for number in range(60)}
        for rollout_id in sorted(expected):
            assert init(url, trainer.request("hello", rollout_id=rollout_id)).status == 202
        until(lambda: health(url)["completed_rollouts"] == 60, "all are done with")
        undelivered = health(url)["undelivered_rollouts"]
    accepted = [result.rollout_id for result in trainer.completions]
    assert len(accepted) == len(set(accepted)) == 60 - undelivered
    assert len(trainer.requests) > 120
    # With a fifth of the requests failing and three retries each, a result is left over once in some hundred times.
    assert undelivered <= 3


# Loops that misbehave.


def raises(ctx: RolloutContext) -> None:
    raise ValueError("no such number")


def exits(ctx: RolloutContext) -> None:
    sys.exit(3)


def shows_the_key(ctx: RolloutContext) -> None:
    raise RuntimeError(f"my key is {ctx.request.api_key}")


async def cancels_itself(ctx: RolloutContext) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def rewrites(ctx: RolloutContext) -> RolloutResult:
    messages = list(ctx.request.messages)
    messages.append((await ctx.chat(messages)).message)
    messages[0] = {"role": "user", "content": "something else"}
    messages.append({"role": "user", "content": "and?"})
    messages.append((await ctx.chat(messages)).message)
    return ctx.complete(messages)


async def edits_in_place(ctx: RolloutContext) -> RolloutResult:
    messages = list(ctx.request.messages)
    messages.append((await ctx.chat(messages)).message)
    messages[0]["content"] += "!"
    await ctx.chat(messages)
    return ctx.complete(messages)


async def forgets(ctx: RolloutContext) -> RolloutResult:
    messages = [*ctx.request.messages, {"role": "user", "content": "b"}]
    await ctx.chat(messages)
    await ctx.chat(messages[:1])
    return ctx.complete(messages)


def forgets_to_await(ctx: RolloutContext) -> Any:
    with contextlib.closing(ctx.chat([])) as reply:
        return reply.message  # type: ignore[attr-defined]


def with_result(**fields: Any) -> Any:
    return lambda ctx: RolloutResult(**{"status": "COMPLETED", "final_messages": [], **fields})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (raises, "ValueError: no such number"),
        (exits, "SystemExit: 3"),
        (shows_the_key, "RuntimeError: my key is ***"),
        (cancels_itself, "the loop cancelled its own task"),
        (rewrites, "messages are append-only: message 0 (role 'user') differs from what was sent before"),
        (edits_in_place, "messages are append-only: message 0 (role 'user') differs from what was sent before"),
        (forgets, "messages are append-only: message 1 was sent before and is missing now (2 were sent, these are 1)"),
        (lambda ctx: ctx.error("it is too hard"), "it is too hard"),
        (forgets_to_await, "has no attribute 'message'; write: await ctx.chat(…)"),
        (lambda ctx: ctx.error(""), "the loop reports an error without a message"),
        (
            lambda ctx: None,
            "run returned None, not a RolloutResult; write `return ctx.complete(messages)`, or `return ctx.error(",
        ),
        (lambda ctx: [{"role": "user"}], "run returned a list, not a RolloutResult"),
        (with_result(status="DONE"), "the status 'DONE'; use COMPLETED or ERROR"),
        (with_result(final_messages=None), "final_messages is None, not a list of messages"),
        (with_result(final_messages=["hello"]), "final_messages can't be used: message 0 is a str, not a dict"),
        (
            with_result(final_messages=[{"content": object()}]),
            "final_messages can't be used: it can't be written as JSON",
        ),
        (with_result(reward=float("nan")), "the loop's reward is nan, not a finite number"),
        (with_result(reward="1"), "the loop's reward is a str, not a number"),
        (with_result(metrics={"num_llm_calls": "many"}), "the metrics aren't RolloutMetrics"),
        (lambda ctx: ctx.chat(["hello"]), "message 0 must be a dict, not str"),
        (lambda ctx: ctx.chat([{"role": object()}]), "message 0 can't be written as JSON"),
        (
            lambda ctx: ctx.chat([*ctx.request.messages, {"role": "user", "content": [{"text": b"hi"}]}]),
            "message 1 holds bytes, and",
        ),
        (lambda ctx: ctx.llm.chat_completions([{"role": "user", b"content": "hi"}]), "message 0 holds bytes"),
        (lambda ctx: ctx.complete([{}, {"content": b"\xff"}]), "can't be used: message 1 holds bytes, and messages"),
        (lambda ctx: ctx.chat([], seed=object()), "the model call can't be sent: it can't be written as JSON"),
    ],
)
def test_a_misbehaving_loop_is_an_error_with_the_message(run: Any, message: str) -> None:
    trainer = TrainerDouble(by_turn(text("hi")), api_key=TRAINER_KEY)
    with serving(loop_that(run), trainer) as (url, _):
        assert init(url, trainer.request("hello")).status == 202
        trainer.wait_for_completions(1)
        (result,) = trainer.completions
        assert health(url)["active_rollouts"] == 0
    assert result.status is RolloutStatus.ERROR
    assert result.error_message is not None
    assert message in result.error_message
    assert result.reward is None
    assert TRAINER_KEY not in result.model_dump_json()


@pytest.mark.parametrize("run", [rewrites, edits_in_place, forgets])
def test_a_server_may_allow_a_loop_to_rewrite(run: Any) -> None:
    with serving(loop_that(run), TrainerDouble(by_turn(text("hi"))), allow_rewrites=True) as (url, trainer):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
    assert trainer.completions[0].status is RolloutStatus.COMPLETED


def test_a_loop_that_hangs_ends_with_its_time_and_frees_its_place() -> None:
    async def hangs(ctx: RolloutContext) -> None:
        await ctx.chat(ctx.request.messages)
        await asyncio.Event().wait()

    options = {"request_timeout_seconds": 0.2, "max_concurrent": 1}
    with serving(loop_that(hangs), TrainerDouble(by_turn(text("hi"))), **options) as (url, trainer):
        for number in range(2):
            init(url, trainer.request("hello", rollout_id=str(number)))
        trainer.wait_for_completions(2)
    for result in trainer.completions:
        assert result.status is RolloutStatus.ERROR
        assert result.error_message == "the rollout did not end within 0.2 s"
        assert [message["content"] for message in result.final_messages] == ["hello", "hi"]


def test_a_loop_that_waits_for_a_trainer_that_hangs_ends_with_its_time() -> None:
    with serving(Adding(), TrainerDouble(by_turn(hang())), request_timeout_seconds=0.2) as (url, trainer):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
    assert trainer.completions[0].error_message == "the rollout did not end within 0.2 s"


def test_a_loop_that_ignores_its_cancellation_is_reported_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        leave = asyncio.Event()

        async def ignores(ctx: RolloutContext) -> None:
            while not leave.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await leave.wait()

        async with TrainerDouble() as trainer, TrainerPool() as pool:
            request = trainer.request("hello", rollout_id="stubborn")
            client = pool.client(request)
            result = await run_loop(loop_that(ignores), request, client, timeout=0.1, cancel_grace=0.1)
        leave.set()
        assert result.error_message == "the rollout did not end within 0.1 s"

    asyncio.run(run())
    assert "'stubborn' keeps running although it was cancelled" in caplog.text


def tools_raise() -> None:
    raise LookupError("no tools today")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (tools_raise, "get_tools raised LookupError: no tools today"),
        (lambda: sys.exit(1), "get_tools raised SystemExit: 1"),
        (lambda: None, "get_tools must return a list of tools, not NoneType"),
        (lambda: "add", "get_tools must return a list of tools, not str"),
        (lambda: ["add"], "item 0 is str"),
        (lambda: asyncio.sleep(0), "get_tools is async"),
        (lambda: [{"type": object()}], "it can't be written as JSON"),
    ],
)
def test_tools_that_fail_to_load_answer_500_and_a_retry_may_succeed(tools: Any, message: str) -> None:
    answers = [tools, list]
    loop = loop_that(lambda ctx: ctx.complete([]), lambda: answers.pop(0)() if answers else [])
    with serving(loop, TrainerDouble()) as (url, trainer):
        request = trainer.request("hello", rollout_id="r")
        refused = init(url, request)
        assert refused.status == 500
        assert message in refused.json["detail"]
        assert trainer.deliveries == []
        assert init(url, request).status == 202
        assert trainer.wait_for_completion("r").status is RolloutStatus.COMPLETED


def test_tools_that_fail_only_when_the_rollout_begins_are_its_error() -> None:
    answers: list[Any] = [list, tools_raise]
    loop = loop_that(lambda ctx: ctx.complete([]), lambda: answers.pop(0)())
    with serving(loop, TrainerDouble()) as (url, trainer):
        assert init(url, trainer.request("hello", rollout_id="r")).status == 202
        result = trainer.wait_for_completion("r")
    assert result.status is RolloutStatus.ERROR
    assert result.error_message is not None
    assert result.error_message.startswith("get_tools raised LookupError: no tools today")


def test_the_place_in_the_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with serving(loop_that(raises), TrainerDouble()) as (url, trainer):
        init(url, trainer.request("hello"))
        trainer.wait_for_completions(1)
    message = trainer.completions[0].error_message
    line = raises.__code__.co_firstlineno + 1
    assert message == f"ValueError: no such number (test_rollout_faults.py:{line})"


# Stopping.


def test_at_a_stop_a_running_rollout_may_end_and_no_new_one_begins() -> None:
    gate = Gate()
    with TrainerDouble(by_turn(text("hi").after(gate))).run_in_thread() as trainer:
        with serving(Adding(), TrainerDouble(), shutdown_grace_seconds=30) as (url, _):
            init(url, trainer.request("hello"))
            trainer.wait_for_requests(1)
            threading.Thread(target=lambda: (until(lambda: refuses(url), "it is stopping"), gate.open())).start()
        assert [result.status for result in trainer.completions] == [RolloutStatus.COMPLETED]


def refuses(url: str) -> bool:
    try:
        call(url, "/health")
    except OSError:
        return True
    return False


def test_at_a_stop_what_waits_and_what_runs_too_long_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with TrainerDouble(by_turn(hang())).run_in_thread() as trainer:
        options = {"shutdown_grace_seconds": 0.1, "max_concurrent": 1}
        with serving(Adding(), TrainerDouble(), **options) as (url, _):
            for rollout_id in ("running", "queued"):
                init(url, trainer.request("hello", rollout_id=rollout_id))
            trainer.wait_for_requests(1)
        results = {result.rollout_id: result for result in trainer.completions}
    assert set(results) == {"running", "queued"}
    for result in results.values():
        assert result.status is RolloutStatus.ERROR
        assert result.error_message == "the server stopped before the rollout had ended"
        assert f"rollout '{result.rollout_id}': ERROR (the server stopped before the rollout had" in caplog.text
    assert "stopping: 1 rollout is still running" in caplog.text
    assert len(trainer.requests) == 1


def test_at_a_stop_a_result_that_is_still_not_taken_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_DELIVERY_GRACE_SECONDS", "0.1")
    trainer = TrainerDouble(by_turn(text("hi")), completed=lambda request: hang())
    with trainer.run_in_thread(), serving(Adding(), TrainerDouble(), undelivered_dir=tmp_path) as (url, _):
        init(url, trainer.request("hello"))
        trainer.wait_for_deliveries(1)
    (kept,) = kept_in(tmp_path)
    assert kept["reason"] == "the server stopped before the trainer had accepted it"
    assert kept["response"]["status"] == "COMPLETED"
