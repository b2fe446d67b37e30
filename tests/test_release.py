"""The wheel and the sdist as released: their contents, and the wheel in a clean environment of each Python.

`make release-check` runs these tests; they build with the package index's hatchling and install from it.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from types import MappingProxyType

import pytest

import osmosis_ai
from commands import clean_environment
from osmosis_ai.compat import EXTRAS

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MOST_MB, MOST_PACKAGES = 419, 120
"""What an installation may take: two thirds of the space that it took with Parquet and uv, and a few packages more."""
LEGACY = """
import osmosis_ai
from osmosis_ai import evaluate_rubric, osmosis_reward, osmosis_rubric
from osmosis_ai.rollout import RolloutAgentLoop, RolloutContext, RolloutRequest, RolloutResult, create_app
from osmosis_ai.rollout.core.base import RolloutAgentLoop as also
from osmosis_ai.rollout.core.exceptions import OsmosisRolloutError

assert also is RolloutAgentLoop
print(osmosis_ai.__version__)
"""


def uv(*arguments: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "uv", *arguments], cwd=cwd, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def metadata(built: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith("/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def test_the_wheel_has_what_an_installation_needs_and_no_more(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
    info = f"osmosis_ai-{osmosis_ai.__version__}.dist-info"
    for needed in (
        "osmosis_ai/py.typed",
        "osmosis_ai/viewer/static/view.css",
        "osmosis_ai/viewer/templates/row.html",
        "osmosis_ai/templates/repository/README.md.txt",
        f"{info}/licenses/LICENSE",
        f"{info}/entry_points.txt",
    ):
        assert needed in names
    assert {name.split("/")[0] for name in names} == {"osmosis_ai", info}
    assert [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".db"))] == []
    # What git has is what the wheel has: nothing that only this machine has, nothing forgotten. The trainer is a
    # distribution of its own, which the package brings along.
    trainer = ("trainers/trl/pyproject.toml", "trainers/trl/osmosis_trainer_trl")
    tracked = subprocess.run(
        ["git", "ls-files", "osmosis_ai", *trainer], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    if tracked.returncode == 0 and tracked.stdout:
        expected = {re.sub("^trainers/", "osmosis_ai/trainers/", name) for name in tracked.stdout.split()}
        assert {name for name in names if name.startswith("osmosis_ai/")} == expected


def test_the_sdist_can_be_tested_and_documented(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff"),
        *("Makefile", "pyproject.toml", "mkdocs.yml", "docs/README.md", "tests/conftest.py"),
        "tests/data/imports/sums.eval",
        "examples/calculator/mcp/main.py",
    } <= names
    assert [name for name in names if name.startswith((".", "build/")) and name != ".gitignore"] == []


def test_the_metadata_says_what_the_package_is(metadata: Message) -> None:
    assert metadata["Version"] == osmosis_ai.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    extras = set(metadata.get_all("Provides-Extra", []))
    assert {*EXTRAS, "openai-agents", "ray", "strands"} <= extras


def test_version_changelog_and_citation_agree() -> None:
    version = osmosis_ai.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def find_python(version: str) -> Path | None:
    """Return an interpreter of a version, on the path or in pyenv, which hides those that aren't chosen."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, encoding="utf-8", check=False)
        if done.stdout.strip() == version:
            return Path(candidate)
    return None


@pytest.fixture(params=PYTHONS)
def installed(request: pytest.FixtureRequest, built: tuple[Path, Path], tmp_path: Path) -> Iterator[Path]:
    """The `bin` of a clean environment with the wheel in it."""
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"Python {request.param} is neither on the path nor in pyenv")
    environment = tmp_path / "environment"
    uv("venv", "--quiet", "--python", python, environment)
    uv("pip", "install", "--quiet", "--compile-bytecode", "--python", environment / "bin" / "python", built[0])
    uv("pip", "check", "--python", environment / "bin" / "python")
    yield environment / "bin"
    # Half a gigabyte each.
    shutil.rmtree(environment)


def test_a_user_installs_it_and_tries_it(installed: Path, tmp_path: Path) -> None:
    def run(*command: str | Path, cwd: Path = tmp_path, environ: Mapping[str, str] = MappingProxyType({})) -> str:
        done = subprocess.run(
            [installed / command[0], *command[1:]],
            cwd=cwd,
            env={**clean_environment(), "HOME": str(tmp_path), **environ},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    assert run("osmosis", "--version") == f"{osmosis_ai.__version__}\n"
    assert "Usage: osmosis" in run("osmosis", "--help")
    # Typer looks for the shell among the processes above, which a shell that only executes a command isn't.
    bash = [str(shutil.which("bash")), "-c", f"{installed / 'osmosis'} --install-completion && true"]
    assert "bash completion installed" in run(*bash)
    assert (tmp_path / ".bash_completions" / "osmosis.sh").is_file()
    asked = {"_OSMOSIS_COMPLETE": "complete_bash", "COMP_WORDS": "osmosis imp", "COMP_CWORD": "1"}
    assert run("osmosis", environ=asked) == "import\n"
    assert "Usage: " in run("python", "-m", "osmosis_ai", "test", "--help")
    assert run("python", "-W", "error", "-c", LEGACY) == f"{osmosis_ai.__version__}\n"
    run("osmosis", "init", "agent")
    shown = run("osmosis", "test", "--model", "offline/oracle", cwd=tmp_path / "agent")
    assert re.search(r"^(\d+) of \1 rollouts completed", shown, re.MULTILINE), shown
    assert "rollouts" in run("osmosis", "runs", cwd=tmp_path / "agent")
    imported = run("osmosis", "import", ROOT / "tests" / "data" / "imports" / "traces.jsonl", cwd=tmp_path / "agent")
    assert re.fullmatch(r"\d{8}-\d{6}-\w+\n", imported)
    measured = run("python", ROOT / "benchmarks" / "install_size.py", "--top", "0")
    size, packages = (int(number) for number in re.findall(r"\d+", measured)[:2])
    assert size <= MOST_MB, measured
    assert packages <= MOST_PACKAGES, measured
