"""The rollout server of workflows over real connections: polling with a lease, callbacks of both shapes, cancelling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from workflows import (
    ANSWER,
    CONTROLLER_KEY,
    MODEL_KEY,
    Controller,
    Named,
    finished,
    local,
    poll,
    raising,
    run,
    serving,
)

from osmosis_ai.rollout import (
    AgentWorkflowConfig,
    ConcurrencyConfig,
    ExecutionBackend,
    ExecutionOutcome,
    ExecutionResult,
    RolloutSample,
    RolloutStatus,
    create_rollout_server,
    get_rollout_context,
)
from osmosis_ai.rollout.testing import status
from osmosis_ai.rollout.types import RolloutInitRequest
from waiting import eventually

pytestmark = pytest.mark.xdist_group("rollout server")

ONE_AT_A_TIME = AgentWorkflowConfig(name="w", concurrency=ConcurrencyConfig(max_concurrent=1))


async def forever(_: Any) -> None:
    await asyncio.Event().wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server for rollouts that end by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_OSMOSIS_ROLLOUT_ARTIFACT_ROOT", str(tmp_path_factory.mktemp("artifacts")))
        backend = local()
    with serving(backend) as client:
        yield client


def state(client: httpx.Client, rollout_id: str = "r1") -> dict[str, Any]:
    body: dict[str, Any] = client.get(f"/rollout/{rollout_id}/status").json()
    return body


def active(client: httpx.Client) -> int:
    count: int = client.get("/health").json()["lifecycle"]["active_rollouts"]
    return count


def test_a_rollout_is_admitted_with_a_lease_and_polled(server: httpx.Client, controller: Controller) -> None:
    answer = server.post("/rollout", json=controller.request("poll"))
    assert answer.status_code == 202
    admission = answer.json()
    assert admission == {
        "rollout_id": "poll",
        "status": "queued",
        "polling_lease_token": admission["polling_lease_token"],
        "result_wait_timeout_sec": 30.0,
        "polling_lease_timeout_sec": 120.0,
    }
    assert finished(server, admission) == {
        "rollout_id": "poll",
        "status": "success",
        "sample": {
            "messages": ANSWER,
            "label": "4",
            "reward": 1.0,
            "remove_sample": False,
            "metrics": {},
            "extra_fields": {},
        },
        "err_message": None,
        "err_category": None,
    }
    # The answer may have been lost.
    assert poll(server, admission)["status"] == "success"
    assert state(server, "poll") == {"rollout_id": "poll", "status": "success", "reward": 1.0, "err_message": None}
    assert controller.callbacks == []


def test_a_poll_is_answered_when_the_status_changes(controller: Controller) -> None:
    working, grading = threading.Event(), threading.Event()

    async def work(ctx: Any) -> Any:
        await asyncio.to_thread(working.wait)
        return ANSWER

    async def grade(ctx: Any) -> None:
        await asyncio.to_thread(grading.wait)
        ctx.set_reward(1)

    # The status may have changed before the poll arrives, which then waits for the next change.
    with serving(local(work, grade), result_wait_timeout_sec=1.0) as client:
        admission = client.post("/rollout", json=controller.request()).json()
        eventually(lambda: state(client)["status"] == "running")
        working.set()
        body = poll(client, admission)
        assert body == {
            "rollout_id": "r1",
            "status": "grading",
            "sample": None,
            "err_message": None,
            "err_category": None,
        }
        grading.set()
        assert poll(client, admission)["status"] == "success"


def test_a_poll_is_answered_after_its_time(controller: Controller) -> None:
    with serving(local(forever), result_wait_timeout_sec=0.05) as client:
        admission = client.post("/rollout", json=controller.request()).json()
        assert poll(client, admission)["status"] == "running"
        client.post("/rollout/cancel", json={"all": True})


def test_a_rollout_that_nobody_polls_for_is_cancelled(controller: Controller) -> None:
    cancelled = threading.Event()

    async def work(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with serving(local(work), result_wait_timeout_sec=0.02, polling_lease_timeout_sec=0.1) as client:
        admission = client.post("/rollout", json=controller.request()).json()
        assert cancelled.wait(10)
        body = poll(client, admission)
        assert (body["status"], body["err_category"]) == ("failure", "lease_expired")
        assert body["err_message"].startswith("polling lease expired")
        eventually(lambda: active(client) == 0)


def test_a_lease_must_be_the_rollouts_own(server: httpx.Client, controller: Controller) -> None:
    assert server.post("/rollout", json=controller.request("leased")).status_code == 202
    header = "X-Osmosis-Rollout-Lease"
    assert server.get("/rollout/leased/result", headers={header: "wrong"}).status_code == 403
    assert server.get("/rollout/leased/result", headers={header: ""}).status_code == 422
    assert server.get("/rollout/unknown/result", headers={header: "any"}).status_code == 404
    assert server.post("/rollout", json=controller.request("leased")).status_code == 409


def test_a_result_is_forgotten_after_its_time(controller: Controller) -> None:
    with serving(local(), result_retention_sec=1) as client:
        assert run(client, controller.request())["status"] == "success"
        eventually(lambda: state(client)["status"] == "unknown")
        assert run(client, controller.request())["status"] == "success"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"initial_messages": None}, "initial_messages"),
        ({"chat_completions_url": None}, "chat_completions_url"),
        ({"rollout_id": None}, "rollout_id is missing"),
        ({"rollout_id": "../up"}, "one path segment"),
        ({"rollout_id": ".."}, "one path segment"),
        ({"rollout_id": "a\\b"}, "one path segment"),
        ({"llm_api_key": ""}, "llm_api_key"),
        ({"agent_timeout_sec": "soon"}, "agent_timeout_sec"),
    ],
)
def test_a_wrong_request_is_refused(
    server: httpx.Client, controller: Controller, change: dict[str, Any], named: str
) -> None:
    answer = server.post("/rollout", json={**controller.request(), **change})
    assert answer.status_code == 422
    assert named in answer.text
    assert MODEL_KEY not in answer.text


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"agent_timeout_sec": NaN}'])
def test_a_body_that_isnt_a_request_is_refused(server: httpx.Client, body: bytes) -> None:
    answer = server.post("/rollout", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


def test_web_pages_cant_start_rollouts(server: httpx.Client, controller: Controller) -> None:
    page = {"Origin": "https://example.com"}
    assert server.post("/rollout", json=controller.request(), headers=page).status_code == 403
    assert server.post("/rollout", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_page_cant_point_its_own_name_at_the_server(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the browser takes the server for the page's own. With a key, a page can't know it."""
    for key, names, code in ((None, "", 421), (None, "rollouts.example", 200), ("server-key", "", 200)):
        monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_ALLOWED_HOSTS", names)
        with serving(local(), api_key=key) as client:
            headers = {"Host": "Rollouts.Example:80", "Authorization": "Bearer server-key"}
            assert client.get("/health", headers=headers).status_code == code


