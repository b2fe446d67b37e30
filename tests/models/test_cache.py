from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from osmosis_ai.errors import ModelError, StartError
from osmosis_ai.masking import Masker
from osmosis_ai.models.cache import (
    CacheContents,
    CachedModel,
    ReplyCache,
    cache_contents,
    cache_path,
    clear_cache,
    open_cache,
    prepare_cache,
)
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.models.offline import offline_names
from osmosis_ai.records import Completion, Logprobs, Message, ModelSpec, Row, TokenIds, TokenLogprob, Tool, Turn, Usage
from osmosis_ai.runtime.pool.trajectory import total_cost, total_usage
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, status, text, tool_call

pytestmark = pytest.mark.anyio

MESSAGES: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
PARAMS = {"temperature": 0.5, "top_p": 0.9}
ROW = Row(index=0, id="r", system_prompt="s", user_prompt="u")


def tool(**properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": schema}}


TOOLS = [tool(a={"type": "integer"}, b={"type": "integer"})]


class Counting:
    """A model that answers with the number of its calls."""

    def __init__(self, reply: Callable[[int], Completion] | None = None) -> None:
        self.calls = 0
        self.reply = reply or (lambda call: Completion({"role": "assistant", "content": f"reply {call}"}))

    async def complete(self, messages: list[Message], tools: list[Tool], params: dict[str, Any]) -> Completion:
        self.calls += 1
        return self.reply(self.calls)

    async def aclose(self) -> None: ...


def spec(**changes: Any) -> ModelSpec:
    base = ModelSpec(name="m", engine="openai_compatible", model="m", base_url="http://a/v1", params=PARAMS)
    return msgspec.structs.replace(base, **changes)


@asynccontextmanager
async def opened(path: Path, *keys: str) -> AsyncIterator[ReplyCache]:
    cache = open_cache(path, Masker(keys))
    assert cache is not None
    try:
        yield cache
    finally:
        await cache.aclose()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return prepare_cache(tmp_path / ".osmosis")


async def ask(cache: ReplyCache, model: Counting, **changes: Any) -> Completion:
    """One request of a new rollout."""
    request = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "params": {},
        "spec": spec(),
        "attempt": 0,
        "environ": {},
        **changes,
    }
    cached = CachedModel(model, cache, request["spec"], request["attempt"], environ=request["environ"])
    return await cached.complete(request["messages"], request["tools"], request["params"])


