"""docs/adding.md adds one of each registry to a copy of the package, as a maintainer would, and it works."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sections import ADDING, ROOT, Section, all_sections, as_pattern, stable

from commands import clean_environment

SECTIONS = [section for section in all_sections() if section.document == ADDING]


def with_lines(text: str, diff: str) -> str:
    """Return a file's text after a hunk without line numbers: a blank, `-` or `+` begins each line."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    assert text.count(old) == 1, f"the lines before the change aren't there once:\n{old}"
    return text.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))


def add(section: Section, root: Path) -> None:
    for block in section.blocks:
        if new := block.attributes.get("file"):
            assert not (root / new).exists()
            (root / new).write_text(block.content, encoding="utf-8")
        elif changed := block.attributes.get("to"):
            file = root / changed
            file.write_text(with_lines(file.read_text(encoding="utf-8"), block.content), encoding="utf-8")


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell whose `osmosis` is a copy of the package with everything on the page added."""
    root = tmp_path_factory.mktemp("added")
    # With what is compiled: importing the package without it takes a second each time.
    shutil.copytree(ROOT / "osmosis_ai", root / "osmosis_ai")
    for section in SECTIONS:
        add(section, root)
    command = root / "bin" / "osmosis"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m osmosis_ai "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment(PATH=path, PYTHONPATH=str(root), OSMOSIS_WORKERS="1", COLUMNS="200")


def test_what_is_added_works(shell: dict[str, str], tmp_path: Path) -> None:
    example = ROOT / "examples" / "calculator"
    folder = shutil.copytree(example, tmp_path / "calculator", ignore=shutil.ignore_patterns("__pycache__", ".osmosis"))
    blocks = [block for section in SECTIONS for block in section.blocks if block.language == "console"]
    for command, shown in (pair for block in blocks for pair in block.commands):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=120,
        )
        assert as_pattern(shown).fullmatch(stable(done.stdout)), f"$ {command}\n{stable(done.stdout)}"