def test_a_key_is_asked_for_everywhere(controller: Controller) -> None:
    # A header can't carry the line break that a file's key ends with.
    with serving(local(), api_key="server-key\n") as client:
        for method, path in [("GET", "/health"), ("POST", "/rollout"), ("POST", "/rollout/cancel"), ("POST", "/drain")]:
            assert client.request(method, path).status_code == 401
        client.headers["Authorization"] = "Bearer server-key"
        assert run(client, controller.request())["status"] == "success"


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": " "},
        {"result_wait_timeout_sec": 0},
        {"polling_lease_timeout_sec": 30},
        {"polling_lease_timeout_sec": float("inf")},
        {"result_retention_sec": -1},
    ],
)
def test_settings_that_cant_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|is empty"):
        create_rollout_server(backend=local(), **options)


def test_health_tells_who_answers_and_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_OSMOSIS_ROLLOUT_INSTANCE_ID", "instance-1")
    with serving(local()) as client:
        answer = client.get("/health")
    health = answer.json()
    assert health == {
        "status": "ok",
        "concurrency": {"max_concurrent": 4, "queued": 0, "running": 0},
        "instance_id": "instance-1",
        "process_id": health["process_id"],
        "lifecycle": {"accepting_rollouts": True, "active_rollouts": 0},
    }
    assert answer.headers["x-osmosis-rollout-instance-id"] == "instance-1"