async def test_the_same_request_is_answered_from_the_cache(path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 10000000000000000000000}'}}
    reply = Completion(
        message={"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "höm 🙂", "x": 2**70},
        finish_reason="tool_calls",
        usage=Usage(10, 5, 15),
        model="served",
        logprobs=Logprobs([TokenLogprob("a", -0.1234567890123456789)]),
        token_ids=TokenIds(token_ids=[1, 2]),
        attempts=3,
        cost_usd=0.25,
    )
    model = Counting(lambda _: reply)
    async with opened(path) as cache:
        assert await ask(cache, model) == reply
        hit = await ask(cache, model)
        # Of the reply nothing differs; but no request was made for it.
        assert hit == msgspec.structs.replace(reply, cached=True, attempts=0)
        assert list(hit.message) == list(reply.message)
        assert model.calls == 1
    async with opened(path) as cache:
        assert (await ask(cache, model)).cached
    assert model.calls == 1
    assert cache_contents(path).hits == 2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"messages": MESSAGES[::-1]}, id="order of messages"),
        pytest.param({"messages": [*MESSAGES[:-1], {"role": "user", "content": "U"}]}, id="prompt"),
        pytest.param({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "1", "content": "3"}]}, id="longer"),
        pytest.param({"tools": []}, id="no tools"),
        pytest.param({"tools": TOOLS * 2}, id="one more tool"),
        pytest.param({"tools": [tool(a={"type": "integer"}, b={"type": "number"})]}, id="a tool's schema"),
        pytest.param({"tools": [tool(b={"type": "integer"}, a={"type": "integer"})]}, id="order of its properties"),
        pytest.param({"params": {"temperature": 0.6}}, id="temperature"),
        pytest.param({"params": {"seed": 1}}, id="another parameter"),
        pytest.param({"params": {"top_p": None}}, id="a parameter removed"),
        pytest.param({"spec": spec(params={})}, id="the model's parameters"),
        pytest.param({"spec": spec(model="n")}, id="model"),
        pytest.param({"spec": spec(base_url="http://b/v1")}, id="endpoint"),
        pytest.param({"spec": spec(engine="litellm")}, id="engine"),
        pytest.param({"attempt": 1}, id="attempt"),
    ],
)
async def test_another_request_is_not(changes: dict[str, Any], path: Path) -> None:
    model = Counting()
    async with opened(path) as cache:
        await ask(cache, model)
        assert not (await ask(cache, model, **changes)).cached
        assert (await ask(cache, model, **changes)).message["content"] == "reply 2"
        assert (await ask(cache, model)).message["content"] == "reply 1"
    assert model.calls == 2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"spec": spec(params=dict(reversed(PARAMS.items())))}, id="order of parameters"),
        pytest.param({"params": PARAMS}, id="a parameter given twice"),
        pytest.param({"params": {"stop": None}}, id="a parameter that wasn't there removed"),
        pytest.param({"spec": spec(api_key="sk-another-key")}, id="key"),
        pytest.param({"spec": spec(name="shown", request_timeout=1.0)}, id="what is not sent"),
        pytest.param({"environ": {"OPENAI_BASE_URL": "http://b/v1"}}, id="a variable that has no say"),
    ],
)
async def test_what_makes_no_other_request(changes: dict[str, Any], path: Path) -> None:
    model = Counting()
    async with opened(path) as cache:
        await ask(cache, model)
        assert (await ask(cache, model, **changes)).cached


async def test_the_environment_chooses_litellms_endpoint(path: Path) -> None:
    model = Counting()
    litellm = spec(engine="litellm", base_url=None)
    async with opened(path) as cache:
        await ask(cache, model, spec=litellm, environ={"OPENAI_BASE_URL": "http://a", "PATH": "/bin"})
        assert (await ask(cache, model, spec=litellm, environ={"OPENAI_BASE_URL": "http://a", "PATH": "/usr"})).cached
        assert not (await ask(cache, model, spec=litellm, environ={"OPENAI_BASE_URL": "http://b"})).cached
        assert not (await ask(cache, model, spec=litellm, environ={"OPENAI_API_KEY": "k"})).cached


async def test_a_rollout_that_asks_twice_gets_two_samples_again(path: Path) -> None:
    model = Counting()
    async with opened(path) as cache:
        for cached in (False, True):
            rollout = CachedModel(model, cache, spec(), 0)
            replies = [await rollout.complete(MESSAGES, [], {}) for _ in range(3)]
            assert [reply.message["content"] for reply in replies] == ["reply 1", "reply 2", "reply 3"]
            assert [reply.cached for reply in replies] == [cached] * 3


async def test_identical_requests_at_the_same_time_keep_the_first_reply(path: Path) -> None:
    async with opened(path) as cache:
        model = Counting()
        both = await asyncio.gather(ask(cache, model), ask(cache, model))
        stored = await ask(cache, model)
        assert stored.message in [reply.message for reply in both]
        assert stored.message == (await ask(cache, model)).message
    assert cache_contents(path).entries == 1


async def test_a_failed_request_is_asked_again(path: Path) -> None:
    with ScriptedEndpoint([status(400), text("fine"), text("never asked for")]).run_in_thread() as endpoint:
        async with opened(path) as cache:
            host = create_model(spec(base_url=endpoint.url), HostOptions(cache=cache))
            with pytest.raises(ModelError, match="scripted 400"):
                await host.for_rollout(ROW, 0).complete(MESSAGES, [], {})
            assert cache_contents(path).entries == 0
            for cached in (False, True):
                reply = await host.for_rollout(ROW, 0).complete(MESSAGES, [], {})
                assert (reply.message["content"], reply.cached) == ("fine", cached)
            await host.aclose()
        assert len(endpoint.requests) == 2


