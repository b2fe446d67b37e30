"""`osmosis view --html`: a run as one page, which needs nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_pages import BROKEN, Elements
from viewed import HOSTILE, hostile_run, made, write_run

from commands import Finished, Osmosis
from osmosis_ai.viewer import report


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    write_run(root, [made(index, score=1.0) for index in range(5)])
    write_run(root, [made(0), made(1, score=0.0), made(2, score=None), made(3, failure=BROKEN), made(4)])
    return root


def written(osmosis: Osmosis, root: Path, *options: str) -> tuple[Finished, Elements]:
    finished = osmosis("view", "--html", "page.html", *options, cwd=root)
    assert finished.code == 0, finished.stderr
    return finished, Elements((root / "page.html").read_text(encoding="utf-8"))


def conversations(found: Elements) -> list[str]:
    return [str(each["id"]) for tag, each in found.found if tag == "section" and each.get("class") == "part"]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ([], [0, 1, 2, 3, 4]),
        (["--failed"], [2, 3]),
        (["--rows", "0-1, 4,9"], [0, 1, 4]),
        (["--rows", "1-2", "--failed"], [2]),
    ],
)
def test_the_file_has_the_chosen_rows(osmosis: Osmosis, root: Path, options: list[str], rows: list[int]) -> None:
    finished, found = written(osmosis, root, *options)
    assert conversations(found) == [f"row-{row}-0" for row in rows]
    assert f"{len(rows)} row" in finished.stderr
    # Every link leads to a place in the file, and every place has one name.
    names = [str(each["id"]) for _, each in found.found if "id" in each]
    assert len(names) == len({*names})
    links = [str(each["href"]) for _, each in found.found if "href" in each]
    assert {link.partition("#")[2] for link in links} <= {*names}
    assert {link[:1] for link in links} == {"#"}


def test_the_file_shows_what_changed(osmosis: Osmosis, root: Path) -> None:
    before = osmosis("runs", "--json", cwd=root).json["runs"][1]["id"]
    _, found = written(osmosis, root, "--against", before, "--flipped")
    assert conversations(found) == ["row-1-0", "row-2-0", "row-3-0", "change-1", "change-2", "change-3"]
    assert f"What changed since {before}" in found.text


def test_the_file_asks_for_nothing_and_runs_nothing(osmosis: Osmosis, root: Path) -> None:
    for text in HOSTILE[:4]:
        hostile_run(root, text)
        _, found = written(osmosis, root, "--against", "latest")
        assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in found.found}
        assert not [
            name for _, each in found.found for name in each if name.startswith("on") or name in ("src", "style")
        ]
    text = (root / "page.html").read_text(encoding="utf-8")
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert not re.search(r"url\(|@import", text)


def test_keys_are_masked_also_new_ones(osmosis: Osmosis, root: Path) -> None:
    write_run(root, [made(0, text="my key is sk-new-secret<1>")])
    (root / ".env").write_text("SHOP_API_KEY=sk-new-secret<1>\n", encoding="utf-8")
    _, found = written(osmosis, root)
    assert "my key is [masked]" in found.text
    assert "sk-new-secret" not in (root / "page.html").read_text(encoding="utf-8")


def test_a_page_that_grows_too_large_isn_t_written(
    osmosis: Osmosis, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_BYTES", 20_000)
    finished = osmosis("view", "--html", "page.html", cwd=root)
    assert finished.code == 2
    assert "choose fewer with --failed, --rows 0-49 or" in finished.stderr
    assert not (root / "page.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "x", "--flipped"], "add --against RUN"),
        (["--html", "x", "--rows", "1-"], "for example 0-49,60"),
        (["--failed"], "add --html FILE"),
        (["--html", "nowhere/x"], "nowhere/x could not be written"),
        (["--html", "x", "--against", "nope"], "there is no run 'nope'"),
    ],
)
def test_an_unwritable_file_is_an_error(osmosis: Osmosis, root: Path, options: list[str], message: str) -> None:
    finished = osmosis("view", *options, cwd=root)
    assert finished.code in (1, 2)
    assert message in finished.stderr
    assert not (root / "x").exists()