def test_a_draining_server_takes_no_more_rollouts(controller: Controller) -> None:
    with serving(local()) as client:
        drained = client.post("/drain", json={})
        assert drained.json() == {"accepting_rollouts": False, "active_rollouts": 0}
        assert client.post("/rollout", json=controller.request()).status_code == 503
        assert client.get("/health").json()["lifecycle"]["accepting_rollouts"] is False


@pytest.mark.parametrize("selector", [{"ids": ["r1", "r2", "r3"]}, {"prefix": "r"}, {"all": True}])
def test_rollouts_are_cancelled_one_by_one_or_together(controller: Controller, selector: dict[str, Any]) -> None:
    with serving(local(forever, workflow_config=ONE_AT_A_TIME)) as client:
        first, second = (client.post("/rollout", json=controller.request(name)).json() for name in ("r1", "r2"))
        eventually(lambda: state(client, "r1")["status"] == "running" and state(client, "r2")["status"] == "queued")
        answer = client.post("/rollout/cancel", json=selector)
        unknown = {"r3": "not_found"} if "ids" in selector else {}
        assert answer.json() == {"dispositions": {"r1": "cancelled_running", "r2": "cancelled_queued", **unknown}}
        for admission in (first, second):
            body = finished(client, admission)
            assert (body["status"], body["err_message"]) == ("cancelled", "cancelled")
        again = client.post("/rollout/cancel", json={"ids": ["r1"]}).json()
        assert again == {"dispositions": {"r1": "not_found"}}


@pytest.mark.parametrize("selector", [{}, {"ids": ["a"], "all": True}, {"prefix": "a", "ids": []}])
def test_cancelling_needs_one_selector(server: httpx.Client, selector: dict[str, Any]) -> None:
    assert server.post("/rollout/cancel", json=selector).status_code == 422


def test_an_unknown_rollouts_status_is_unknown(server: httpx.Client) -> None:
    assert state(server, "nobody") == {
        "rollout_id": "nobody",
        "status": "unknown",
        "reward": None,
        "err_message": None,
    }


def test_the_workflow_reaches_the_model_through_its_context(controller: Controller) -> None:
    seen: list[Any] = []
    with serving(local(lambda ctx: seen.append(get_rollout_context()))) as client:
        run(client, controller.request())
        run(client, controller.request("r2", llm_api_key=None, controller_api_key=CONTROLLER_KEY))
    assert [(each.chat_completions_url, each.api_key, each.rollout_id) for each in seen] == [
        (f"{controller.root}/v1/rollouts/r1", MODEL_KEY, "r1"),
        (f"{controller.root}/v1/rollouts/r2", CONTROLLER_KEY, "r2"),
    ]


@pytest.mark.parametrize(
    ("work", "grade", "message", "category"),
    [
        (raising(ValueError("bad row")), None, "bad row", "validation_error"),
        (None, raising(OSError("no judge")), "no judge", "agent_error"),
        (forever, None, "workflow exceeded its 0.1s deadline", "timeout"),
        (None, forever, "grader exceeded its 0.1s deadline", "timeout"),
        (raising(OSError("caf\udce9")), None, "caf?", "agent_error"),
    ],
)
def test_a_failures_text_reaches_every_controller(
    controller: Controller, work: Any, grade: Any, message: str, category: str
) -> None:
    timeouts = {"agent_timeout_sec": 0.1, "grader_timeout_sec": 0.1}
    with serving(local(work, grade or (lambda ctx: ctx.set_reward(1)))) as client:
        body = run(client, controller.request(**timeouts))
        client.post("/rollout", json=controller.called_back("r2", **timeouts))
        _, graded = controller.wait_for_callbacks(2)
    for each in (body, graded):
        assert (each["status"], each["err_message"], each["err_category"]) == ("failure", message, category)
        # The sample without a reward, if the workflow made one.
        assert (each["sample"] is None) == (grade is None)
        assert each["sample"] is None or each["sample"]["reward"] is None


def test_a_rollout_has_time_limits_even_if_the_controller_names_none(controller: Controller) -> None:
    requests: list[Any] = []

    class Recording(ExecutionBackend):
        async def execute(self, request: Any) -> ExecutionOutcome:  # type: ignore[override]
            requests.append(request)
            return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))

    with serving(Recording()) as client:
        run(client, controller.request(agent_timeout_sec=None))
        run(client, controller.request("r2", agent_timeout_sec=7, grader_timeout_sec=8))
    assert [(each.agent_timeout_sec, each.grader_timeout_sec) for each in requests] == [(450.0, 150.0), (7.0, 8.0)]


