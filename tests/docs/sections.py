"""The documents' sections and their blocks, each run as `test_documents.py` says."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from shell import Shell, script

from commands import clean_environment
from osmosis_ai.training import contract

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENDPOINT_URL, SERVER_URL = "http://localhost:8000/v1", "http://localhost:8765/mcp"
ADDING = "docs/adding.md"
"""What it adds belongs to the package: test_adding.py runs it."""
PROGRAM = re.compile(r"\b(pytest|python) |\$\(osmosis|osmosis .*[|&]|mcp\.json|osmosis (eval run|rollout) ")
LOOKED_UP = {"make check", "make benchmark", "make release-check"}
ONE_MODULE = "make test TESTS=tests/test_tracebacks.py"


class Block(NamedTuple):
    """One fenced block of a document."""

    line: int
    language: str
    attributes: dict[str, str]
    content: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Return the commands with their shown output, which is empty in a bash block."""
        if self.language == "bash":
            return [(command, "") for command in script(self.content)]
        found: list[tuple[str, str]] = []
        for line in self.content.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            else:
                command, shown = found[-1]
                found[-1] = (command, f"{shown}{line}\n")
        return found


class Section(NamedTuple):
    """A `##` section of a document, or the text before the first one."""

    document: str
    title: str
    blocks: list[Block]

    @property
    def name(self) -> str:
        return f"{self.document}: {self.title}"

    @property
    def files(self) -> dict[str, str]:
        return {block.attributes["file"]: block.content for block in self.blocks if "file" in block.attributes}

    @property
    def in_clone(self) -> bool:
        return any(command.startswith(("make", ".venv/bin/")) for command in self._commands)

    @property
    def starts_programs(self) -> bool:
        """True if something of it is an interpreter of its own, which takes seconds to start."""
        return self.in_clone or any(PROGRAM.search(command) for command in self._commands)

    @property
    def in_litellm(self) -> bool:
        """True if workers call a provider's model or a judge."""
        return any(
            re.search(r"osmosis (test|eval) .*(--model openai/|--rubric)|--rubric \S+:", command)
            for command in self._commands
        )

    @property
    def _commands(self) -> list[str]:
        shells = (block for block in self.blocks if block.language in {"bash", "console"})
        return [command for block in shells for command, _ in block.commands]


def sections(*, starting_programs: bool) -> list[object]:
    """Every section with a block that is run, as parameters of a test: those that start programs, or all others."""
    return [
        pytest.param(section, id=section.name, marks=[pytest.mark.litellm] if section.in_litellm else [])
        for section in all_sections()
        if section.document != ADDING and section.starts_programs == starting_programs
    ]


def all_sections() -> list[Section]:
    """Every section with a block in it."""
    found = []
    for document in DOCUMENTS:
        content = (ROOT / document).read_text(encoding="utf-8")
        starts = [0, *(match.start() for match in re.finditer(r"^## ", content, re.MULTILINE)), len(content)]
        for start, end in itertools.pairwise(starts):
            part = content[start:end]
            blocks = []
            for match in BLOCK.finditer(part):
                attributes = dict(item.partition("=")[::2] for item in match[2].split())
                line = content.count("\n", 0, start + match.start()) + 1
                blocks.append(Block(line, match[1], attributes, match[3]))
            assert len(blocks) * 2 == len(re.findall(r"^```", part, re.MULTILINE)), (
                f"{document}: a fence without a pair"
            )
            if blocks:
                found.append(Section(document, part.split("\n", 1)[0].lstrip("# "), blocks))
    return found


def run_section(section: Section, tmp_path: Path, clone: Path, servers: dict[str, str]) -> None:
    """Run a section from top to bottom in a folder of its own."""
    folder = clone if section.in_clone else make_folder(section, tmp_path / "calculator", clone)
    for name, content in section.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    for block in section.blocks:
        where = f"{section.document}:{block.line}"
        if block.language == "json":
            check_json(block, folder)
        elif block.language == "python":
            check_python(block, folder, where)
        elif block.language in {"bash", "console"}:
            check_commands(block, folder, where, servers)
        else:
            assert block.language == "text" or "file" in block.attributes, f"{where}: nothing runs {block.language}"


def make_folder(section: Section, folder: Path, clone: Path) -> Path:
    if "mcp/main.py" in section.files:
        folder.mkdir()
    else:
        example = ROOT / "examples" / "calculator"
        shutil.copytree(example, folder, ignore=shutil.ignore_patterns("__pycache__", ".osmosis"))
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "osmosis").symlink_to(clone)
    return folder


