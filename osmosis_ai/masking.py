"""Keep the key values a process knows out of everything it writes: store, logs, errors, results."""

from __future__ import annotations

import base64
import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args
from urllib.parse import quote, quote_plus, unquote

import msgspec

from osmosis_ai import records
from osmosis_ai.wire_json import decode_json

__all__ = ["MASK", "MIN_LENGTH", "VARIABLE", "Masker", "mask", "without_secrets"]

MASK = "[masked]"
MIN_LENGTH = 6
"""Shorter values (`1`, `true`) aren't secrets, and masking them would garble the text."""

VARIABLE = "OSMOSIS_MASK"
"""The variable that names further variables to mask, separated by commas; `*` stands for any characters."""

# Words of a name, with any number, version or purpose after them: OPENAI_KEY_2, HF_TOKEN_READ.
_SECRET_NAME = re.compile(
    r"(_KEYS?|^KEYS?|(API|ACCESS|SECRET|PRIVATE)KEYS?|TOKEN|(API|AUTH|ACCESS|BEARER)_TOKENS|SECRETS?|PASSWORDS?|PASSWD|"
    r"PASSPHRASE|(^|_)PASS|_PWD|(^|_)PATS?|(^|_)CREDENTIALS?|(^|_)CREDS|(^|_)JWT|(^|_)WEBHOOKS?|(^|_)COOKIES?)(?![A-Z])",
    re.IGNORECASE,
)
_NO_SECRET_NAME = re.compile(r"_(FILE|PATH|DIR|FOLDER|NAME|PREFIX|SOCK|COUNT|LIMIT|LENGTH|TTL)$", re.IGNORECASE)
_NUMBER = re.compile(r"[-+.,\d]{,9}")
_SEPARATOR = re.compile(r"[\s,;]+")
_URL_PASSWORD = re.compile(r"[A-Za-z][\w+.-]*://[^\s/?#:@]*:([^\s/?#]+)@")
_URL_SECRET = re.compile(r"[?&](?:[\w-]*(?:key|token|secret|password|sig|signature))=([^&#\s]+)", re.IGNORECASE)
_ESCAPE_OR_QUOTE = re.compile(rb'\\.|"')


def _format_words() -> str:
    words = [MASK, "assistant system function tool_calls tool_call_id reasoning_content description parameters"]
    words += [*get_args(records.Origin), *get_args(records.FinishReason)]
    for record in vars(records).values():
        if isinstance(record, type) and issubclass(record, records.Record):
            words += [field.name for field in msgspec.structs.fields(record)]
    return " ".join(words)


_FORMAT_WORDS = _format_words()