def test_callbacks_come_in_order_with_the_controllers_key(controller: Controller) -> None:
    with serving(local()) as client:
        assert client.post("/rollout", json=controller.called_back()).status_code == 202
        bodies = controller.wait_for_callbacks(2)
    assert [request.path for request in controller.callbacks] == [
        "/v1/rollouts/r1/completion",
        "/v1/rollouts/r1/grader",
    ]
    assert {request.headers["authorization"] for request in controller.callbacks} == {f"Bearer {CONTROLLER_KEY}"}
    error = {"err_message": None, "err_category": None}
    sample = {
        "messages": ANSWER,
        "label": "4",
        "reward": 1.0,
        "remove_sample": False,
        "metrics": {},
        "extra_fields": {},
    }
    assert bodies == [
        {"status": "success", "rollout_id": "r1", "extra_fields": None, **error},
        {"status": "success", "rollout_id": "r1", "sample": sample, **error},
    ]


def test_controllers_of_the_older_sdk_get_samples_by_id(controller: Controller) -> None:
    def work(_: Any) -> None:
        rollout = get_rollout_context()
        assert rollout is not None
        for name in ("left", "right"):
            rollout.register_sample_source(name, Named())

    def grade(ctx: Any) -> None:
        ctx.set_sample_reward("left", 1)
        ctx.get_samples()["right"].remove_sample = True

    with serving(local(work, grade)) as client:
        client.post("/rollout", json=controller.called_back_by_id("several"))
        graded = controller.wait_for_callbacks(2)[1]
        client.post("/rollout", json=controller.called_back("one"))
        mean = controller.wait_for_callbacks(4)[3]
    assert [request.path for request in controller.callbacks[:2]] == ["/v1/rollout/completed", "/v1/grader/completed"]
    assert "sample" not in graded
    assert {name: (each["id"], each["reward"]) for name, each in graded["samples"].items()} == {
        "left": ("left", 1.0),
        "right": ("right", None),
    }
    # A controller that takes one sample gets the mean reward of those kept, and all samples beside it.
    assert (mean["sample"]["id"], mean["sample"]["reward"], mean["sample"]["remove_sample"]) == ("left", 1.0, False)
    assert set(mean["samples"]) == {"left", "right"}


def test_the_only_sample_has_the_rollouts_id_for_controllers_of_the_older_sdk(controller: Controller) -> None:
    with serving(local()) as client:
        client.post("/rollout", json=controller.called_back_by_id())
        graded = controller.wait_for_callbacks(2)[1]
    assert list(graded["samples"]) == ["r1"]
    assert graded["samples"]["r1"]["id"] == "r1"


def test_a_removed_sample_carries_no_reward(controller: Controller) -> None:
    def grade(ctx: Any) -> None:
        ctx.set_reward(0.5)
        ctx.sample.remove_sample = True

    with serving(local(None, grade)) as client:
        body = run(client, controller.request())
    assert (body["status"], body["sample"]["remove_sample"], body["sample"]["reward"]) == ("success", True, None)


class Opaque:
    """A value that JSON can't hold."""


@pytest.mark.parametrize("value", [Opaque(), {1, 2}, float("nan")])
def test_what_json_cant_hold_costs_no_reward(controller: Controller, value: Any) -> None:
    def grade(ctx: Any) -> None:
        ctx.sample.metrics.update(bad=value, good=1)
        ctx.set_reward(1)

    with serving(local(lambda ctx: [*ANSWER, {"role": "assistant", "content": value}], grade)) as client:
        body = run(client, controller.request())
        client.post("/rollout", json=controller.called_back("r2"))
        graded = controller.wait_for_callbacks(2)[1]
    assert body["sample"]["reward"] == graded["sample"]["reward"] == 1.0
    assert body["sample"].get("metrics", {"good": 1}) == {"good": 1}