async def test_a_probe_is_never_answered_from_the_cache(path: Path) -> None:
    with ScriptedEndpoint([], probe=text("pong")).run_in_thread() as endpoint:
        async with opened(path) as cache:
            host = create_model(spec(base_url=endpoint.url, params={}), HostOptions(cache=cache))
            await host.probe()
            await host.probe()
            await host.aclose()
        assert len(endpoint.requests) == 2
    assert cache_contents(path).entries == 0


@pytest.mark.parametrize("name", offline_names())
async def test_offline_models_do_not_use_it(name: str, path: Path) -> None:
    async with opened(path) as cache:
        host = create_model(ModelSpec(name=name, engine="offline", model=name), HostOptions(cache=cache))
        for _ in range(2):
            assert not (await host.for_rollout(ROW, 0).complete(MESSAGES, [], {})).cached
    assert cache_contents(path) == CacheContents()


def test_a_cached_turn_costs_nothing() -> None:
    paid = Turn(0, "stop", Usage(10, 5, 15), 1.0, cost_usd=0.5)
    cached = msgspec.structs.replace(paid, cached=True)
    assert (total_cost([paid, cached]), total_usage([paid, cached]).total_tokens) == (0.5, 15)
    assert (total_cost([cached]), total_usage([cached])) == (0.0, Usage())
    unpriced = msgspec.structs.replace(cached, cost_usd=None)
    assert total_cost([unpriced]) is None


# What is stored


async def test_nothing_of_a_request_and_no_key_is_stored(path: Path) -> None:
    key = "sk-the-secret-key"
    private = [{"role": "user", "content": "a private prompt"}]
    async with opened(path, key) as cache:
        await ask(cache, Counting(), messages=private, spec=spec(api_key=key))
        told = Counting(lambda call: Completion({"role": "assistant", "content": f"your key is {key}, call {call}"}))
        for call in (1, 2):
            # Masked it would not be the same reply, so it isn't stored at all.
            assert (await ask(cache, told, attempt=1)).message["content"].endswith(f"call {call}")
    content = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert b"reply 1" in content
    assert b"private" not in content
    assert b"secret" not in content


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"content": "\ud800"}, id="lone surrogate"),
        pytest.param({"content": "", "x": math.inf}, id="infinity"),
        pytest.param({"content": "", "x": (1, 2)}, id="tuple"),
        pytest.param({"content": "", "x": object()}, id="not JSON"),
    ],
)
async def test_a_reply_that_json_changes_is_not_stored(message: Message, path: Path) -> None:
    reply = Completion(message)
    async with opened(path) as cache:
        for _ in range(2):
            assert await ask(cache, Counting(lambda _: reply)) is reply
    assert cache_contents(path).entries == 0


@pytest.mark.parametrize("content", ["\ud800", object()])
async def test_a_request_that_is_not_json_goes_to_the_model(content: Any, path: Path) -> None:
    model = Counting()
    async with opened(path) as cache:
        for _ in range(2):
            await ask(cache, model, messages=[{"role": "user", "content": content}])
    assert model.calls == 2


def test_the_folder_is_ignored_by_git(path: Path) -> None:
    assert path.name == "cache.db"
    assert path.with_name(".gitignore").read_text(encoding="utf-8") == "*\n"


# The file


def fill(path: str, first: int, asked: Any, ready: Any, go: Any) -> None:
    """Store replies and read those of the other processes, as a worker would; count what the cache didn't have."""
    model = Counting()

    async def work() -> None:
        async with opened(Path(path)) as cache:
            ready.set()
            go.wait()
            for attempt in range(200):
                await ask(cache, model, attempt=first + attempt)
                await ask(cache, model, attempt=attempt)

    asyncio.run(work())
    with asked.get_lock():
        asked.value += model.calls


