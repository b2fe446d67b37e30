"""A repository's modules may have any name: they never hide a library or the standard library from Osmosis."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from commands import COMMAND, clean_environment, run_osmosis
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text, tool_call
from repos import ADDING, write_repo

# They share one listing of what a worker imports.
pytestmark = pytest.mark.xdist_group("module names")

HIDES = """
import os
with open({log!r}, "a") as log:
    log.write({name!r} + os.linesep)
raise RuntimeError({name!r} + " was imported from the repository")
"""
LISTS = """

@mcp.tool
def names() -> list[str]:
    \"\"\"List the modules that this process has imported.\"\"\"
    import sys
    return sorted({name.partition(".")[0] for name in sys.modules})
"""
OWN = {"main", "osmosis_ai", "reward_fn"}


def write_hiding(root: Path, names: Iterable[str]) -> Path:
    """Write a repository with a module for each name that fails when it is imported."""
    write_repo(root)
    for name in names:
        (root / f"{name}.py").write_text(HIDES.format(log=str(root / "imported"), name=name), encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def hiding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that has a module for everything that a worker imports in a run, and for the standard library."""
    root = write_repo(tmp_path_factory.mktemp("listing") / "repo", main=ADDING + LISTS)
    with ScriptedEndpoint(by_turn(tool_call("names"), text("3"))).run_in_thread() as endpoint:
        done = run_osmosis(
            *("test", "--limit", "1", "--base-url", endpoint.url, "--model", "any", "--workers", "0"),
            cwd=root,
            env={"OSMOSIS_API_KEY": "any"},
        )
        assert done.code == 0, done.stderr
        imported = json.loads(endpoint.requests[-1].messages[-1]["content"])
    assert {"pydantic", "fastmcp", "anyio", "mcp"} <= set(imported)
    return write_hiding(tmp_path_factory.mktemp("hiding") / "repo", {*imported, *sys.stdlib_module_names} - OWN)


@pytest.mark.parametrize(
    "options",
    [
        ("test", "--model", "offline/oracle"),
        ("test", "--model", "offline/smoke", "--isolation", "rollout"),
        ("test", "--model", "offline/oracle", "--workers", "0"),
        ("validate",),
    ],
    ids=" ".join,
)
def test_no_name_hides_a_library_from_a_worker_or_a_scorer(options: tuple[str, ...], hiding: Path) -> None:
    done = run_osmosis(*options, "--json", cwd=hiding)
    assert done.code == 0, done.stderr + done.stdout
    assert not (hiding / "imported").exists()


def test_no_name_hides_a_library_that_a_model_imports_late(hiding: Path) -> None:
    for model in (
        ("--model", "openai/any", "--base-url", "http://127.0.0.1:9/v1"),
        ("--model", "anthropic/any", "--workers", "0"),
    ):
        keys = {"OSMOSIS_API_KEY": "any", "ANTHROPIC_API_KEY": "any", "ANTHROPIC_BASE_URL": "http://127.0.0.1:9"}
        done = run_osmosis("test", "--limit", "1", *model, cwd=hiding, env=keys)
        assert "127.0.0.1" in done.stderr
        assert not (hiding / "imported").exists()


