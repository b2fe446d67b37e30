"""The client of a rollout server against scripted servers on loopback, one for each released form of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import pytest
from aiohttp import web

from osmosis_ai.runtime.worker.workflows.callbacks import Ending
from osmosis_ai.runtime.worker.workflows.listener import Hosted, Listener
from osmosis_ai.runtime.worker.workflows.wire import Asked, RolloutServer, RolloutServerError
from osmosis_ai.tasks import task_group

pytestmark = pytest.mark.anyio

Act = Callable[["Caller", dict[str, Any]], Awaitable[None]]
SAMPLE = {"messages": [{"role": "assistant", "content": "42"}], "reward": 1.0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Caller:
    """What a server does with the addresses of a request that it has accepted."""

    def __init__(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        self.session = session
        self.body = body
        self.statuses: list[int] = []

    async def post(self, url: str, data: str | dict[str, Any], key: str | None = None) -> int:
        headers = {"Authorization": f"Bearer {key or self.body['controller_api_key']}"}
        sent = {"data": data} if isinstance(data, str) else {"json": data}
        async with self.session.post(url, headers=headers, **sent) as answer:  # type: ignore[arg-type]
            self.statuses.append(answer.status)
            return answer.status

    async def completed(self, status: str = "success", **fields: Any) -> int:
        body = {"rollout_id": self.body["rollout_id"], "status": status, **fields}
        return await self.post(self.body["completion_callback_url"], body)

    async def graded(self, status: str = "success", **fields: Any) -> int:
        body = {"rollout_id": self.body["rollout_id"], "status": status, **fields}
        return await self.post(self.body["grader_callback_url"], body)


class Scripted:
    """A rollout server that answers `POST /rollout` as told, then acts in the background."""

    def __init__(self, act: Act | None = None, answers: list[web.Response] | None = None) -> None:
        self.act = act
        self.answers = answers or [web.json_response({}, status=202)]
        self.bodies: list[dict[str, Any]] = []
        self.callers: list[Caller] = []
        self.cancelled: list[dict[str, Any]] = []
        self.results: list[web.Response] = []
        self.leases: list[str | None] = []
        self.acted = anyio.Event()

    async def rollout(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        if answer.status < 300 and self.act is not None:
            self.callers.append(Caller(self.session, self.bodies[-1]))
            self.group.start_soon(self._act, self.callers[-1])
        return answer

    async def _act(self, caller: Caller) -> None:
        assert self.act is not None
        await self.act(caller, caller.body)
        self.acted.set()

    async def result(self, request: web.Request) -> web.Response:
        self.leases.append(request.headers.get("X-Osmosis-Rollout-Lease"))
        if not self.results:
            await anyio.sleep_forever()
        return self.results.pop(0)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append(await request.json())
        return web.json_response({"dispositions": {}})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/rollout", self.rollout)
        app.router.add_post("/rollout/cancel", self.cancel)
        app.router.add_get("/rollout/{id}/result", self.result)
        app.router.add_get("/health", self.health)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as self.session, task_group() as self.group:
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                self.group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await runner.cleanup()


async def no_model(request: web.Request, body: bytes) -> web.StreamResponse:
    raise AssertionError("no model call was expected")


def asked(hosted: Hosted, **changes: Any) -> Asked:
    messages = [{"role": "user", "content": "6 × 7?"}]
    given = {"agent_timeout": 30.0, "grader_timeout": 30.0, "label": "42", **changes}
    return Asked("r1", messages, hosted.url, hosted.key, **given)


async def run(
    scripted: Scripted,
    *,
    delivery: float = 5.0,
    alive: float = 5.0,
    listener: Listener | None = None,
    **changes: Any,
) -> Ending:
    listener = listener or Listener()
    await listener.start()
    try:
        async with scripted.serving() as url:
            server = RolloutServer(url, delivery=delivery, alive=alive)
            try:
                with listener.host("r1", no_model) as hosted:
                    return await server.run(asked(hosted, **changes), hosted.callbacks)
            finally:
                await server.aclose()
    finally:
        await listener.aclose()


async def test_one_body_serves_every_form() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed()
        await caller.graded(sample=SAMPLE)

    scripted = Scripted(act)
    ending = await run(scripted)
    assert ending.trouble is None
    assert [sample.reward for sample in ending.samples.values()] == [1.0]
    (body,) = scripted.bodies
    assert body["chat_completions_url"].endswith("/v1/rollouts/r1")
    assert body["llm_api_key"] == body["controller_api_key"]
    assert (body["agent_timeout_sec"], body["grade"], body["label"]) == (30.0, True, "42")
    assert scripted.cancelled == []


async def test_several_samples_are_kept_by_their_ids() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed()
        await caller.graded(samples={"a": {**SAMPLE, "id": "a"}, "b": {"id": "b", "reward": 0, "remove_sample": False}})

    ending = await run(Scripted(act, [web.json_response({}, status=200)]))
    assert {name: sample.reward for name, sample in ending.samples.items()} == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize(
    ("grading", "trouble", "said"),
    [
        ({"sample": {"reward": None}}, "grader_failed", "set no reward"),
        ({"samples": {"a": {"reward": 1}, "b": {}}}, "grader_failed", "for sample 'b'"),
        ({"samples": {}}, "grader_failed", "without a sample"),
        ({"sample": {"reward": None, "remove_sample": True}}, None, ""),
        ({"status": "failure", "err_message": "no such key", "err_category": "agent_error"}, "grader_failed", "such"),
        ({"status": "failure", "sample": {"reward": 3}}, "grader_failed", "without a message"),
        ({"status": "failure"}, "not_graded", "called no grader"),
    ],
)
async def test_gradings_are_judged(grading: dict[str, Any], trouble: str | None, said: str) -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed()
        await caller.graded(**{"status": "success", **grading})

    ending = await run(Scripted(act))
    assert (ending.trouble, said in ending.message) == (trouble, True)
    assert all(sample.reward is None for sample in ending.samples.values() if grading.get("status") == "failure")


async def test_a_reward_that_is_not_a_number_fails_the_grading() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed()
        await caller.post(body["grader_callback_url"], '{"status": "success", "sample": {"reward": NaN}}')

    ending = await run(Scripted(act))
    assert (ending.trouble, ending.message) == ("grader_failed", "the grader set nan as the reward")


async def test_a_failed_workflow_ends_the_rollout_with_the_server_s_words() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed("failure", err_message="boom", err_category="agent_error")

    ending = await run(Scripted(act))
    assert (ending.trouble, ending.message, ending.category) == ("workflow_failed", "boom", "agent_error")


async def test_the_grading_may_come_first_and_anything_twice() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.graded(sample=SAMPLE)
        await caller.graded(status="failure")
        await caller.completed()
        await caller.completed("failure", err_message="Internal server error")

    scripted = Scripted(act)
    ending = await run(scripted)
    assert ending.trouble is None


async def test_a_failed_grading_that_comes_first_waits_for_the_reason() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.graded(status="failure")
        await caller.completed("failure", err_message="boom")

    ending = await run(Scripted(act))
    assert (ending.trouble, ending.message) == ("workflow_failed", "boom")


async def test_wrong_bearers_ids_and_bodies_are_refused_and_change_nothing() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        url = body["completion_callback_url"]
        await caller.post(url, {"status": "failure"}, key="another")
        await caller.post(url.replace("r1", "r2"), {"status": "failure"})
        await caller.post(url, "<html>")
        await caller.post(url, {"status": "failure", "rollout_id": "r2"})
        await caller.post(url, {"status": "running"})
        await caller.post(url, {"status": 3})
        await caller.post(url, "[" * 5000 + "]" * 5000)
        await caller.completed()
        await caller.graded(sample=SAMPLE)

    scripted = Scripted(act)
    assert (await run(scripted)).trouble is None
    assert scripted.callers[0].statuses[:8] == [401, 404, 422, 422, 422, 422, 422, 200]


async def test_a_callback_that_comes_late_is_acknowledged() -> None:
    ended = anyio.Event()
    statuses: list[int] = []

    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed("failure", err_message="boom")
        await ended.wait()
        statuses.append(await caller.graded(status="failure"))

    listener = Listener()
    await listener.start()
    scripted = Scripted(act)
    async with scripted.serving() as url:
        server = RolloutServer(url)
        with listener.host("r1", no_model) as hosted:
            await server.run(asked(hosted), hosted.callbacks)
        ended.set()
        with anyio.fail_after(30):
            await scripted.acted.wait()
        await server.aclose()
    await listener.aclose()
    assert statuses == [200]


async def test_without_callbacks_the_deadlines_end_the_rollout() -> None:
    scripted = Scripted()
    ending = await run(scripted, agent_timeout=0.05, delivery=0.05)
    assert (ending.trouble, ending.category) == ("callback_timeout", "timeout")
    assert scripted.cancelled == [{"ids": ["r1"]}]

    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed()

    ending = await run(Scripted(act), grader_timeout=0.05, delivery=0.05)
    assert (ending.trouble, ending.message) == ("missing_grader_callback", "grading took longer than 0.05 s")


async def test_without_grading_the_workflow_s_end_is_the_end() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        assert "grader_callback_url" not in body
        await caller.completed()

    assert (await run(Scripted(act), grade=False)) == Ending()


LEASE = {
    "rollout_id": "r1",
    "status": "queued",
    "polling_lease_token": "lease",
    "result_wait_timeout_sec": 30.0,
    "polling_lease_timeout_sec": 120.0,
}


def leased(*results: dict[str, Any] | web.Response) -> Scripted:
    scripted = Scripted(answers=[web.json_response(LEASE, status=202)])
    for result in results:
        given = {"rollout_id": "r1", **result} if isinstance(result, dict) else result
        scripted.results.append(web.json_response(given) if isinstance(given, dict) else given)
    return scripted


async def test_a_leased_result_is_polled_until_it_is_final() -> None:
    scripted = leased(
        {"status": "running"},
        web.Response(status=502, text="<html>bad gateway"),
        {"status": "grading", "sample": None},
        {"status": "success", "sample": SAMPLE},
    )
    ending = await run(scripted)
    assert [sample.reward for sample in ending.samples.values()] == [1.0]
    assert scripted.leases == ["lease"] * 4


@pytest.mark.parametrize(
    ("results", "trouble"),
    [
        ([{"status": "failure", "err_message": "boom", "err_category": "agent_error"}], "workflow_failed"),
        ([{"status": "grading"}, {"status": "failure", "err_message": "boom"}], "grader_failed"),
        ([{"status": "failure", "err_message": "boom", "sample": {"messages": []}}], "grader_failed"),
        ([{"status": "failure"}], "not_graded"),
        ([{"status": "cancelled"}], "workflow_failed"),
        ([{"status": "success", "sample": None}], "grader_failed"),
    ],
)
async def test_leased_results_are_judged(results: list[dict[str, Any]], trouble: str) -> None:
    assert (await run(leased(*results))).trouble == trouble


async def test_a_leased_rollout_past_its_deadline_is_cancelled() -> None:
    scripted = leased({"status": "running"})
    ending = await run(scripted, agent_timeout=0.05, delivery=0.05)
    assert ending.trouble == "callback_timeout"
    assert scripted.cancelled == [{"ids": ["r1"]}]


async def test_a_server_that_answers_every_poll_at_once_is_not_flooded() -> None:
    scripted = leased(*[{"status": "running"}] * 100)
    ending = await run(scripted, agent_timeout=0.3, delivery=0.05)
    assert ending.trouble == "callback_timeout"
    assert 1 < len(scripted.leases) < 15


async def test_a_cancelled_item_is_cancelled_at_the_server() -> None:
    scripted = leased({"status": "running"})
    async with anyio.create_task_group() as group:

        async def cancelled() -> None:
            await run(scripted)

        group.start_soon(cancelled)
        with anyio.fail_after(30):
            while len(scripted.leases) < 2:
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert scripted.cancelled == [{"ids": ["r1"]}]


async def test_a_full_queue_is_waited_for() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        await caller.completed()
        await caller.graded(sample=SAMPLE)

    full = web.json_response({"detail": "full"}, status=429, headers={"Retry-After": "0"})
    scripted = Scripted(act, [full, web.json_response({}, status=202)])
    assert (await run(scripted)).trouble is None
    assert len(scripted.bodies) == 2


@pytest.mark.parametrize(
    ("answer", "said", "lost"),
    [
        (web.Response(status=500, text="<html>oops"), "answered 500: an HTML page", True),
        (web.Response(status=200, text="<html>hello"), "HTML page instead of JSON", False),
        (web.Response(status=202), "an empty body", False),
        (web.Response(status=302, headers={"Location": "http://elsewhere"}), "a redirect", False),
        (web.json_response([1], status=202), "something else than a JSON object", False),
        (web.json_response({"detail": "no such field"}, status=422), "no such field", False),
        (web.json_response({"polling_lease_token": 3}, status=202), "lease that can't be read", False),
        (web.json_response({"polling_lease_token": "a\r\nb: c"}, status=202), "lease that can't be read", False),
        (web.json_response({**LEASE, "result_wait_timeout_sec": -1}, status=202), "lease that can't be read", False),
        (web.json_response({**LEASE, "polling_lease_timeout_sec": 1e300}, status=202), "lease that can't", False),
        (web.json_response({}, status=429, headers={"Retry-After": "60"}), "took no rollout for 30 s", False),
    ],
)
async def test_a_server_at_fault_is_told_from_a_failed_rollout(answer: web.Response, said: str, lost: bool) -> None:
    with pytest.raises(RolloutServerError, match=said) as raised:
        await run(Scripted(answers=[answer]))
    assert raised.value.lost is lost


async def test_a_server_that_asks_for_a_key_says_which_variable_has_it() -> None:
    async def health(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization") == "Bearer the key"
        return web.json_response({}, status=200 if given else 401)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    keyless, keyed = RolloutServer(url), RolloutServer(url, key="the key")
    assert await keyed.health(5.0) == {}
    with pytest.raises(RolloutServerError, match="set OSMOSIS_ROLLOUT_API_KEY to the server's key"):
        await keyless.health(5.0)
    await keyless.aclose()
    await keyed.aclose()
    await runner.cleanup()


async def test_a_server_that_never_answers_is_lost_at_the_deadline() -> None:
    class Silent(Scripted):
        async def rollout(self, request: web.Request) -> web.Response:
            await anyio.sleep_forever()
            raise AssertionError

    silent = Silent()
    with pytest.raises(RolloutServerError, match=r"gave no answer within 0\.1 s") as raised:
        await run(silent, agent_timeout=0.05, delivery=0.05)
    assert raised.value.lost
    assert not raised.value.blocked
    assert silent.cancelled == [{"ids": ["r1"]}]


async def test_a_server_that_does_not_answer_at_a_deadline_is_blocked() -> None:
    class Blocked(Scripted):
        async def health(self, request: web.Request) -> web.Response:
            await anyio.sleep_forever()
            raise AssertionError

    blocked = Blocked()
    with pytest.raises(RolloutServerError, match=r"at a rollout's deadline, it answered nothing for 0\.1 s") as raised:
        await run(blocked, agent_timeout=0.05, alive=0.1)
    assert raised.value.blocked
    assert blocked.cancelled == []


async def test_a_lease_that_expires_while_it_is_polled_means_that_the_server_was_blocked() -> None:
    with pytest.raises(RolloutServerError, match="user code must have blocked it") as raised:
        await run(leased({"status": "failure", "err_message": "lease", "err_category": "lease_expired"}))
    assert raised.value.blocked


async def test_a_result_of_another_server_means_that_the_rollout_is_lost() -> None:
    with pytest.raises(RolloutServerError, match="unknown rollout_id") as raised:
        await run(leased(web.json_response({"detail": "unknown rollout_id"}, status=404)))
    assert raised.value.lost


async def post_raw(url: str, bearer: bytes, rest: bytes) -> int:
    """Send the bytes of a request; return the answer's status."""
    address, path = url.removeprefix("http://").split("/", 1)
    host, port = address.split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        head = f"POST /{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ".encode()
        await stream.send(head + bearer + b"\r\n" + rest)
        return int((await stream.receive()).split()[1])


async def test_bodies_are_bounded_in_size_and_time() -> None:
    async def act(caller: Caller, body: dict[str, Any]) -> None:
        url, key = body["completion_callback_url"], body["llm_api_key"].encode()
        await caller.post(url, " " * 3000)
        # A body that never arrives, and a bearer that isn't text.
        caller.statuses.append(await post_raw(url, key, b"Content-Length: 9\r\n\r\n{"))
        caller.statuses.append(await post_raw(url, b"\xff", b"Content-Length: 0\r\n\r\n"))
        await caller.completed("failure", err_message="boom")

    listener = Listener(max_body=2000, body_seconds=0.05)
    scripted = Scripted(act)
    assert (await run(scripted, listener=listener)).trouble == "workflow_failed"
    assert scripted.callers[0].statuses == [413, 408, 401, 200]