def test_several_processes_use_one_file(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    go, asked = context.Event(), context.Value("i", 0)
    started = []
    for first in (0, 100, 200):
        ready = context.Event()
        process = context.Process(target=fill, args=(str(path), first, asked, ready, go))
        process.start()
        started.append((process, ready))
    for _, ready in started:
        assert ready.wait(60)
    go.set()
    for process, _ in started:
        process.join(60)
        assert process.exitcode == 0
    contents = cache_contents(path)
    assert contents.entries == 400
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    # Each of them was answered by the model or from the file, and none was lost on the way there.
    assert contents.hits == 3 * 400 - asked.value
    assert asked.value >= 400


async def test_hits_are_counted_when_the_cache_closes(path: Path) -> None:
    async with opened(path) as cache:
        for attempt in range(100):
            await ask(cache, Counting(), attempt=attempt)
        for attempt in range(100):
            assert (await ask(cache, Counting(), attempt=attempt)).cached
    contents = cache_contents(path)
    assert (contents.entries, contents.hits) == (100, 100)
    assert contents.bytes > 100 * len("reply 1")


async def test_the_least_recently_used_are_dropped_at_the_start(tmp_path: Path) -> None:
    path = prepare_cache(tmp_path / ".osmosis")
    big = "x" * 10_000
    model = Counting(lambda call: Completion({"role": "assistant", "content": big}))
    async with opened(path) as cache:
        for attempt in range(100):
            await ask(cache, model, attempt=attempt)
    async with opened(path) as cache:
        for attempt in range(20):
            assert (await ask(cache, model, attempt=attempt)).cached
    prepare_cache(tmp_path / ".osmosis", limit=2_000_000)
    assert cache_contents(path).entries == 100
    prepare_cache(tmp_path / ".osmosis", limit=500_000)
    assert 35 <= cache_contents(path).entries <= 40
    async with opened(path) as cache:
        for attempt in range(20):
            assert (await ask(cache, model, attempt=attempt)).cached
        assert not (await ask(cache, model, attempt=20)).cached
        assert (await ask(cache, model, attempt=99)).cached
    prepare_cache(tmp_path / ".osmosis", limit=500_000)
    assert cache_contents(path).entries >= 36


async def test_clearing_works_while_a_run_uses_it(path: Path) -> None:
    model = Counting(lambda call: Completion({"role": "assistant", "content": f"{call}" * 100_000}))
    async with opened(path) as cache:
        for attempt in range(10):
            await ask(cache, model, attempt=attempt)
        before = cache_contents(path)
        assert before.entries == 10
        assert clear_cache(path) == before
        assert file_size(path) < 100_000
        assert not (await ask(cache, model)).cached
        assert (await ask(cache, model)).cached
    assert cache_contents(path).entries == 1
    assert clear_cache(path) is not None
    assert cache_contents(path) == CacheContents()


def file_size(path: Path) -> int:
    return path.stat().st_size


def test_clearing_nothing(tmp_path: Path) -> None:
    path = cache_path(tmp_path / ".osmosis")
    assert (cache_contents(path), clear_cache(path)) == (CacheContents(), CacheContents())
    assert not path.exists()


def damage(path: Path) -> None:
    path.write_bytes(b"this is no database, whatever its name says" * 100)


def damage_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE replies")


def make_newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("harm", [damage, make_newer])
def test_a_file_that_cannot_be_used_is_an_error_at_the_start(
    harm: Callable[[Path], None], tmp_path: Path, path: Path
) -> None:
    harm(path)
    with pytest.raises(StartError, match=r"cache\.db.*`osmosis cache clear`.*--no-cache"):
        prepare_cache(tmp_path / ".osmosis")
    assert clear_cache(path) is None
    prepare_cache(tmp_path / ".osmosis")
    assert cache_contents(path) == CacheContents()


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".osmosis").write_text("a file", encoding="utf-8")
    with pytest.raises(StartError, match="--no-cache"):
        prepare_cache(tmp_path / ".osmosis")


