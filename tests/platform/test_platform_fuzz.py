"""Odd values for every part of every request that the API's description names: none makes the server fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from platforms import Platform, rows, serving, submission

TEXT = st.text(max_size=40) | st.sampled_from(["", "..", "a/b", "sums", "\0", "\ud800", "0" * 300, "%2e%2e", "'"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
QUIET = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        assert platform.upload("sums", rows(4)).status == 200
        yield platform


@pytest.fixture(scope="module")
def described(platform: Platform) -> dict[str, Any]:
    return platform.ask("GET", "/api/openapi.json").body


def encoded(value: object) -> bytes:
    """JSON as a client may send it, with lone surrogates escaped."""
    return json.dumps(value).encode("ascii")


@settings(QUIET, max_examples=8)
@given(data=st.data())
def test_no_request_makes_the_server_fail(platform: Platform, described: dict[str, Any], data: st.DataObject) -> None:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            url = path
            for parameter in operation["parameters"]:
                if parameter["in"] == "path":
                    text = data.draw(TEXT).encode("utf-8", "replace").decode()
                    url = url.replace(f"{{{parameter['name']}}}", quote(text, safe="") or "x")
            query = data.draw(
                st.sampled_from(["", "?limit=-1", "?cursor=x", "?scope=&rows=9-1", "?direction=up&limit=7"])
            )
            body = None
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                fields = described["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
                values = {name: data.draw(VALUES) for name in fields if data.draw(st.booleans())}
                body = encoded(values if data.draw(st.booleans()) else data.draw(VALUES))
            reply = platform.ask(method.upper(), f"{url}{query}", body)
            assert reply.status < 500, (method, url, query, body, reply)
            assert reply.status < 400 or {"error", "code"} <= reply.body.keys(), (method, url, reply)


@QUIET
@given(table=st.sampled_from(["experiment_config", "evaluation_config", "env_config", "secrets"]), value=VALUES)
def test_no_table_of_a_submission_makes_the_server_fail(platform: Platform, table: str, value: Any) -> None:
    reply = platform.ask("POST", "/api/cli/eval-runs", encoded({**submission(commit_sha="0" * 40), table: value}))
    assert reply.status < 500, (value, reply)


@QUIET
@given(key=st.sampled_from(["rollout", "entrypoint", "model_path", "dataset", "commit_sha", "branch"]), value=VALUES)
def test_no_value_of_a_config_makes_the_server_fail(platform: Platform, key: str, value: Any) -> None:
    body = {**submission(commit_sha="0" * 40)}
    body["experiment_config"][key] = value
    reply = platform.ask("POST", "/api/cli/eval-runs", encoded(body))
    assert reply.status < 500, (value, reply)
