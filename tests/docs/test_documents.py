"""Everything the documents show is run, and what they say comes out is compared with what does.

A document's `##` section is run as a whole, from top to bottom, in a folder of its own: a copy of examples/calculator,
or an empty one when the section writes its own `mcp/main.py`, or a clone's root when it calls `make` or `.venv/bin/…`.
The first line of a block says what it is:

    ```bash              commands that must succeed
    ```console           commands after `$ `, and what they print to stdout and stderr
    ```python            a program that must succeed
    ```json              JSON
    ```json like=FILE    JSON of the same shape as in FILE, which the section has written
    ```… file=FILE       any of these, written to FILE instead of being run
    ```text              nothing to run

In shown output `…` stands for any text, and on a line of its own for any lines. Times, counts of passed tests and run
ids may differ. `http://localhost:8000/v1` and OpenAI are a scripted endpoint here, `http://localhost:8765/mcp` is a
served FastMCP server. `make` runs its real recipes in the environment of this test; `make test` runs one module unless
it says which, and `make check` and `make benchmark`, which would take minutes, are only looked up in the Makefile.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import uvicorn
from fastmcp import FastMCP
from shell import Shell, script

from commands import clean_environment
from osmosis_ai.cli.app import app
from osmosis_ai.cli.eval_rubric import EvalRubricConfig
from osmosis_ai.config import RunConfig
from osmosis_ai.options import declared_options
from osmosis_ai.runtime.run.results import Cause
from osmosis_ai.serve.config import ServeConfig
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, text, tool_call

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
LOOKED_UP = {"make check", "make benchmark"}
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


def sections() -> list[Section]:
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


def answer(request: Request) -> Reply:
    """Calls the first tool with something of each type, then answers; as a judge it likes solutions with a sum."""
    if request.messages[0]["content"].startswith("You are an impartial judge."):
        score = 0.9 if re.search(r"<solution_\w+>\n[^<]*\+", request.messages[1]["content"]) else 0.2
        return text(json.dumps({"explanation": "The steps speak for themselves.", "score": score}))
    if request.turn or not request.tools:
        return text("#### 42")
    function = request.tools[0]["function"]
    properties = function["parameters"]["properties"]
    values = {name: "bread" if schema["type"] == "string" else 2 for name, schema in properties.items()}
    return tool_call(function["name"], **values)


@pytest.fixture(scope="module")
def endpoint_url() -> Iterator[str]:
    with ScriptedEndpoint(answer).run_in_thread() as endpoint:
        yield endpoint.url


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    server = FastMCP("remote")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with socket.socket() as listener:
        # It listens before the server runs, so nobody has to wait for it.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(server.http_app(), log_level="error", timeout_graceful_shutdown=1)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone as after `make demo` and `make test`, with this test's environment as its `.venv`."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".osmosis"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith("."):
            (root / ".venv" / entry.name).symlink_to(entry)
    for stamp in (".package", ".dev"):
        (root / ".venv" / stamp).touch()
    return root


@pytest.fixture
def servers(endpoint_url: str, server_url: str) -> dict[str, str]:
    return {ENDPOINT_URL: endpoint_url, SERVER_URL: server_url}


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(section, id=section.name, marks=[pytest.mark.litellm] if section.in_litellm else [])
        for section in sections()
        if section.document != ADDING
    ],
)
def test_a_section(section: Section, tmp_path: Path, clone: Path, servers: dict[str, str]) -> None:
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


OPTION_TABLES = {
    "validate": ["## osmosis validate"],
    "init": ["## osmosis init"],
    "eval-rubric": ["## osmosis eval-rubric"],
    "preview": ["## osmosis preview"],
    "runs": ["## osmosis runs", "### osmosis runs list"],
    **{
        f"runs {name}": ["## osmosis runs", f"### osmosis runs {name}"]
        for name in ("list", "show", "compare", "diff", "rescore", "export", "merge", "rm")
    },
    "import": ["## osmosis import"],
    "view": ["## osmosis view"],
    "runs view": ["## osmosis view"],
    "cache": ["## osmosis cache"],
    "cache clear": ["## osmosis cache"],
    "serve": ["## osmosis serve"],
    **{f"rollout {name}": [f"### osmosis rollout {name}"] for name in ("init", "list", "validate", "serve")},
}
"""The tables in docs/cli.md that a command's options are in, by the headings above them."""
DECLARED = {"serve": ServeConfig, "eval-rubric": EvalRubricConfig}


@pytest.mark.parametrize("name", OPTION_TABLES)
def test_every_option_is_documented_with_its_default(name: str) -> None:
    documented: dict[str, str] = {}
    for heading in OPTION_TABLES[name]:
        documented |= option_table(heading)
    command = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]  # type: ignore[attr-defined]
    real = {
        option: parameter
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-") and option != "--help" and not getattr(parameter, "hidden", False)
    }
    real.pop("-h", None)
    assert sorted(documented) == sorted(real)
    declared = {
        flag: option.default
        for option in (declared_options(DECLARED[name]) if name in DECLARED else ())
        for flag in option.flags
    }
    declared |= {f"--no-{flag[2:]}": default for flag, default in declared.items() if default is False}
    for option, parameter in real.items():
        shown = documented[option]
        default = declared.get(option, parameter.default)
        if default is False:
            assert shown == "off", option
        elif isinstance(default, int | float):
            assert shown == f"`{default:.10g}`", option
        else:
            assert shown != "off", option


@pytest.mark.parametrize("name", ["test", "eval"])
def test_every_option_of_how_a_run_is_shown_is_documented(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    real = {flag for parameter in command.params if not parameter.hidden for flag in parameter.opts}
    # Those of a run are in docs/options.md, which is made from their declarations.
    real -= {flag for option in declared_options(RunConfig) for flag in option.flags} | {"--help", "-h"}
    headings = ("## osmosis test", "### Only osmosis test", "## osmosis eval")
    documented = set().union(*map(option_table, headings))
    assert real <= documented, real - documented


def option_table(heading: str) -> dict[str, str]:
    """Each option in the table under a heading of docs/cli.md, with its default as it is written there."""
    content = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    part = re.split(r"^##", content.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = {}
    for row in re.findall(r"^\| (`-.*?) \| (.*?) \|", part, re.MULTILINE):
        for option in re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", row[0]):
            found[option] = row[1]
    return found


def test_every_field_of_the_results_is_described() -> None:
    content = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(\w+)`", BLOCK.sub("", content)))
    shown = [json.loads(match[3]) for match in BLOCK.finditer(content) if match[1] == "json"]
    assert len(shown) == 2
    fields = set(Cause.__struct_fields__)
    for value in shown:
        fields |= field_names(value)
    assert fields - {"tools"} <= described | {"config", "summary", "results"}, fields - described


def field_names(value: Any) -> set[str]:
    """All keys but those that are names of tools and functions."""
    if isinstance(value, list):
        return set().union(*map(field_names, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found: set[str] = set()
    for key, item in value.items():
        if ":" not in key and key != "add":
            found.add(key)
        found |= field_names(item)
    return found


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md", "examples/calculator/README.md"])
def test_links_lead_somewhere(document: str) -> None:
    content = BLOCK.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", content):
        assert (ROOT / document).parent.joinpath(target).exists(), target
