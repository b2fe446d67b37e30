"""The remote rollout protocol over real connections: a trainer on one side, all kinds of clients on the other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import pytest
from loops import ADD, KEY, PATIENCE, TRAINER_KEY, Adding, call, health, init, loop_that, serving, until

from osmosis_ai.errors import UsageError
from osmosis_ai.rollout import RolloutContext, RolloutResult, RolloutStatus, create_app
from osmosis_ai.rollout.testing import Gate, TrainerDouble, by_turn, serve_app, text, tool_call

pytestmark = pytest.mark.xdist_group("rollout server")

Server: TypeAlias = tuple[str, TrainerDouble]
SUM = by_turn(tool_call("add", a=1, b=2), text("3"))


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, TrainerDouble]]:
    """A server for requests that are refused: nothing ever runs on it."""
    with serving(Adding(), TrainerDouble()) as (url, trainer):
        yield url, trainer
        assert trainer.requests == trainer.deliveries == []
        assert health(url)["completed_rollouts"] == 0


def test_a_rollout_goes_from_the_request_to_the_trainers_callback(tmp_path: Path) -> None:
    trainer = TrainerDouble(SUM, api_key=TRAINER_KEY)
    with serving(Adding(), trainer, undelivered_dir=tmp_path) as (url, _):
        request = trainer.request("What is 1 + 2?", rollout_id="r/1 ä", completion_params={"temperature": 0.5})
        answer = init(url, request)
        result = trainer.wait_for_completion("r/1 ä")

    assert answer.status == 202
    assert answer.json == {"rollout_id": "r/1 ä", "tools": [ADD]}
    assert result.status is RolloutStatus.COMPLETED
    assert result.finish_reason == "stop"
    assert result.reward == 1.0
    assert result.error_message is None
    assert [message["role"] for message in result.final_messages] == ["user", "assistant", "tool", "assistant"]
    assert result.final_messages[2]["content"] == "3"
    assert result.metrics is not None
    assert (result.metrics.num_llm_calls, result.metrics.num_tool_calls) == (2, 1)
    assert (result.metrics.prompt_tokens, result.metrics.response_tokens) == (20, 10)
    assert result.metrics.max_context_tokens == 15
    assert result.metrics.tool_latency_ms == 2.0
    assert result.metrics.total_latency_ms >= result.metrics.llm_latency_ms > 0

    first, second = trainer.requests
    assert first.body == {
        "model": "default",
        "messages": [{"role": "user", "content": "What is 1 + 2?"}],
        "rollout_id": "r/1 ä",
        "temperature": 0.5,
        "top_p": 1.0,
        "max_tokens": 512,
        "logprobs": True,
    }
    assert second.messages == result.final_messages[:3]
    for sent in (*trainer.requests, *trainer.deliveries):
        assert sent.headers["authorization"] == f"Bearer {TRAINER_KEY}"
    assert list(tmp_path.iterdir()) == []


def test_the_answer_comes_while_the_loop_still_runs() -> None:
    gate = Gate()
    with serving(Adding(), TrainerDouble(by_turn(text("hi").after(gate)))) as (url, trainer):
        answer = init(url, trainer.request("hello", rollout_id="slow"))
        trainer.wait_for_requests(1)
        assert answer.status == 202
        assert trainer.completions == []
        assert health(url)["active_rollouts"] == 1
        gate.open()
        assert trainer.wait_for_completion("slow").final_messages[-1]["content"] == "hi"


def test_tools_that_are_models_arrive_with_every_key_of_their_schema() -> None:
    from osmosis_ai.rollout.core.schemas import OpenAIFunctionToolSchema

    with serving(loop_that(lambda ctx: ctx.complete([]), [OpenAIFunctionToolSchema(**ADD)]), TrainerDouble()) as (
        url,
        trainer,
    ):
        assert init(url, trainer.request("hello")).json["tools"] == [ADD]


@pytest.mark.parametrize("name", ["rollout_id", "idempotency_key"])
def test_a_repeated_request_gets_the_same_answer_and_starts_nothing(name: str) -> None:
    gate = Gate()
    with serving(Adding(), TrainerDouble(by_turn(text("hi").after(gate)))) as (url, trainer):
        request = trainer.request("hello", **{name: "same"})
        first = init(url, request)
        during = init(url, request.model_copy(update={"metadata": {"retry": 1}}))
        gate.open()
        trainer.wait_for_completions(1)
        until(lambda: health(url)["completed_rollouts"] == 1, "the rollout is done")
        after = init(url, request)
        assert first == during == after
        assert (first.status, len(trainer.completions), len(trainer.requests)) == (202, 1, 1)


def test_an_idempotency_key_isnt_taken_for_a_rollout_id() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi")))) as (url, trainer):
        assert init(url, trainer.request("hello", rollout_id="a", idempotency_key="b")).json["rollout_id"] == "a"
        assert init(url, trainer.request("hello", rollout_id="b")).json["rollout_id"] == "b"
        trainer.wait_for_completions(2)


def test_a_hundred_identical_requests_at_once_start_one_rollout() -> None:
    gate = Gate()
    loop = Adding()
    with (
        serving(loop, TrainerDouble(by_turn(text("hi").after(gate)))) as (url, trainer),
        ThreadPoolExecutor(max_workers=100) as threads,
    ):
        request = trainer.request("hello", rollout_id="once")
        answers = list(threads.map(lambda _: init(url, request), range(100)))
        gate.open()
        trainer.wait_for_completions(1)
        figures = until(lambda: (found := health(url))["completed_rollouts"] == 1 and found, "the rollout is done")

    assert {answer.status for answer in answers} == {202}
    assert len({answer.body for answer in answers}) == 1
    assert figures["active_rollouts"] == figures["queued_rollouts"] == 0
    assert (len(trainer.requests), len(trainer.deliveries)) == (1, 1)
    # Once for the answer, once for the rollout itself.
    assert loop.asked_for_tools == 2


def test_over_the_limit_rollouts_queue_and_all_of_them_end() -> None:
    gate = Gate()
    with serving(Adding(), TrainerDouble(by_turn(text("hi").after(gate))), max_concurrent=2) as (url, trainer):
        for _ in range(5):
            assert init(url, trainer.request("hello")).status == 202
        trainer.wait_for_requests(2)
        figures = health(url)
        assert (figures["active_rollouts"], figures["queued_rollouts"]) == (2, 3)
        assert len(trainer.requests) == 2
        gate.open()
        trainer.wait_for_completions(5)
        assert len({result.rollout_id for result in trainer.completions}) == 5


def test_more_than_it_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_MAX_OPEN_ROLLOUTS", "2")
    gate = Gate()
    with serving(Adding(), TrainerDouble(by_turn(text("hi").after(gate))), max_concurrent=1) as (url, trainer):
        taken = [trainer.request("hello") for _ in range(2)]
        assert [init(url, request).status for request in taken] == [202, 202]
        refused = init(url, trainer.request("hello", rollout_id="third"))
        assert (refused.status, "try again later" in refused.json["detail"]) == (503, True)
        assert init(url, taken[0]).status == 202
        gate.open()
        trainer.wait_for_completions(2)
        until(lambda: health(url)["completed_rollouts"] == 2, "both are done")
        assert init(url, trainer.request("hello", rollout_id="third")).status == 202
        trainer.wait_for_completion("third")


def test_a_finished_rollout_is_forgotten_after_its_time() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi"))), record_ttl_seconds=0.05) as (url, trainer):
        request = trainer.request("hello", rollout_id="again")
        init(url, request)
        trainer.wait_for_completions(1)
        until(lambda: init(url, request).status == 202 and len(trainer.completions) > 1, "it runs a second time")


def test_a_finished_rollout_is_remembered_until_its_time() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi"))), record_ttl_seconds=3600) as (url, trainer):
        request = trainer.request("hello")
        init(url, request)
        until(lambda: health(url)["completed_rollouts"] == 1, "the rollout is done")
        for _ in range(20):
            init(url, request)
        assert health(url)["active_rollouts"] == health(url)["queued_rollouts"] == 0
        assert len(trainer.requests) == 1


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer schl\xfcssel",
    ],
)
def test_a_missing_or_wrong_key_is_401_and_starts_nothing(server: Server, header: str | None) -> None:
    import http.client

    url, trainer = server
    for method, path in (("POST", "/v1/rollout/init"), ("GET", "/platform/health")):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        body = json.dumps(trainer.request("hello").model_dump()).encode()
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        connection.request(method, path, body if method == "POST" else None, headers)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert KEY not in answer.decode()
    assert health(url)["active_rollouts"] == health(url)["completed_rollouts"] == 0
    assert trainer.requests == trainer.deliveries == []


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"Origin": "http://evil.example"}, 403, "Origin names another host"),
        ({"Origin": "null"}, 403, "Origin names another host"),
        # The same host, but another port: a page that another program on this machine serves.
        ({"Origin": "http://127.0.0.1:1"}, 403, "Origin names another host"),
        ({"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        ({"Content-Type": "text/plain; application/json"}, 415, "Content-Type: application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type: application/json"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "Content-Type: application/json"),
    ],
)
def test_what_a_web_page_sends_is_refused(server: Server, headers: dict[str, str], status: int, said: str) -> None:
    url, trainer = server
    answer = init(url, trainer.request("hello"), headers=headers)
    assert answer.status == status
    assert said in answer.json["detail"]
    if status == 403:
        assert call(url, "/health", headers=headers).status == 403
        assert call(url, "/platform/health", headers=headers).status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:9000", "192.0.2.1", "[::1", ""])
@pytest.mark.parametrize(("key", "names"), [(None, ""), (KEY, "rollouts.example")])
def test_a_name_that_isnt_the_servers_is_refused(
    host: str, key: str | None, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_ALLOWED_HOSTS", names)
    with serving(Adding(), TrainerDouble(), api_key=key) as (url, trainer):
        answer = init(url, trainer.request("hello"), headers={"Host": host})
        assert answer.status == call(url, "/health", headers={"Host": host}).status == 421
        assert answer.json["detail"].startswith("this server isn't called '")
        assert trainer.requests == trainer.deliveries == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"Content-Type": "Application/JSON; charset=utf-8"},
        {"Host": "localhost:1"},
        {"Host": "[::1]:9000"},
        {"Host": "Rollouts.Example"},
        {"Host": "rollouts.example", "Origin": "https://rollouts.example"},
    ],
)
def test_a_trainer_is_served_by_every_name_of_the_server(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_ALLOWED_HOSTS", "other, rollouts.example")
    with serving(Adding(), TrainerDouble(SUM)) as (url, trainer):
        assert init(url, trainer.request("hello"), headers=headers).status == 202
        trainer.wait_for_completions(1)


def test_without_the_key_the_body_isnt_even_read(server: Server) -> None:
    url, _ = server
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /v1/rollout/init HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_the_right_key_opens_the_platforms_health() -> None:
    with serving(Adding(), TrainerDouble()) as (url, _):
        answer = call(url, "/platform/health")
    assert answer.status == 200
    assert answer.json == {
        "status": "healthy",
        "agent_loop": "adding",
        "active_rollouts": 0,
        "queued_rollouts": 0,
        "completed_rollouts": 0,
        "undelivered_rollouts": 0,
    }


def test_without_a_configured_key_everybody_is_served_but_there_is_no_platform_health() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi"))), api_key=None) as (url, trainer):
        assert init(url, trainer.request("hello"), key=None).status == 202
        trainer.wait_for_completions(1)
        assert call(url, "/platform/health").status == 404


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_API_KEY", "from-the-environment")
    with serving(Adding(), TrainerDouble(by_turn(text("hi"))), api_key=None) as (url, trainer):
        assert init(url, trainer.request("hello"), key=None).status == 401
        assert init(url, trainer.request("hello"), key="from-the-environment").status == 202
        trainer.wait_for_completions(1)


def test_a_keys_line_break_is_no_part_of_it() -> None:
    with serving(Adding(), TrainerDouble(), api_key=f"{KEY}\n") as (url, _):
        assert call(url, "/platform/health", key=KEY).status == 200


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused_instead_of_opening_the_server(key: str) -> None:
    with pytest.raises(ValueError, match="the API key is empty"):
        create_app(Adding(), api_key=key)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"not json", 400),
        (b"\xff\xfe", 400),
        (b'{"rollout_id": NaN1}', 400),
        (b"[" * 100_000, 400),
        (b"null", 422),
        (b"[]", 422),
        (b'"text"', 422),
        (b"{}", 422),
    ],
)
def test_an_invalid_body_is_refused(server: Server, body: bytes, status: int) -> None:
    url, _ = server
    answer = call(url, "/v1/rollout/init", body, method="POST")
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert answer.json["detail"]
    assert health(url)["active_rollouts"] == 0


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("rollout_id", None, "rollout_id"),
        ("rollout_id", "", "rollout_id"),
        ("rollout_id", "x" * 257, "rollout_id"),
        ("server_url", None, "server_url"),
        ("server_url", "", "server_url"),
        ("server_url", "ftp://host", "server_url"),
        ("server_url", "http://", "server_url"),
        ("server_url", "http://host:99999", "server_url"),
        ("server_url", "http://user:secret@host", "server_url"),
        ("server_url", "http://host/?a=1", "server_url"),
        ("server_url", "http://ho st", "server_url"),
        ("server_url", "http://[::1", "server_url"),
        ("messages", None, "messages"),
        ("messages", "hello", "messages"),
        ("messages", ["hello"], "messages"),
        ("max_turns", 0, "max_turns"),
        ("api_key", "secret\r\nX-Injected: 1", "api_key"),
        ("api_key", "secret\x18", "api_key"),
        ("max_tokens_total", -1, "max_tokens_total"),
        ("completion_params", [], "completion_params"),
        ("completion_params", {"messages": []}, "completion_params"),
        ("completion_params", {"temperature": 1, "rollout_id": "other"}, "completion_params"),
        ("metadata", "text", "metadata"),
        ("metadata", {"x": "y" * (1024 * 1024)}, "metadata"),
    ],
)
def test_a_field_that_cant_be_used_is_named_without_its_value(
    server: Server, field: str, value: object, what: str
) -> None:
    url, trainer = server
    body = trainer.request("hello", api_key="never-to-be-seen").model_dump()
    if value is None:
        del body[field]
    else:
        body[field] = value
    answer = init(url, body)
    assert answer.status == 422
    assert [error["loc"][0] for error in answer.json["detail"]] == [what]
    assert "Value error" not in answer.json["detail"][0]["msg"]
    assert b"never-to-be-seen" not in answer.body
    assert b"secret" not in answer.body


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_of_ten_megabytes_is_refused(server: Server, is_chunked: bool) -> None:
    import http.client

    url, trainer = server
    body = json.dumps({**trainer.request("hello").model_dump(), "junk": "x" * 10_000_000}).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    chunks = (body[start : start + 65536] for start in range(0, len(body), 65536))
    headers = {"Authorization": f"Bearer {KEY}"}
    sent = chunks if is_chunked else body
    connection.request("POST", "/v1/rollout/init", sent, headers, encode_chunked=is_chunked)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())) == (413, {"detail": "the body is over 8388608 bytes"})
    connection.close()
    assert health(url)["active_rollouts"] == 0


def test_a_body_just_below_the_limit_is_taken() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi")))) as (url, trainer):
        body = trainer.request([{"role": "user", "content": "x" * (8 * 1024 * 1024 - 1000)}]).model_dump()
        assert init(url, body).status == 202
        trainer.wait_for_completions(1)
        assert len(trainer.completions[0].final_messages[0]["content"]) > 8_000_000


def test_a_client_that_goes_away_in_the_middle_of_the_body_starts_nothing(server: Server) -> None:
    url, trainer = server
    body = json.dumps(trainer.request("hello").model_dump()).encode()
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        head = f"POST /v1/rollout/init HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-10])
    figures = health(url)
    assert (figures["active_rollouts"], figures["queued_rollouts"], trainer.requests) == (0, 0, [])


def test_a_client_that_goes_away_before_the_answer_still_gets_its_rollout() -> None:
    with serving(Adding(), TrainerDouble(by_turn(text("hi")))) as (url, trainer):
        body = json.dumps(trainer.request("hello", rollout_id="orphan").model_dump()).encode()
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
            head = f"POST /v1/rollout/init HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert trainer.wait_for_completion("orphan").status is RolloutStatus.COMPLETED


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/rollout/init", 405),
        ("PUT", "/v1/rollout/init", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("POST", "/v1/rollout/other", 404),
    ],
)
def test_other_paths_and_methods_are_refused_as_json(server: Server, method: str, path: str, status: int) -> None:
    url, _ = server
    answer = call(url, path, method=method)
    assert answer.status == status
    assert set(answer.json) == {"detail"}


def test_making_an_application_neither_checks_nor_runs_the_loop() -> None:
    def tools() -> list[object]:
        raise AssertionError("get_tools was called")

    create_app(loop_that(lambda ctx: None, tools))


def test_an_application_can_be_made_from_the_loops_class() -> None:
    with TrainerDouble(by_turn(text("hi"))).run_in_thread() as trainer, serve_app(create_app(Adding)) as url:
        assert init(url, trainer.request("hello")).status == 202
        trainer.wait_for_completions(1)


def test_a_setting_that_cant_be_used_is_said_when_the_application_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS", "soon")
    with pytest.raises(UsageError, match=r"OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS is 'soon': Expected `float`"):
        create_app(Adding())


def test_debug_files_are_written_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLOUT_DEBUG_DIR", str(tmp_path))

    def run(ctx: RolloutContext) -> RolloutResult:
        ctx.log_event("begin", turn=0, key=ctx.request.api_key)
        ctx.log_event("end", value={1, 2})
        return ctx.complete([])

    trainer = TrainerDouble(api_key=TRAINER_KEY)
    with serving(loop_that(run), trainer) as (url, _):
        init(url, trainer.request("hello", rollout_id="../up"))
        trainer.wait_for_completions(1)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [event["event_type"] for event in events] == ["begin", "end"]
    assert {event["rollout_id"] for event in events} == {"../up"}
    assert TRAINER_KEY not in file.read_text(encoding="utf-8")
