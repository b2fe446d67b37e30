"""Generated requests to the init endpoint: the server answers each and keeps running."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loops import Adding, call, health, serving, until
from pydantic import ValidationError

from osmosis_ai.rollout import InitResponse, RolloutRequest, RolloutStatus
from osmosis_ai.rollout.testing import TrainerDouble, by_turn, text

pytestmark = pytest.mark.xdist_group("generated rollouts")

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": st.text(max_size=30) | st.none() | st.lists(st.just({"type": "text"}), max_size=2)},
    ),
    max_size=4,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "messages": MESSAGES | JSON,
    "completion_params": st.none() | st.dictionaries(st.sampled_from(["temperature", "top_p", "seed"]), SCALARS) | JSON,
    "max_turns": st.integers() | SCALARS,
    "max_tokens_total": st.integers() | SCALARS,
    "metadata": st.none() | st.dictionaries(st.text(max_size=5), JSON, max_size=3) | JSON,
    "tool_server_url": st.none() | st.text(max_size=20) | SCALARS,
    "idempotency_key": st.none() | st.text(max_size=20),
    "api_key": st.none() | st.text(max_size=20),
    "rollout_id": st.text(max_size=300) | SCALARS,
    "something_else": JSON,
}
# Addresses that aren't the trainer's are none that could be connected to.
ADDRESSES = st.sampled_from(
    ["", "http://", "https:///x", "ftp://127.0.0.1", "127.0.0.1:1", "//host", "http://[", "ht tp"]
)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, TrainerDouble]]:
    """One server for all requests, which it must survive."""
    with serving(Adding(), TrainerDouble(by_turn(text("hi")))) as (url, trainer):
        yield url, trainer


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(changes={}, address=None, dropped=set())
@example(changes={"api_key": "l\U0006cdc4\x18"}, address=None, dropped=set())
@given(
    changes=st.fixed_dictionaries({}, optional=FIELDS),
    address=st.none() | ADDRESSES,
    dropped=st.sets(st.sampled_from(["rollout_id", "server_url", "messages"])) | st.just(set()),
)
def test_a_generated_request_is_taken_exactly_when_it_is_one(
    server: tuple[str, TrainerDouble], changes: dict[str, Any], address: str | None, dropped: set[str]
) -> None:
    url, trainer = server
    body: dict[str, Any] = {"rollout_id": uuid.uuid4().hex, "server_url": trainer.server_url, "messages": [], **changes}
    if address is not None:
        body["server_url"] = address
    body = {name: value for name, value in body.items() if name not in dropped}
    raw = json.dumps(body).encode()
    try:
        expected = RolloutRequest.model_validate_json(raw)
    except ValidationError:
        expected = None

    answer = call(url, "/v1/rollout/init", raw)

    assert answer.status in ((202,) if expected else (400, 422))
    assert answer.headers["content-type"] == "application/json"
    if expected is None:
        assert answer.json["detail"]
    else:
        accepted = InitResponse.model_validate_json(answer.body)
        # The same key may have been drawn before: then the answer is that rollout's.
        if not expected.idempotency_key:
            assert accepted.rollout_id == expected.rollout_id
        done = trainer.wait_for_completion(accepted.rollout_id)
        assert done.status in (RolloutStatus.COMPLETED, RolloutStatus.ERROR)
    assert health(url)["status"] == "healthy"


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused(server: tuple[str, TrainerDouble], raw: bytes) -> None:
    url, _ = server
    answer = call(url, "/v1/rollout/init", raw)
    assert answer.status in (400, 422)
    assert answer.json["detail"]


def test_after_all_of_them_nothing_is_left_running(server: tuple[str, TrainerDouble]) -> None:
    url, trainer = server
    until(lambda: not health(url)["active_rollouts"] and not health(url)["queued_rollouts"], "nothing runs")
    figures = health(url)
    assert figures["undelivered_rollouts"] == 0
    assert figures["completed_rollouts"] == len(trainer.completions)