def test_without_a_grader_url_nothing_is_graded(controller: Controller) -> None:
    graded: list[Any] = []
    with serving(local(None, graded.append)) as client:
        client.post("/rollout", json=controller.called_back(grader_callback_url=None))
        controller.wait_for_callbacks(1)
        eventually(lambda: active(client) == 0)
        body = run(client, controller.request("r2", grade=False))
    assert (len(controller.callbacks), graded) == (1, [])
    assert (body["status"], body["sample"]["reward"]) == ("success", None)


def test_a_callback_is_sent_again_until_it_is_accepted() -> None:
    answers = [status(503), status(429)]
    with Controller(answers=answers).run_in_thread() as controller, serving(local()) as client:
        client.post("/rollout", json=controller.called_back())
        bodies = controller.wait_for_callbacks(4)
    assert ["sample" in body for body in bodies] == [False, False, False, True]


def test_a_refused_callback_isnt_repeated_and_grading_goes_on() -> None:
    with Controller(answers=[status(404)]).run_in_thread() as controller, serving(local()) as client:
        client.post("/rollout", json=controller.called_back())
        bodies = controller.wait_for_callbacks(2)
        eventually(lambda: active(client) == 0)
    assert [body["status"] for body in bodies] == ["success", "success"]
    assert len(controller.callbacks) == 2


def test_who_polls_is_not_called_back(controller: Controller) -> None:
    gate = threading.Event()

    async def work(_: Any) -> Any:
        await asyncio.to_thread(gate.wait)
        return ANSWER

    with serving(local(work), result_wait_timeout_sec=0.05) as client:
        admission = client.post("/rollout", json=controller.called_back()).json()
        poll(client, admission)
        gate.set()
        assert finished(client, admission)["sample"]["reward"] == 1.0
        eventually(lambda: active(client) == 0)
    assert controller.callbacks == []


def test_who_is_called_back_needs_no_lease(controller: Controller) -> None:
    gate = threading.Event()

    async def work(_: Any) -> Any:
        await asyncio.to_thread(gate.wait)
        return ANSWER

    with serving(local(work), result_wait_timeout_sec=0.01, polling_lease_timeout_sec=0.02) as client:
        request = controller.called_back()
        del request["rollout_id"]
        client.post("/rollout", json=request)
        with serving(local(forever), result_wait_timeout_sec=0.01, polling_lease_timeout_sec=0.02) as other:
            # A lease of the same length has expired by then.
            other.post("/rollout", json=controller.request())
            eventually(lambda: state(other)["status"] == "failure")
        gate.set()
        assert [body["status"] for body in controller.wait_for_callbacks(2)] == ["success", "success"]


@pytest.mark.parametrize(("by_id", "word"), [(False, "cancelled"), (True, "failure")])
def test_a_cancelled_rollout_is_called_back(controller: Controller, by_id: bool, word: str) -> None:
    request = controller.called_back_by_id() if by_id else controller.called_back()
    with serving(local(forever)) as client:
        client.post("/rollout", json=request)
        eventually(lambda: state(client)["status"] == "running")
        client.post("/rollout/cancel", json={"ids": ["r1"]})
        completed, graded = controller.wait_for_callbacks(2)
    assert (completed["status"], completed["err_message"]) == (word, "cancelled")
    assert (graded["status"], graded["err_message"]) == ("failure", "cancelled")


def test_the_application_has_its_own_lifespan_around_all_rollouts(controller: Controller) -> None:
    from contextlib import asynccontextmanager

    order: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        order.append("open")
        yield
        order.append("close")

    async def work(_: Any) -> Any:
        await asyncio.to_thread(started.set)
        await asyncio.to_thread(time.sleep, 0.05)
        order.append("work")
        return ANSWER

    started = threading.Event()
    with serving(local(work), lifespan=lifespan) as client:
        client.post("/rollout", json=controller.request())
        started.wait(10)
    assert order == ["open", "work", "close"]


class OlderBackend(ExecutionBackend):
    """A backend of SDK 0.3.0: it reports through callbacks, and returns nothing."""

    async def execute(self, request: Any, on_workflow_complete: Any, on_grader_complete: Any = None) -> None:
        sample = RolloutSample(messages=request.prompt, reward=0.5)
        await on_workflow_complete(ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample))
        if on_grader_complete is not None:
            await on_grader_complete(ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample))


