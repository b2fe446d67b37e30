"""URLs: valid ones, and how they are shown."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from osmosis_ai.urls import UrlError, http_url, redact_urls, show_url


@pytest.mark.parametrize("text", ["http://localhost:8000/v1", "HTTPS://[::1]:80/", "http://gpu_7", "http://a/b?c=d#e"])
def test_an_http_url_is_parsed(text: str) -> None:
    assert http_url(text).scheme in ("http", "https")


@pytest.mark.parametrize(
    ("text", "bare", "problem"),
    [
        ("", False, "malformed"),
        ("localhost:8000/v1", False, "malformed"),
        ("http://", False, "malformed"),
        ("http:///v1", False, "malformed"),
        ("http://host:port/v1", False, "malformed"),
        ("http://host:0", False, "malformed"),
        ("http://host:99999", False, "malformed"),
        ("http://[::1", False, "malformed"),
        ("http://a b", False, "malformed"),
        ("http://a\x7f", False, "malformed"),
        ("ftp://host/v1", False, "scheme"),
        ("ftp://user:secret@host", True, "credentials"),
        ("http://user:secret@ho st", True, "credentials"),
        ("http://host/v1?key=secret", True, "query"),
        ("http://host/v1#", True, "query"),
    ],
)
def test_what_is_wrong_is_named_without_the_text(text: str, bare: bool, problem: str) -> None:
    with pytest.raises(UrlError) as caught:
        http_url(text, bare=bare)
    assert caught.value.problem == problem
    assert "secret" not in str(caught.value)


@given(st.text() | st.builds("{}://{}".format, st.sampled_from(["http", "https", "x"]), st.text()))
@example("http://\u2100")
@example("http://\ud800")
def test_any_text_is_a_url_or_an_error(text: str) -> None:
    try:
        url = http_url(text)
    except UrlError:
        return
    assert url.raw_host


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://localhost:8000/mcp", "http://localhost:8000/mcp"),
        ("http://host/@scope/mcp", "http://host/@scope/mcp"),
        ("http://host:80/@scope/mcp", "http://host:80/@scope/mcp"),
        ("http://u:p@q@host/mcp", "http://host/mcp"),
        ("http://[::1]:80/@scope", "http://[::1]:80/@scope"),
    ],
)
def test_show_url(url: str, shown: str) -> None:
    assert show_url(url) == shown


def test_urls_in_a_text_are_shown_without_secrets() -> None:
    text = "no reply from 'http://u:p@host:1/mcp?key=1' (see https://docs/errors#1, or http://plain)"
    assert redact_urls(text) == "no reply from 'http://host:1/mcp' (see https://docs/errors or http://plain)"
