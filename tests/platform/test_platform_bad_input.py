"""Requests that can't be answered as asked: each has a clear error, and nothing leaks or is lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from osmosis_ai.errors import UsageError
from osmosis_ai.platform.vault import Cipher
from platforms import Platform, Reply, rows, serving, submission

NOBODY = {"Authorization": ""}
EVALS, DATASETS, SECRETS = "/api/cli/eval-runs", "/api/cli/datasets", "/api/cli/environment-secrets"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        assert platform.upload("sums", rows(4)).status == 200
        yield platform


@pytest.fixture(scope="module")
def ada(platform: Platform) -> str:
    return platform.accounts.create_token("ada", "test")[1]


def operations(platform: Platform) -> list[tuple[str, str]]:
    described = platform.ask("GET", "/api/openapi.json").body
    return [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]


def test_every_route_needs_a_token(platform: Platform) -> None:
    found = operations(platform)
    assert len(found) > 30
    for method, path in found:
        if path in ("/health", "/api/openapi.json"):
            continue
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
            reply = platform.ask(method, path.replace("{", "").replace("}", ""), headers=headers)
            # A signed URL is its own authorization.
            assert reply.status == (403 if path.startswith("/api/files/") else 401), (method, path, reply)


def test_a_login_is_approved_once_and_by_its_own_code(platform: Platform) -> None:
    def begin() -> dict[str, str]:
        return platform.ask("POST", "/api/cli/device/authorize", {"deviceName": "laptop"}, headers=NOBODY).body

    def finish(login: dict[str, str]) -> Reply:
        return platform.ask("POST", "/api/cli/device/token", {"device_code": login["device_code"]}, headers=NOBODY)

    mine, other = begin(), begin()
    assert finish(mine).body["error"] == "authorization_pending"
    with pytest.raises(UsageError, match="no login is waiting"):
        platform.accounts.approve_login("BBBB-BBBB", "grace")
    assert platform.accounts.approve_login(mine["user_code"].lower(), "grace") == "laptop"
    done = finish(mine)
    assert (done.status, done.body["user"]["name"]) == (200, "grace")
    assert platform.ask("GET", "/api/cli/verify", token=done.body["token"]).body["user"]["name"] == "grace"
    assert finish(mine).body["error"] == "expired_token"
    assert finish(other).body["error"] == "authorization_pending"
    with platform.database.write("letting a login expire") as db:
        db.execute("UPDATE devices SET expires_at = 0")
    assert finish(other).body["error"] == "expired_token"
    for body in (b"{", b"[]", b'{"device_code": 1}', b" " * 5000):
        assert platform.ask("POST", "/api/cli/device/token", body, headers=NOBODY).status in (400, 413)
    assert [begin() for _ in range(101)][-1]["code"] == "RATE_LIMITED"


def test_tokens_are_revoked_and_expire_at_once(platform: Platform) -> None:
    token_id, token = platform.accounts.create_token("eve", "test")
    assert platform.ask("GET", EVALS, token=token).status == 200
    assert platform.ask("DELETE", f"/api/cli/tokens/{token_id}").status == 404
    assert platform.ask("DELETE", f"/api/cli/tokens/{token_id}", token=token).status == 200
    assert platform.ask("GET", EVALS, token=token).body["code"] == "TOKEN_REVOKED"
    _, old = platform.accounts.create_token("eve", "test", days=0)
    assert platform.ask("GET", EVALS, token=old).body["code"] == "TOKEN_EXPIRED"
    stored = b"".join(path.read_bytes() for path in platform.home.folder.glob("platform.db*"))
    assert token.encode() not in stored


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "isn't JSON"),
        (b"[1]", 400, "Expected `object`"),
        (b"\xff", 400, "isn't JSON"),
        (b'{"experiment_config":' + b'{"a":' * 100_000, 400, "too deeply"),
        (b'{"experiment_config": 1}', 400, "experiment_config"),
        (b'{"experiment_config": {}, "extra": 1}', 400, "extra"),
        (b" " * (2 << 20), 413, "larger than 1,048,576 bytes"),
    ],
    ids=["cut", "list", "bytes", "deep", "table", "key", "large"],
)
def test_a_malformed_body_is_refused(platform: Platform, body: bytes, status: int, said: str) -> None:
    reply = platform.ask("POST", EVALS, body)
    assert reply.status == status
    assert said in reply.body["error"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": "../../etc"}, "not a path"),
        ({"entrypoint": "../../../etc/passwd.py"}, "relative path inside"),
        ({"entrypoint": "/etc/passwd.py"}, "relative path inside"),
        ({"branch": "--upload-pack=touch x"}, "branch"),
        ({"branch": "a b"}, "no spaces"),
        ({"commit_sha": "HEAD"}, "7 to 40"),
        ({"unknown": "1"}, "unknown key"),
    ],
)
def test_a_config_with_a_dangerous_value_is_refused(platform: Platform, changes: dict[str, str], said: str) -> None:
    reply = platform.ask("POST", EVALS, submission(**changes))
    assert reply.status == 400
    assert said in reply.body["issues"][0]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Osmosis-Git": ""},
        {"X-Osmosis-Git": "one"},
        {"X-Osmosis-Git": "../.."},
        {"X-Osmosis-Git": "a/b/c"},
        {"X-Osmosis-Remote": "ext::sh -c touch% x"},
        {"X-Osmosis-Remote": "--upload-pack=x"},
        {"X-Osmosis-Remote": "/etc"},
    ],
)
def test_an_invalid_workspace_is_refused(platform: Platform, headers: dict[str, str]) -> None:
    reply = platform.ask("GET", EVALS, headers=headers)
    assert reply.status == 400
    assert reply.body["code"].startswith("GIT_SCOPE_HEADER_")


@pytest.mark.parametrize("query", ["limit=0", "limit=51", "limit=x", "offset=-1", "limit=" + "9" * 30])
def test_an_invalid_page_is_refused(platform: Platform, query: str) -> None:
    assert platform.ask("GET", f"{EVALS}?{query}").status == 400


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "a%00b", "%F0%9F%90%8D", "'; DROP TABLE runs; --", "x" * 3000])
def test_unknown_names_are_not_found(platform: Platform, name: str) -> None:
    for path in (EVALS, DATASETS, "/api/cli/training-runs"):
        assert platform.ask("GET", f"{path}/{name.replace(' ', '%20')}").status == 404
    assert platform.ask("GET", EVALS).status == 200


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "a\x00b", "", " x"])
def test_a_dataset_can_t_have_a_path_as_its_name(platform: Platform, name: str) -> None:
    about = {"file_name": name, "file_size": 3, "extension": "jsonl"}
    assert platform.ask("POST", DATASETS, about).status == 400


def test_a_dataset_with_bad_rows_is_refused_with_their_lines(platform: Platform) -> None:
    reply = platform.upload("broken", rows(2) + b'{"user_prompt": 3}\n{"a"\n')
    assert reply.status == 400
    assert "broken.jsonl" in reply.body["error"]
    assert "line 4" in reply.body["error"]
    assert str(platform.home.folder) not in reply.body["error"]
    assert "broken" not in [
        item["file_name"] for item in platform.ask("GET", DATASETS).body["datasets"] if item["status"] == "uploaded"
    ]


def test_a_file_that_is_made_to_fill_the_memory_is_refused(platform: Platform, tmp_path: Path) -> None:
    # A few kilobytes that stand for a thousand rows of 50 MB each.
    import pyarrow
    import pyarrow.parquet

    prompts = pyarrow.DictionaryArray.from_arrays([0] * 1000, ["x" * 50_000_000])
    table = pyarrow.table({"user_prompt": prompts, "system_prompt": ["s"] * 1000, "ground_truth": ["1"] * 1000})
    pyarrow.parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd", dictionary_pagesize_limit=1 << 28)
    data = (tmp_path / "bomb.parquet").read_bytes()
    assert len(data) < 100_000
    reply = platform.upload("bomb", data, "parquet")
    assert reply.status == 400
    assert "bomb.parquet" in reply.body["error"]


def test_a_dataset_is_never_visible_half_uploaded(platform: Platform) -> None:
    about = {"file_name": "half", "file_size": 100, "extension": "jsonl"}
    created = platform.ask("POST", DATASETS, about).body
    url = urlsplit(created["upload"]["presigned_url"])
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 10)
    complete = f"{DATASETS}/{created['id']}/complete"
    assert platform.ask("POST", complete, {}).status == 409
    short, long = b"x" * 99, b"x" * 101
    assert [platform.ask("PUT", created["upload"]["presigned_url"], data).status for data in (short, long)] == [
        400,
        400,
    ]
    assert platform.ask("POST", complete, {}).status == 409
    left = [path.name for path in platform.home.datasets.iterdir() if path.suffix == ".part"]
    assert left == []


def test_the_same_content_is_stored_once(platform: Platform) -> None:
    before = len(list(platform.home.datasets.iterdir()))
    assert platform.upload("again", rows(4)).status == 200
    assert len(list(platform.home.datasets.iterdir())) == before
    assert platform.ask("DELETE", f"{DATASETS}/again").status == 200
    with urlopen(platform.ask("GET", f"{DATASETS}/sums/download").body["presigned_url"]) as answer:
        assert answer.read() == rows(4)


def test_a_signed_url_is_good_for_what_it_was_signed_for(platform: Platform) -> None:
    url = platform.ask("GET", f"{DATASETS}/sums/download").body["presigned_url"]
    assert platform.ask("PUT", url, b"x").status == 403
    assert platform.ask("GET", url.replace("signature=", "signature=0")).status == 403
    assert platform.ask("GET", url.replace("expires=1", "expires=2")).status == 403
    other = url.replace("/datasets/", "/datasets/0")
    assert platform.ask("GET", other).status == 403
    expired = Cipher(platform.home).sign("GET /api/files/datasets/x 5")
    assert (
        platform.ask("GET", f"/api/files/datasets/x?expires=5&signature={expired}").body["code"] == "SIGNATURE_EXPIRED"
    )


def test_personal_secrets_are_their_owner_s(platform: Platform, ada: str) -> None:
    assert platform.ask("POST", SECRETS, {"name": "MINE", "value": "abracadabra"}).status == 200
    assert platform.ask("GET", SECRETS, token=ada).body["environment_secrets"] == []
    body = {**submission(), "secrets": {"required": ["MINE"]}}
    refused = platform.ask("POST", EVALS, body, token=ada)
    assert (refused.status, refused.body["error"]) == (404, "Secret(s) not found: MINE")
    assert platform.ask("DELETE", SECRETS, {"name": "MINE", "scope": "user"}, token=ada).status == 404
    elsewhere = platform.ask("GET", SECRETS, headers={"X-Osmosis-Git": "acme/other"})
    assert elsewhere.body["environment_secrets"] == []
    hint = platform.ask("DELETE", SECRETS, {"name": "MINE", "scope": "workspace"}).body["error"]
    assert "--scope personal" in hint


@pytest.mark.parametrize(
    "body",
    [
        {"name": "lower", "value": "x"},
        {"name": "A" * 256, "value": "x"},
        {"name": "A", "value": ""},
        {"name": "A", "value": "a\x00b"},
        {"name": "A", "value": "x" * 70_000},
        {"name": "A", "value": "x", "scope": "root"},
        {"name": "A"},
    ],
)
def test_an_invalid_secret_is_refused(platform: Platform, body: dict[str, str]) -> None:
    reply = platform.ask("POST", SECRETS, body)
    assert reply.status == 400
    assert "x" * 100 not in json.dumps(reply.body)


def test_values_are_encrypted_and_never_come_back(platform: Platform) -> None:
    platform.ask("POST", SECRETS, {"name": "SEALED", "value": "abracadabra", "scope": "workspace"})
    assert "abracadabra" not in json.dumps(platform.ask("GET", SECRETS).body)
    stored = b"".join(path.read_bytes() for path in platform.home.folder.glob("platform.db*"))
    assert b"abracadabra" not in stored
    assert platform.home.key.stat().st_mode & 0o777 == 0o600
    assert platform.home.token.stat().st_mode & 0o777 == 0o600
    assert platform.home.folder.stat().st_mode & 0o777 == 0o700


def test_unknown_addresses_and_methods_are_json_errors(platform: Platform) -> None:
    assert platform.ask("GET", "/api/cli/nothing").body["code"] == "NOT_FOUND"
    assert platform.ask("PATCH", EVALS, {}).status == 405
