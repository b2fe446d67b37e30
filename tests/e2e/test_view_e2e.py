"""`osmosis view` and `--view`: a real server, asked over HTTP like by a browser."""

from __future__ import annotations

import http.cookiejar
import json
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from commands import Osmosis
from osmosis_ai.cli.view import open_browser
from osmosis_ai.testing import Gate, Reply, Request, ScriptedEndpoint, text
from running import running


class Browser:
    """Keeps cookies and follows redirects."""

    def __init__(self) -> None:
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        # Another handler would send requests to the proxy that the environment names.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), jar)

    def get(self, url: str) -> tuple[str, str]:
        """Return the address that a page has in the end, and its text."""
        with self._opener.open(url, timeout=30) as answer:
            return answer.url, answer.read().decode()

    def first_event(self, url: str) -> list[str]:
        with self._opener.open(url, timeout=30) as answer:
            lines = (line.decode().rstrip() for line in answer)
            return [line for line, _ in zip(lines, range(5), strict=False)]


def test_a_run_is_shown_until_ctrl_c(osmosis: Osmosis, repo: Path) -> None:
    osmosis("test", "--model", "offline/oracle", "--quiet", cwd=repo)
    with running("view", "latest", "--no-open", "--json", cwd=repo) as command:
        command.until(lambda: command.printed().endswith("\n"))
        url = json.loads(command.printed())["url"]
        browser = Browser()
        final, shown = browser.get(url)
        assert "token" not in final
        assert urlsplit(final).path == "/runs/repo/latest"
        assert "offline/oracle" in shown
        assert "rewards:exact" in shown
        events = browser.first_event(f"{final.partition('/runs')[0]}/live")
        assert events[2:4] == [f"id: {_version(shown)}", "event: change"]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            Browser().get(final)
        command.interrupt()
        assert command.wait().code == 130
    assert [path.name for path in (repo / ".osmosis").iterdir() if path.name.startswith("view-")] == []


@pytest.mark.in_process
def test_a_viewer_beside_a_run_shows_it_as_it_goes_on_and_ends_with_it(repo: Path) -> None:
    gate = Gate()

    def answer(request: Request) -> Reply:
        # The probe has no tools; the first row's rollout ends, the others wait.
        waits = "1 + 2" not in request.messages[-1]["content"] and request.messages[0]["role"] == "system"
        return text("3").after(gate) if waits else text("3")

    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        base = ["--model", "m", "--base-url", endpoint.url, "--workers", "1", "--view"]
        with running("eval", *base, cwd=repo) as command:
            command.until(lambda: "the viewer is at http" in command.said())
            url = command.said().partition("the viewer is at ")[2].split()[0]
            browser = Browser()
            page, shown = browser.get(url)
            command.until(lambda: "1 of 3" in browser.get(page)[1])
            assert 'class="status running"' in shown
            gate.open()
            finished = command.wait()
    assert finished.code == 0, finished.stderr
    with pytest.raises(urllib.error.URLError):
        browser.get(page)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "add --allow-remote"),
        (["--root", "nowhere"], "there is no such folder"),
        (["--root", ".", "--root", "..", "--store", "x"], "several --root"),
        (["none"], "there is no run 'none'"),
        (["--port", "1", "--host", "127.0.0.1", "--host", "no.such.host.example"], "add --allow-remote"),
    ],
)
def test_what_can_t_be_shown_is_said(osmosis: Osmosis, repo: Path, options: list[str], message: str) -> None:
    osmosis("test", "--model", "offline/oracle", "--quiet", cwd=repo)
    finished = osmosis("view", "--no-open", *options, cwd=repo)
    assert finished.code == 2
    assert message in finished.stderr


def test_the_token_isn_t_an_argument_of_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}.new && mv {seen}.new {seen}\n', encoding="utf-8")
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", str(browser))
    open_browser("http://127.0.0.1:1/?token=secret", tmp_path)
    argument = seen.read_text(encoding="utf-8").strip()
    assert "secret" not in argument
    file = Path(urlsplit(argument).path)
    assert file.stat().st_mode & 0o777 == 0o600
    assert 'url=http://127.0.0.1:1/?token=secret"' in file.read_text(encoding="utf-8")


def _version(text: str) -> str:
    return text.partition('data-live="')[2].partition('"')[0]
