"""The traceback of an error is found in a server's output by the error's text; a missing module by its own error."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.runtime.worker.workflows.raised import find_missing, find_raised

ROOT = Path("/somewhere/space")
FOLDER = ROOT / "rollouts" / "raw"


def output(error: str, number: int = 7, file: str = "main.py") -> list[str]:
    return [
        "2026-03-01 ERROR osmosis_ai.rollout: Traceback (most recent call last):",
        f'  File "{FOLDER}/{file}", line {number}, in run',
        "    await answer()",
        f'  File "{FOLDER}/.venv/lib/python3.12/site-packages/httpx/client.py", line 99, in send',
        "    raise error",
        error,
        "",
    ]


def test_the_latest_traceback_of_this_error_is_found() -> None:
    lines = [*output("ValueError: odd", 3), *output("httpx.HTTPError: gone", 5), *output("ValueError: odd", 9), "more"]
    found = find_raised(lines, "odd", FOLDER, ROOT)
    assert found is not None
    assert (found.file, found.line, found.type) == ("rollouts/raw/main.py", 9, "ValueError")
    assert found.detail.splitlines()[0] == "Traceback (most recent call last):"
    assert found.detail.splitlines()[-1] == "ValueError: odd"


def test_an_error_of_several_lines_is_found_by_its_first() -> None:
    lines = [*output("ValueError: odd")[:-1], "second line"]
    assert find_raised(lines, "odd\nsecond line", FOLDER, ROOT) is not None


def test_a_missing_traceback_is_not_found() -> None:
    assert find_raised(output("ValueError: odd"), "even", FOLDER, ROOT) is None
    assert find_raised(output("ValueError: odd"), "", FOLDER, ROOT) is None
    assert find_raised(["ValueError: odd"], "odd", FOLDER, ROOT) is None
    assert find_raised(output("ValueError: odd"), "odd", ROOT / "rollouts" / "other", ROOT) is None


@pytest.mark.parametrize(
    ("said", "own", "declared"),
    [
        ("No module named 'strands'", "-m pip install 'strands'", "add strands to `dependencies`"),
        ("No module named 'a.b'", "-m pip install 'a'", "add a to `dependencies`"),
        ("x isn't installed: pip install 'osmosis-ai[strands]'", "'osmosis-ai[strands]'", "add osmosis-ai[strands] to"),
        ('Install them with `pip install "osmosis-ai[server]"`.', "'osmosis-ai[server]'", "add osmosis-ai[server] to"),
    ],
)
def test_a_missing_module_is_named_with_what_installs_it(said: str, own: str, declared: str) -> None:
    lines = ["Traceback (most recent call last):", "ModuleNotFoundError: No module named 'first'", *output("E: x")]
    lines.append(f"ModuleNotFoundError: {said}")
    assert own in str(find_missing(lines, FOLDER, own_sdk=True))
    advice = str(find_missing(lines, FOLDER, own_sdk=False))
    assert declared in advice
    assert advice.endswith("rollouts/raw/pyproject.toml")


def test_an_end_for_another_reason_names_no_module() -> None:
    assert find_missing(output("ImportError: cannot import name 'x'"), FOLDER, own_sdk=True) is None
