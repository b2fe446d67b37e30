"""The registry of failure kinds: complete, documented, and tolerant of kinds stored by another version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec

import osmosis_ai
from osmosis_ai.errors import ModelError
from osmosis_ai.failures import FAILURE_KINDS, FailureKind
from osmosis_ai.records import Failure

DOCUMENT = Path(osmosis_ai.__file__).parents[1] / "docs" / "results.md"
ROW = re.compile(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \| (.+) \|$", re.MULTILINE)


def test_every_kind_is_in_the_table() -> None:
    assert sorted(FAILURE_KINDS) == sorted(get_args(FailureKind))


def test_the_document_lists_every_kind_with_its_origins_and_cause() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Kinds of failure")[2]
    rows = {kind: (tuple(re.findall(r"\w+", origins)), cause) for kind, origins, cause in ROW.findall(section)}
    assert rows == {name: (kind.origins, kind.cause) for name, kind in FAILURE_KINDS.items()}


def test_what_may_succeed_later_is_retryable() -> None:
    assert ModelError("busy", kind="overloaded").retryable
    assert not ModelError("no such key", kind="auth").retryable


def test_a_kind_of_another_version_is_still_decoded() -> None:
    stored = msgspec.json.encode(Failure("model", "it broke", "exception")).replace(b"exception", b"of_old")
    assert msgspec.json.decode(stored, type=Failure).kind == "of_old"