async def test_a_file_that_breaks_during_a_run_is_reported_once_and_not_used(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Counting()
    async with opened(path) as cache:
        await ask(cache, model)
        damage_table(path)
        for attempt in range(3):
            assert not (await ask(cache, model, attempt=attempt)).cached
    assert model.calls == 4
    reported = capfd.readouterr().err
    assert reported.count("\n") == 1
    assert str(path) in reported


async def test_a_write_that_fails_fails_no_rollout(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Counting()
    async with opened(path) as cache:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(
                "CREATE TRIGGER full BEFORE INSERT ON replies BEGIN SELECT raise(FAIL, 'it is full'); END"
            )
        for _ in range(3):
            assert not (await ask(cache, model)).cached
    assert capfd.readouterr().err.count("it is full") == 1


async def test_a_stored_reply_that_is_no_reply_is_reported_and_not_used(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with opened(path) as cache:
        await ask(cache, Counting())
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE replies SET data = 'half a repl'")
            connection.commit()
        assert not (await ask(cache, Counting())).cached
    assert str(path) in capfd.readouterr().err


def test_a_cache_that_is_removed_is_reported_and_the_model_goes_on(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = ReplyCache(path, Masker())
    path.unlink()
    replies = [asyncio.run(ask(cache, Counting())) for _ in range(2)]
    asyncio.run(cache.aclose())
    assert not any(reply.cached for reply in replies)
    assert capfd.readouterr().err.count("the file was removed or replaced") == 1
    assert not path.exists()


def test_a_cache_that_broke_before_a_worker_opens_it_is_left_out(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    damage(path)
    assert open_cache(path, Masker()) is None
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_file_is_an_error_at_the_start(tmp_path: Path, path: Path) -> None:
    path.chmod(stat.S_IRUSR)
    with pytest.raises(StartError, match="writable"):
        prepare_cache(tmp_path / ".osmosis")


# Through a real endpoint


async def test_a_new_draw_is_a_new_sample_with_an_entry_of_its_own(path: Path) -> None:
    with ScriptedEndpoint(lambda request: text(f"reply {len(endpoint.requests)}")).run_in_thread() as endpoint:
        async with opened(path) as cache:
            host = create_model(spec(base_url=endpoint.url), HostOptions(cache=cache))
            replies = [
                (await host.for_rollout(ROW, 0, draw).complete(MESSAGES, [], {})).message["content"]
                for draw in ("", "again", "", "again")
            ]
            await host.aclose()
    assert replies == ["reply 1", "reply 2"] * 2


async def test_conversations_replay_without_a_request(path: Path) -> None:
    def script(request: Request) -> Reply:
        return text(f"the answer, request {len(endpoint.requests)}") if request.turn else tool_call("add", a=1, b=2)

    with ScriptedEndpoint(script).run_in_thread() as endpoint:

        async def rollout(run_index: int) -> list[Completion]:
            async with opened(path) as cache:
                host = create_model(spec(base_url=endpoint.url), HostOptions(cache=cache))
                model = host.for_rollout(ROW, run_index)
                first = await model.complete(MESSAGES, TOOLS, {})
                (call,) = first.message["tool_calls"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
                second = await model.complete([*MESSAGES, first.message, result], TOOLS, {})
                await host.aclose()
                return [first, second]

        original = [await rollout(index) for index in range(3)]
        assert len(endpoint.requests) == 6
        assert len({replies[1].message["content"] for replies in original}) == 3
        for index in range(3):
            again = await rollout(index)
            assert [reply.cached for reply in again] == [True, True]
            assert [reply.message for reply in again] == [reply.message for reply in original[index]]
            assert [reply.usage for reply in again] == [reply.usage for reply in original[index]]
        assert len(endpoint.requests) == 6
