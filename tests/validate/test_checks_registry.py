"""Every code is documented with its severity, cause and remedy, and every documented code exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import osmosis_ai
from osmosis_ai.validate import CODES, Finding, finding
from osmosis_ai.validate.check import Check, Subject, run_check
from osmosis_ai.validate.registry import CHECKS, CONTROLS, FIRST, LOADING, ROLLOUTS, SOLUTIONS

ROOT = Path(osmosis_ai.__file__).parents[1]
PACKAGE = ROOT / "osmosis_ai"
ROW = re.compile(r"^\| (OSM\d{3}) \| (error|warning|note) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_the_document_has_every_code_once_with_cause_and_remedy() -> None:
    rows = ROW.findall((ROOT / "docs" / "checks.md").read_text(encoding="utf-8"))
    assert [code for code, *_ in rows] == list(CODES)
    for code, severity, cause, remedy in rows:
        assert severity == CODES[code].severity, code
        assert cause.strip(), code
        assert remedy.strip(), code


def test_every_code_is_registered_for_a_check_and_no_other_is() -> None:
    others = LOADING, CONTROLS, SOLUTIONS, ROLLOUTS
    registered = " ".join([*(check.codes for check in (*FIRST, *CHECKS)), *others]).split()
    assert set(registered) == set(CODES)


def test_every_code_is_used_and_no_other_is() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "findings.py":
            used |= set(re.findall(r'"(OSM\d{3})"', path.read_text(encoding="utf-8")))
    assert used == set(CODES)


def test_a_check_that_fails_or_gives_another_code_costs_only_itself(tmp_path: Path) -> None:
    def broken(subject: Subject) -> Iterator[Finding]:
        yield finding("OSM601", "given")
        yield finding("OSM602", "not registered")

    subject = Subject(tmp_path, {}, tmp_path / "test_data.jsonl")
    found = list(run_check(Check("example", "OSM601", broken), subject))
    assert [one.code for one in found] == ["OSM601", "OSM009"]
    assert "OSM602 isn't registered" in found[1].message


def test_a_finding_has_every_field_when_it_is_encoded() -> None:
    import msgspec

    encoded = msgspec.to_builtins(finding("OSM003", "nothing here"))
    assert encoded == {
        "code": "OSM003",
        "severity": "error",
        "file": None,
        "line": None,
        "subject": None,
        "message": "nothing here",
        "hint": "",
    }