# `python -m` itself imports others, such as types and importlib, before any code of ours runs.
@pytest.mark.parametrize(
    ("command", "environ"),
    [([sys.executable, "-m", "osmosis_ai"], {}), ([str(COMMAND)], {"PYTHONPATH": "."})],
    ids=["python -m", "PYTHONPATH"],
)
def test_the_working_directory_on_the_path_hides_nothing(
    command: list[str], environ: dict[str, str], tmp_path: Path
) -> None:
    names = ("__future__", "json", "logging", "pydantic", "random", "rich", "signal", "typing", "yaml")
    root = write_hiding(tmp_path / "repo", names)
    options = ["test", "--model", "offline/oracle", "--workers", "1"]
    done = subprocess.run(
        [*command, *options], cwd=root, env=clean_environment(**environ), capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert not (root / "imported").exists()


def test_an_init_file_in_mcp_changes_nothing(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo")
    (root / "mcp" / "__init__.py").touch()
    for isolation in ("session", "rollout"):
        done = run_osmosis("test", "--model", "offline/oracle", "--isolation", isolation, cwd=root)
        assert done.code == 0, done.stderr


OWN_MODULES = """
import mailbox
import tests.words
import utils
from fastmcp import FastMCP

mcp = FastMCP("own")


@mcp.tool
def own() -> str:
    \"\"\"Name the modules in use.\"\"\"
    import profile

    return f"{mailbox.NAME} {tests.words.NAME} {utils.NAME} {hasattr(profile, 'run')}"
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_repositorys_own_modules_stay_its_own(workers: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=OWN_MODULES)
    (root / "tests").mkdir()
    (root / "tests" / "__init__.py").touch()
    # `python mcp/main.py` finds mailbox beside main.py, too; but never profile, which is in the root.
    for name in ("mcp/mailbox", "tests/words", "utils", "profile"):
        (root / f"{name}.py").write_text(f"NAME = {name!r}\n", encoding="utf-8")
    with ScriptedEndpoint(by_turn(tool_call("own"), text("3"))).run_in_thread() as endpoint:
        options = ("--limit", "1", "--base-url", endpoint.url, "--model", "any", "--workers", workers)
        done = run_osmosis("test", *options, cwd=root, env={"OSMOSIS_API_KEY": "any"})
        assert done.code == 0, done.stderr
        assert endpoint.requests[-1].messages[-1]["content"] == "mcp/mailbox tests/words utils True"


@pytest.mark.parametrize(
    ("file", "statement", "hint"),
    [
        (
            "types.py",
            "from types import Price",
            "`types` means Python's own module here, not types.py; rename the file.",
        ),
        ("yaml.py", "from yaml import prices", "`yaml` means an installed library here, not yaml.py; rename the file."),
        ("mcp/mailbox.py", "import mailbox\nfrom mailbox import Maildir", "mcp/mailbox.py hides Python's own module"),
    ],
)
def test_an_import_error_names_the_file_with_the_name_of_a_library(
    file: str, statement: str, hint: str, tmp_path: Path
) -> None:
    root = write_repo(tmp_path / "repo", main=f"{statement}\n{ADDING}")
    (root / file).write_text("prices = 1\n" if "mcp" in file else "Price = int\n", encoding="utf-8")
    done = run_osmosis("test", "--model", "offline/oracle", cwd=root)
    assert done.code == 2
    assert hint in done.stderr


DYING = """
import mailbox
import os
import traceback

print("loading weights")
try:
    mailbox.load()
except KeyError:
    traceback.print_exc()
    os._exit(3)
"""


@pytest.mark.parametrize("isolation", ["session", "rollout"])
def test_a_worker_that_dies_while_it_loads_is_reported_with_its_last_lines(isolation: str, tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main=DYING)
    (root / "mcp" / "mailbox.py").write_text("def load():\n    raise KeyError('no weights')\n", encoding="utf-8")
    done = run_osmosis("test", "--model", "offline/oracle", "--isolation", isolation, cwd=root)
    assert done.code == 2
    assert "exited with code 3\n    loading weights\n    Traceback" in done.stderr
    assert "    KeyError: 'no weights'\n    mcp/mailbox.py has the name of a library" in done.stderr


def test_validate_reports_the_last_lines_too(tmp_path: Path) -> None:
    root = write_repo(tmp_path / "repo", main="import os\nprint('loading weights')\nos._exit(3)\n")
    (found,) = [one for one in run_osmosis("validate", "--json", cwd=root).json["findings"] if one["code"] == "OSM103"]
    assert found["message"].endswith("exited with code 3\n    loading weights")
