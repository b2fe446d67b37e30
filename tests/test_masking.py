"""Keys are masked wherever they appear, and nothing else is."""

from __future__ import annotations

import base64
import json
import re
from urllib.parse import quote, quote_plus, urlencode

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from osmosis_ai.masking import MASK, MIN_LENGTH, Masker
from osmosis_ai.records import Failure, Rollout

KEY = "sk-proj-4fK/9+x=Zq"
AWKWARD = 'p"a\\ss é\n\twörd'


@pytest.mark.parametrize(
    "name",
    [
        *(
            "OPENAI_API_KEY",
            "HF_TOKEN",
            "CLIENT_SECRET",
            "PGPASSWORD",
            "db_password",
            "AWS_SECRET_ACCESS_KEY",
            "MY_KEY",
        ),
        *("GITHUB_PAT", "AWS_CREDENTIALS", "OPENAI_KEY_2", "STRIPE_KEYS", "HF_TOKEN_READ", "MYAPP_APIKEY_V2", "PASS"),
        *("ADMIN_PASS", "JWT", "SLACK_WEBHOOK_URL", "MYSQL_PWD", "SESSION_COOKIE", "API_TOKENS", "AWS_ACCESS_KEY_ID"),
        "MY_KEY",
    ],
)
def test_variables_that_hold_a_key_are_known_by_name(name: str) -> None:
    assert Masker.from_environment({name: KEY}).text(f"<{KEY}>") == f"<{MASK}>"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PATH",
            "HOME",
            "MAX_TOKENS",
            "TOKENIZERS_PARALLELISM",
            "OSMOSIS_MODEL",
            "KEYBOARD",
            "PWD",
            "OLDPWD",
            "MONKEY",
        ),
        *("SSH_KEY_PATH", "PRIVATE_KEY_FILE", "COMPASS_URL", "PATTERN", "PASSENGER", "SECRETARY", "KEYMAP", "MONKEY"),
    ],
)
def test_other_variables_are_not_masked(name: str) -> None:
    masker = Masker.from_environment({name: "some-ordinary-value"})
    assert masker.text("some-ordinary-value") == "some-ordinary-value"


@pytest.mark.parametrize(
    ("environ", "text", "masked"),
    [
        ({"DATABASE_URL": "postgres://me:s3cr%2Ft@db/x"}, "s3cr%2Ft s3cr/t @db/x", f"{MASK} {MASK} @db/x"),
        ({"CALLBACK": "https://h/in?api_key=abcdef1&n=1"}, "n=1 abcdef1", f"n=1 {MASK}"),
        ({"STRIPE_KEYS": "sk_live_1, sk_live_2"}, "sk_live_2", MASK),
        ({"GCP_CREDENTIALS": '{"type": "account", "private_key": "abc-def"}'}, "account abc-def", f"account {MASK}"),
        (
            {"OSMOSIS_MASK": "BANK_*, PIN", "BANK_NO": "DE00 1111", "PIN": "123456"},
            "123456 DE00 1111",
            f"{MASK} {MASK}",
        ),
        ({"OSMOSIS_PASS_THRESHOLD": "0.75000", "RETRY_TOKEN": "100000"}, "0.75000 100000", "0.75000 100000"),
        ({"MY_KEY": "a\\b\"c'd"}, repr("a\\b\"c'd"), f"'{MASK}'"),
    ],
)
def test_secrets_are_found_in_lists_urls_and_json(environ: dict[str, str], text: str, masked: str) -> None:
    assert Masker.from_environment(environ).text(text) == masked


def test_explicit_values_are_masked_too() -> None:
    masker = Masker.from_environment({"HF_TOKEN": "hf_abcdef"}, ["given-by-option"])
    assert masker.text("hf_abcdef given-by-option rest") == f"{MASK} {MASK} rest"


@pytest.mark.parametrize("key", [KEY, AWKWARD])
@pytest.mark.parametrize(
    "form",
    [
        str,
        json.dumps,
        lambda key: json.dumps(key, ensure_ascii=False),
        lambda key: json.dumps(json.dumps({"key": key})),
        quote,
        lambda key: quote(key, safe=""),
        quote_plus,
        lambda key: urlencode({"api_key": key, "q": 1}),
    ],
)
def test_escaped_and_quoted_forms_are_masked(key: str, form) -> None:
    masker = Masker([key])
    masked = masker.text(f"before {form(key)} after")
    assert MASK in masked
    assert re.fullmatch(r'before [\\"{}a-z_:= ]*\[masked\][&q=1\\"{}]* after', masked)
    encoded = masker.encoded(json.dumps({"text": form(key)}).encode())
    assert json.loads(encoded)["text"] == masked.removeprefix("before ").removesuffix(" after")