class Masker:
    """Replaces known key values with `[masked]`, in text and in encoded JSON.

    It finds a value itself and its JSON-escaped, URL-quoted and base64 forms. It also finds each line of a multi-line
    value, because logs are written line by line. Where one value contains another, it replaces the longer one as a
    whole. It skips values shorter than `MIN_LENGTH` characters, and values that are part of a word of the stored format
    (`timeout`, `assistant`): these aren't secrets, and masking them would make records unreadable.
    """

    __slots__ = ("_count", "_encoded_needles", "_needles", "_pattern")

    def __init__(self, values: Iterable[str] = ()) -> None:
        secrets = {part for value in values for part in _parts(value)}
        secrets = {secret for secret in secrets if len(secret) >= MIN_LENGTH and secret not in _FORMAT_WORDS}
        forms = {form for secret in secrets for form in _forms(secret)}
        escaped = {text for form in forms for text in _json_forms(form)}
        self._count = len(secrets)
        # Searching for each form by itself is several times faster than one pattern of alternatives, so the pattern
        # runs only on texts known to hold a form.
        self._needles = sorted(forms)
        self._encoded_needles = sorted(text.encode("utf-8", "surrogatepass") for text in escaped)
        self._pattern = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], explicit: Iterable[str] = ()) -> Masker:
        """Mask `explicit` values and the secrets of an environment.

        These are the values of variables whose names say that they hold a key (`docs/cli.md` lists the words) or
        that `OSMOSIS_MASK` names, and the passwords and keys in any variable's URLs.
        """
        patterns = _patterns(environ)
        found = (secret for name, value in environ.items() for secret in _secrets_of(name, value, patterns))
        return cls([*found, *explicit])

    def __repr__(self) -> str:
        return f"Masker({self._count} values)"

    def text(self, text: str) -> str:
        """Replace every known value in a text."""
        if any(needle in text for needle in self._needles):
            return self._pattern.sub(MASK, text)
        return text

    def encoded(self, data: bytes) -> bytes:
        """Replace every known value in the strings of encoded JSON, object keys included.

        Other tokens stay as they are, so the result is valid JSON whatever the values look like. Without a hit, return
        the same object.
        """
        if not any(needle in data for needle in self._encoded_needles):
            return data
        parts: list[bytes] = []
        done = 0
        for start, end in _strings(data):
            text: str = json.loads(data[start:end])
            masked = self.text(text)
            if masked is not text:
                parts += (data[done:start], msgspec.json.encode(masked))
                done = end
        parts.append(data[done:])
        return b"".join(parts)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables whose values `Masker.from_environment` masks."""
    patterns = _patterns(environ)
    return {name: value for name, value in environ.items() if not any(_secrets_of(name, value, patterns))}


def mask(text: str, key: str | None) -> str:
    """Replace the key in a text for people; as in `Masker`, one shorter than `MIN_LENGTH` stays."""
    return text.replace(key, "***") if key and len(key) >= MIN_LENGTH else text


def _patterns(environ: Mapping[str, str]) -> list[str]:
    return [pattern for pattern in environ.get(VARIABLE, "").replace(" ", "").split(",") if pattern]


def _secrets_of(name: str, value: str, patterns: Iterable[str]) -> Iterator[str]:
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        yield value
    elif _SECRET_NAME.search(name) and not _NO_SECRET_NAME.search(name) and not _NUMBER.fullmatch(value):
        yield value
        # Several keys in one variable: a list, or the text of a JSON file.
        yield from _SEPARATOR.split(value)
        yield from _strings_in(value)
    for pattern in (_URL_PASSWORD, _URL_SECRET):
        for found in pattern.findall(value):
            yield from (found, unquote(found))


def _strings_in(value: str) -> Iterator[str]:
    """Yield the secret strings of a JSON object such as a cloud provider's credentials."""
    if not value.lstrip().startswith("{"):
        return
    try:
        decoded = decode_json(value)
    except ValueError:
        return
    for name, one in decoded.items():
        if isinstance(one, str) and _SECRET_NAME.search(name):
            yield one


def _parts(value: str) -> Iterator[str]:
    value = value.strip()
    yield value
    if "\n" in value:
        # A PEM file's header lines are the same for everyone.
        yield from (line for line in map(str.strip, value.splitlines()) if not line.startswith("-----"))


def _forms(secret: str) -> Iterator[str]:
    yield repr(secret)[1:-1]
    for escaped in _json_forms(secret):
        yield from _json_forms(escaped)  # twice: a tool call's arguments are JSON text inside JSON
    raw = secret.encode("utf-8", "surrogateescape" if secret.isprintable() else "surrogatepass")
    yield from (quote(raw), quote(raw, safe=""), quote_plus(raw))
    for shift in range(3):
        # In base64 a value looks different at each of three offsets. The characters shared with its neighbors are cut.
        encoded = base64.b64encode(b"\0" * shift + raw).rstrip(b"=")
        core = encoded[(shift * 8 + 5) // 6 : (shift + len(raw)) * 8 // 6].decode("ascii")
        if len(core) >= MIN_LENGTH:
            yield from (core, core.replace("+", "-").replace("/", "_"))


def _json_forms(text: str) -> set[str]:
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def _strings(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of every string in a JSON document, quotes included."""
    opened = -1
    for token in _ESCAPE_OR_QUOTE.finditer(data):
        if token[0] != b'"':
            continue
        if opened < 0:
            opened = token.start()
        else:
            yield opened, token.end()
            opened = -1
