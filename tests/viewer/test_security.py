"""Who may see the viewer's pages, and what a page may do."""

from __future__ import annotations

from pathlib import Path

import pytest
from viewed import ADDRESS, PORT, TOKEN, made, viewer, write_run

from osmosis_ai.store.queries import Queries

COOKIE = f"osmosis-view-{PORT}"


def test_the_token_of_the_url_becomes_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    with viewer(tmp_path, cookie=False) as client:
        answer = client.get(f"/?q=a%26b&token={TOKEN}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/?q=a%26b")
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}={TOKEN};")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert client.get(answer.headers["location"]).status_code == 200


def test_a_file_that_opens_the_browser_leads_to_a_page_of_this_site(tmp_path: Path) -> None:
    # A strict cookie isn't sent after a redirect that began on another site.
    with viewer(tmp_path, cookie=False) as client:
        answer = client.get(f"/runs/x/y?token={TOKEN}&q=%22%3E%3Cb", headers={"sec-fetch-site": "cross-site"})
        assert answer.status_code == 200
        assert "set-cookie" in answer.headers
        assert '<meta http-equiv="refresh" content="0; url=/runs/x/y?q=%22%3E%3Cb">' in answer.text


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "/%2F/evil.example/"])
def test_the_token_leads_to_no_other_host(tmp_path: Path, path: str) -> None:
    with viewer(tmp_path, cookie=False) as client:
        location = client.get(f"{ADDRESS}{path}?token={TOKEN}").headers["location"]
        assert location.startswith("/")
        assert location[1:2] not in ("/", "\\")


@pytest.mark.parametrize(
    "path", ["/", "/runs/a/b", "/training/a/b", "/live", "/static/view.js", "/none", "/runs/a/b/rows/0/raw"]
)
def test_without_the_token_nothing_is_shown(tmp_path: Path, path: str) -> None:
    with viewer(tmp_path, cookie=False) as client:
        for url, headers in (
            (path, {}),
            (f"{path}?token=", {}),
            (f"{path}?token=wrong", {}),
            (f"{path}?token=ä", {}),
            (path, {"cookie": f"{COOKIE}=wrong"}),
            (path, {"cookie": f"other={TOKEN}"}),
        ):
            answer = client.get(url, headers=headers)
            assert answer.status_code == 403
            assert "osmosis" in answer.text or "printed" in answer.text


@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{PORT}", "",
     f"192.168.0.1:{PORT}", f"127.0.0.1@evil.example:{PORT}", f"localhost:{PORT}/x", "[::1", f"localhost:{PORT}x"],
)  # fmt: skip
def test_names_of_other_servers_are_refused(tmp_path: Path, host: str) -> None:
    with viewer(tmp_path) as client:
        assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", [f"127.0.0.1:{PORT}", f"localhost:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"])
def test_names_of_this_machine_are_accepted(tmp_path: Path, host: str) -> None:
    with viewer(tmp_path) as client:
        assert client.get("/", headers={"host": host}).status_code == 200


def test_a_remote_viewer_is_reached_by_address_and_by_its_own_name_only(tmp_path: Path) -> None:
    with viewer(tmp_path, host="view.example") as client:
        for host, status in (("view.example", 200), ("192.168.0.1", 200), ("evil.example", 421)):
            assert client.get("/", headers={"host": f"{host}:{PORT}"}).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": ADDRESS}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_requests_from_other_sites_are_refused(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    with viewer(tmp_path) as client:
        assert client.get("/", headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_pages_are_only_read(tmp_path: Path, method: str) -> None:
    with viewer(tmp_path) as client:
        assert client.request(method, "/", headers={"origin": ADDRESS}).status_code == 405
        assert client.request(method, f"/?token={TOKEN}").status_code == 403


@pytest.mark.parametrize(
    ("cookie", "headers", "status"),
    [
        (True, {"origin": ADDRESS}, 303),
        (True, {"origin": ADDRESS, "sec-fetch-site": "same-origin"}, 303),
        (False, {"origin": ADDRESS, "sec-fetch-site": "same-origin"}, 403),
        (True, {}, 403),
        (True, {"origin": "null"}, 403),
        (True, {"origin": "https://evil.example"}, 403),
        (True, {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"}, 403),
        (True, {"origin": ADDRESS, "sec-fetch-site": "cross-site"}, 403),
        (True, {"origin": ADDRESS, "host": f"evil.example:{PORT}"}, 421),
    ],
)
def test_only_a_page_of_the_viewer_gives_verdicts(
    tmp_path: Path, cookie: bool, headers: dict[str, str], status: int
) -> None:
    run = write_run(tmp_path, [made(0)])
    with viewer(tmp_path, cookie=cookie) as client:
        url = f"/runs/{tmp_path.name}/{run}/rows/0/verdict"
        assert client.post(url, data={"rollout": "r0.0", "verdict": "1"}, headers=headers).status_code == status
        # The token in a URL authorizes no writing either.
        assert client.post(f"{url}?token={TOKEN}", data={"rollout": "r0.0", "verdict": "1"}).status_code == 403
    (found,) = Queries(tmp_path / ".osmosis" / "runs.db").scored(run)
    assert (found.verdict is not None) == (status == 303)


@pytest.mark.parametrize("path", ["/", "/none", "/static/view.css", "/static/none", "/?token=wrong"])
def test_every_answer_forbids_what_no_page_needs(tmp_path: Path, path: str) -> None:
    with viewer(tmp_path) as client:
        headers = client.get(path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data:"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store"


def test_a_proxy_s_address_is_known_if_it_was_named(tmp_path: Path) -> None:
    with viewer(tmp_path, addresses=["runs.example.com"]) as client:
        assert client.get("/", headers={"host": "runs.example.com"}).status_code == 200
        assert client.get("/", headers={"host": "runs.example.com:81"}).status_code == 421
        cookie = client.get(f"https://runs.example.com/?token={TOKEN}").headers["set-cookie"]
        assert "Secure" in cookie
