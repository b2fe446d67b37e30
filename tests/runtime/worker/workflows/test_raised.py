"""The traceback of an error is found in a server's output by the error's text."""

from __future__ import annotations

from pathlib import Path

from osmosis_ai.runtime.worker.workflows.raised import find_raised

ROOT = Path("/work/space")
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
    assert (found.file, found.line) == ("rollouts/raw/main.py", 9)
    assert found.detail.splitlines()[0] == "Traceback (most recent call last):"
    assert found.detail.splitlines()[-1] == "ValueError: odd"


def test_an_error_of_several_lines_is_found_by_its_first() -> None:
    lines = [*output("ValueError: odd")[:-1], "second line"]
    assert find_raised(lines, "odd\nsecond line", FOLDER, ROOT) is not None


def test_what_is_not_there_is_not_found() -> None:
    assert find_raised(output("ValueError: odd"), "even", FOLDER, ROOT) is None
    assert find_raised(output("ValueError: odd"), "", FOLDER, ROOT) is None
    assert find_raised(["ValueError: odd"], "odd", FOLDER, ROOT) is None
    assert find_raised(output("ValueError: odd"), "odd", ROOT / "rollouts" / "other", ROOT) is None