class NewerBackend(ExecutionBackend):
    """A backend of SDK 0.3.3: it returns the outcome, and knows capacity and status."""

    full = False

    async def execute(self, request: Any) -> ExecutionOutcome:  # type: ignore[override]
        sample = RolloutSample(messages=request.prompt, reward=0.5)
        result = ExecutionResult(status=RolloutStatus.SUCCESS, sample=sample)
        return ExecutionOutcome(workflow=result, grader=result if request.grade else None)

    def has_capacity(self) -> bool:
        return not self.full

    def rollout_status(self, rollout_id: str) -> dict[str, Any] | None:
        return {"status": "grading"} if rollout_id == "known" else None


class CrashingBackend(ExecutionBackend):
    """A backend that fails."""

    async def execute(self, request: Any, *_: Any, **callbacks: Any) -> None:
        raise OSError(request.metadata["text"])


@pytest.mark.parametrize("backend", [OlderBackend(), NewerBackend()])
def test_a_users_own_backend_of_either_generation(controller: Controller, backend: ExecutionBackend) -> None:
    with serving(backend) as client:
        assert run(client, controller.request())["sample"]["reward"] == 0.5
        client.post("/rollout", json=controller.called_back("r2"))
        assert controller.wait_for_callbacks(2)[1]["sample"]["reward"] == 0.5


class Ungrading(ExecutionBackend):
    """A backend that never grades, and reports its success before its result."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    async def execute(self, request: Any) -> ExecutionOutcome:  # type: ignore[override]
        rollout = get_rollout_context()
        assert rollout is not None
        await rollout.set_status(RolloutStatus.SUCCESS)
        await asyncio.to_thread(self.gate.wait)
        return ExecutionOutcome(workflow=ExecutionResult(status=RolloutStatus.SUCCESS))


def test_a_status_is_terminal_only_with_the_result(controller: Controller) -> None:
    backend = Ungrading()
    with serving(backend, result_wait_timeout_sec=0.05) as client:
        admission = client.post("/rollout", json=controller.request()).json()
        assert poll(client, admission)["status"] == "running"
        backend.gate.set()
        assert finished(client, admission)["status"] == "success"


def test_a_backend_that_doesnt_grade_fails_the_grading(controller: Controller) -> None:
    backend = Ungrading()
    backend.gate.set()
    with serving(backend) as client:
        client.post("/rollout", json=controller.called_back())
        completed, graded = controller.wait_for_callbacks(2)
    assert (completed["status"], graded["status"]) == ("success", "failure")
    assert graded["err_message"] == "the backend reported no grading"


def test_a_full_backend_asks_to_come_again(controller: Controller) -> None:
    backend = NewerBackend()
    with serving(backend) as client:
        backend.full = True
        answer = client.post("/rollout", json=controller.request())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        assert state(client, "known") == {
            "rollout_id": "known",
            "status": "grading",
            "reward": None,
            "err_message": None,
        }


@pytest.mark.parametrize(("text", "message"), [("disk full", "disk full"), ("", "Internal server error")])
def test_a_backend_that_crashes_fails_the_rollout(controller: Controller, text: str, message: str) -> None:
    with serving(CrashingBackend()) as client:
        body = run(client, controller.request(metadata={"text": text}))
        client.post("/rollout", json=controller.called_back("r2", metadata={"text": text}))
        completed, graded = controller.wait_for_callbacks(2)
    for each in (body, completed, graded):
        assert (each["status"], each["err_message"], each["err_category"]) == ("failure", message, "agent_error")


def test_a_request_is_the_older_sdks_if_its_callback_url_lacks_the_id(controller: Controller) -> None:
    kinds = [controller.called_back(), controller.called_back_by_id(), controller.called_back("a b")]
    kinds[2]["completion_callback_url"] = f"{controller.root}/v1/rollouts/a%20b/completion"
    assert [RolloutInitRequest(**each).is_routed_by_body for each in kinds] == [False, True, False]


def test_a_hundred_rollouts_at_once_all_end(controller: Controller) -> None:
    with serving(local()) as client:
        admissions = [client.post("/rollout", json=controller.request(f"r{n}")).json() for n in range(100)]
        results = [finished(client, admission) for admission in admissions]
    assert [result["rollout_id"] for result in results] == [f"r{n}" for n in range(100)]
    assert {result["status"] for result in results} == {"success"}