@given(key=st.text("abcXYZ019+/-_", min_size=MIN_LENGTH, max_size=40), user=st.text("abc", max_size=7))
def test_base64_is_masked_at_every_offset(key: str, user: str) -> None:
    header = base64.b64encode(f"{user}:{key}".encode()).decode()
    masked = Masker([key]).text(header)
    assert MASK in masked
    # At most the characters that the value shares with its neighbours remain.
    assert len(masked.replace(MASK, "")) <= len(base64.b64encode(f"{user}:".encode())) + 4


def test_the_longest_value_wins() -> None:
    masker = Masker(["secret", "secret-and-more"])
    assert masker.text("secret-and-more secret") == f"{MASK} {MASK}"


@pytest.mark.parametrize("value", ["", "1", "true", "     1    "])
def test_trivial_values_are_not_masked(value: str) -> None:
    assert Masker([value]).text("11111 true 1") == "11111 true 1"


@pytest.mark.parametrize("value", ["timeout", "assistant", "messages", "tokens"])
def test_words_of_the_format_itself_are_not_masked(value: str) -> None:
    rollout = Rollout("r", 0, "row", 0, "policy", [{"role": "assistant"}], "timeout", 1.0, Failure("timeout", "late"))
    encoded = msgspec.json.encode(rollout)
    assert Masker([value]).encoded(encoded) == encoded


def test_lines_of_a_long_key_are_masked_one_by_one() -> None:
    pem = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END PRIVATE KEY-----\n"
    assert Masker([pem]).text("log: hkiG9w0BAQEFAASC") == f"log: {MASK}"
    assert "-----BEGIN" in Masker([pem]).text("-----BEGIN PRIVATE KEY-----")


def test_without_a_hit_the_same_object_comes_back() -> None:
    text, data = "x" * 50, b'{"a":"' + b"x" * 50 + b'"}'
    for masker in (Masker(), Masker([KEY])):
        assert masker.text(text) is text
        assert masker.encoded(data) is data


@pytest.mark.parametrize(
    ("key", "document", "expected"),
    [
        ("123456", {"tokens": 1234567, "text": "pin 123456"}, {"tokens": 1234567, "text": f"pin {MASK}"}),
        ("n12345", {"text": "line\n12345"}, {"text": "line\n12345"}),
        ("u00e9x", {"text": "éx u00e9x"}, {"text": f"éx {MASK}"}),
        (KEY, {KEY: [1, {"deep": KEY}]}, {MASK: [1, {"deep": MASK}]}),
        ('","b":"', {"a": "x", "b": "y"}, {"a": "x", "b": "y"}),
        ("\\\\\\\\\\\\", {"a": "\\" * 6, "b": '\\"'}, {"a": MASK, "b": '\\"'}),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_encoded_json_stays_json_and_loses_nothing_else(key: str, document, expected, ascii_only: bool) -> None:
    masked = Masker([key]).encoded(json.dumps(document, ensure_ascii=ascii_only).encode())
    assert json.loads(masked) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(key=st.text(min_size=MIN_LENGTH, max_size=20), value=json_values, around=st.text(max_size=10))
def test_any_key_vanishes_from_any_json(key: str, value: object, around: str) -> None:
    assume(len(key.strip()) >= MIN_LENGTH)
    masker = Masker([key])
    assume(masker.text(key) != key)
    key = key.strip()
    for encoded in (
        msgspec.json.encode([value, around + key + around, {key: key}]),
        json.dumps([value, around + key + around, {key: key}]).encode(),
    ):
        first, text, mapping = json.loads(masker.encoded(encoded))
        assert key not in text
        assert mapping == {MASK: MASK}
        if key not in json.dumps(value, ensure_ascii=False) and masker.encoded(msgspec.json.encode(value)) == (
            msgspec.json.encode(value)
        ):
            assert first == value


def test_a_masker_never_shows_what_it_knows() -> None:
    assert KEY not in repr(Masker([KEY]))
