"""The viewer's pages of a platform: only a browser that was let in sees runs, and only those of its workspaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from platforms import Platform, make_workspace, rows, serving, submission

OTHER = {"X-Osmosis-Git": "acme/other"}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        workspace = {"X-Osmosis-Path": str(make_workspace(tmp_path_factory.mktemp("workspace")))}
        assert platform.upload("sums", rows(4)).status == 200
        platform.ask("GET", "/api/cli/eval-runs", headers=workspace)
        yield platform


@pytest.fixture(scope="module")
def run(platform: Platform) -> str:
    """The address of the page of a finished run."""
    name = platform.ask("POST", "/api/cli/eval-runs", submission()).body["name"]
    return str(platform.wait(name)["platform_url"])


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def get(url: str, cookie: str = "", method: str = "GET", **headers: str) -> Answer:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, f"{parts.path or '/'}?{parts.query}", headers={"Cookie": cookie, **sent})
    with closing(connection), connection.getresponse() as answer:
        return Answer(
            answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        )


def ticket(platform: Platform, token: str | None = None, **headers: str) -> str:
    reply = platform.ask("POST", "/api/cli/pages", {}, token=token, headers=headers)
    return str(reply.body["token"])


def enter(platform: Platform, given: str, cookie: str = "") -> str:
    """Open a URL with a ticket, and return the cookie."""
    answer = get(f"{platform.url}/?token={given}", cookie)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    said = answer.headers["set-cookie"]
    assert "HttpOnly" in said
    assert "SameSite=strict" in said
    return said.partition(";")[0]


def test_a_browser_that_was_let_in_sees_its_workspace_s_runs(platform: Platform, run: str) -> None:
    cookie = enter(platform, ticket(platform))
    listed, shown = get(platform.url, cookie), get(run, cookie)
    assert (listed.status, shown.status) == (200, 200)
    assert "script-src 'self'" in shown.headers["content-security-policy"]
    assert "offline/oracle" in shown.text
    assert "offline/oracle" in listed.text


def test_runs_of_another_workspace_are_not_shown_until_it_is_opened_too(platform: Platform, run: str) -> None:
    other = enter(platform, ticket(platform, **OTHER))
    assert "No runs yet" in get(platform.url, other).text
    for path in ("", "/table", "/rows/0", "/rows/0/raw", "/figures"):
        assert get(run + path, other).status == 404
    both = enter(platform, ticket(platform), other)
    assert get(run, both).status == 200


def test_a_second_user_s_ticket_does_not_take_over_what_the_first_one_opened(platform: Platform, run: str) -> None:
    mine = enter(platform, ticket(platform))
    _, token = platform.accounts.create_token("grace", "test")
    assert get(run, enter(platform, ticket(platform, token, **OTHER), mine)).status == 404


def test_a_revoked_token_closes_its_pages(platform: Platform, run: str) -> None:
    token_id, token = platform.accounts.create_token("eve", "test")
    late, cookie = ticket(platform, token), enter(platform, ticket(platform, token))
    assert get(run, cookie).status == 200
    platform.accounts.revoke(token_id)
    assert get(run, cookie).status == 403
    assert get(f"{platform.url}/?token={late}").status == 403


def test_without_a_cookie_there_is_a_hint_and_nothing_else(platform: Platform, run: str) -> None:
    given = ticket(platform)
    cookie = enter(platform, given)
    name = cookie.partition("=")[0]
    # Neither is a ticket a cookie nor a cookie a ticket, nor a token of the API one of them.
    for wrong in ("", f"{name}=", f"{name}=x", f"{name}={given}", f"{name}={platform.token}", cookie[:-2]):
        answer = get(run, wrong)
        assert answer.status == 403, wrong
        assert "osmosis platform open" in answer.text
    for wrong in ("", "x", cookie.partition("=")[2], platform.token):
        assert get(f"{run}?token={wrong}").status == 403, wrong
    assert platform.ask("GET", "/api/cli/eval-runs", headers={"Authorization": "", "Cookie": cookie}).status == 401


def test_other_sites_and_other_names_of_the_server_are_refused(platform: Platform, run: str) -> None:
    cookie = enter(platform, ticket(platform))
    assert get(run, cookie, Host="evil.example").status == 421
    assert get(run, cookie, Sec_Fetch_Site="cross-site").status == 403
    assert get(run, cookie, Origin="https://evil.example").status == 403
    assert get(run, cookie, method="POST").status == 403
    assert get(run, cookie, Sec_Fetch_Site="same-origin").status == 200


def test_no_path_leads_out_of_the_stores(platform: Platform, run: str) -> None:
    cookie = enter(platform, ticket(platform))
    for path in ("/../platform.db", "/static/../../key", "/runs/..%2f..%2fkey/x", "/static/%2e%2e%2fapp.py"):
        answer = get(platform.url + path, cookie)
        assert answer.status in (404, 403), path
        assert not re.search(r"[A-Za-z0-9_-]{43}=", answer.text)