def check_json(block: Block, folder: Path) -> None:
    if block.attributes.get("file", "").endswith(".jsonl"):
        for line in block.content.splitlines():
            json.loads(line)
        return
    value = json.loads(block.content)
    if record := block.attributes.get("type"):
        assert msgspec.to_builtins(msgspec.convert(value, getattr(contract, record))) == value
    if "like" in block.attributes:
        real = json.loads((folder / block.attributes["like"]).read_text(encoding="utf-8"))
        assert_same_shape(value, real, "$")


def assert_same_shape(shown: Any, real: Any, where: str) -> None:
    if shown is None or real is None:
        return
    assert isinstance(shown, bool) == isinstance(real, bool), where
    if isinstance(shown, dict):
        assert sorted(shown) == sorted(real), where
        for key in shown:
            assert_same_shape(shown[key], real[key], f"{where}.{key}")
    elif isinstance(shown, list):
        assert bool(shown) == bool(real), where
        for item in shown:
            assert_same_shape(item, real[0], f"{where}[]")
    elif isinstance(shown, str):
        assert isinstance(real, str), where
    else:
        assert isinstance(real, int | float), where


def check_python(block: Block, folder: Path, where: str) -> None:
    compile(block.content, where, "exec")
    if "file" not in block.attributes:
        done = subprocess.run([sys.executable, "-c", block.content], cwd=folder, capture_output=True, encoding="utf-8")
        assert done.returncode == 0, f"{where}\n{done.stderr}"


def check_commands(block: Block, folder: Path, where: str, servers: dict[str, str]) -> None:
    shell = Shell(folder, environment(servers[ENDPOINT_URL]))
    for documented, shown in block.commands:
        command = run_here(documented)
        for url, served in servers.items():
            command = command.replace(url, served)
        output = shell.run(command)
        if block.language == "bash":
            assert shell.code == 0, f"{where}: {documented}\n{output}"
        else:
            assert as_pattern(shown).fullmatch(stable(output)), (
                f"{where}: $ {documented}\n--- shown\n{stable(shown)}\n--- real\n{stable(output)}"
            )


def run_here(line: str) -> str:
    if line in LOOKED_UP:
        return f"{line} --dry-run"
    return ONE_MODULE if line == "make test" else line


def environment(endpoint_url: str) -> dict[str, str]:
    """Return a clean environment without an outer make's settings; OpenAI is scripted.

    One worker and one process of tests do: what a section shows doesn't depend on their number.
    """
    make = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "TESTS"}
    kept = {name: value for name, value in clean_environment().items() if name not in make}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    few = {"OSMOSIS_WORKERS": "1", "PROCESSES": "0"}
    return {**kept, **few, "PATH": path, "OPENAI_BASE_URL": endpoint_url, "OPENAI_API_BASE": endpoint_url}


def stable(output: str) -> str:
    """Remove from the output everything that differs between two runs."""
    # Old versions of libraries warn on stderr: the warning, up to the source line below it.
    output = re.sub(r"^\S+/site-packages/\S+: \w+Warning: .*\n(?:.*\n)*?  .*\n", "", output, flags=re.MULTILINE)
    # LiteLLM's own logging may fail when an event loop ends before it: a line, and a traceback.
    output = re.sub(
        r"^[\d:]+ - LiteLLM:ERROR: logging_worker.*\n(?:.*\n)*?\w+Error: .*\n", "", output, flags=re.MULTILINE
    )
    output = re.sub(r"\b(run|show) \d{8}-\d{6}-\w+", r"\1 #", output)
    output = re.sub(r"\b\d+ passed\b", "# passed", output)
    output = re.sub(r"(?<![\d.])\d[\d,]*\.\d(?!\d)( m?s\b)?", "#", output)
    lines = [" ".join(line.split()) for line in output.strip("\n").splitlines()]
    return "".join(f"{line}\n" for line in lines)


def as_pattern(shown: str) -> re.Pattern[str]:
    lines = []
    for line in stable(shown).splitlines():
        if line == "…":
            lines.append(r"(?:[^\n]*\n)*")
        else:
            lines.append("[^\n]*".join(re.escape(part) for part in line.split("…")) + r"\n")
    return re.compile("".join(lines))
