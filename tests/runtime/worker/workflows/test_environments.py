"""Environments are made once from what a rollout declares, outside its folder, and what goes wrong is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import psutil
import pytest

from osmosis_ai.errors import RepositoryError
from osmosis_ai.runtime.worker.workflows.environments import COMPLETE, prepare_environment, uv_command

ENVIRON = {**os.environ, "UV_OFFLINE": "1", "UV_PYTHON_DOWNLOADS": "never"}
PROJECT = '[project]\nname = "raw"\nversion = "0.1.0"\nrequires-python = ">=3.10"\ndependencies = {dependencies}\n'


def declared(folder: Path, dependencies: str = "[]") -> Path:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT.format(dependencies=dependencies), encoding="utf-8")
    return folder


def prepare(rollout: Path, home: Path) -> Path:
    return prepare_environment(rollout, folder=home, environ=ENVIRON)


def test_without_a_declaration_it_is_the_current_interpreter(tmp_path: Path) -> None:
    assert prepare(tmp_path, tmp_path / "home") == Path(sys.executable)
    assert not (tmp_path / "home").exists()


def test_equal_declarations_share_an_environment_outside_their_folders(tmp_path: Path) -> None:
    one, two = declared(tmp_path / "a" / "raw"), declared(tmp_path / "b" / "raw")
    python = prepare(one, tmp_path / "home")
    assert python.is_relative_to(tmp_path / "home")
    shown = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert Path(shown.stdout.strip()) == python.parent.parent
    assert prepare(two, tmp_path / "home") == python
    assert [file.name for file in one.iterdir()] == ["pyproject.toml"]


def test_a_finished_environment_is_used_without_uv(tmp_path: Path) -> None:
    rollout = declared(tmp_path / "raw")
    python = prepare(rollout, tmp_path / "home")
    # With this, uv would fail.
    assert prepare_environment(rollout, folder=tmp_path / "home", environ={"UV_OFFLINE": "no boolean"}) == python


def test_another_declaration_or_lock_makes_another_environment(tmp_path: Path) -> None:
    rollout, home = declared(tmp_path / "raw"), tmp_path / "home"
    first = prepare(rollout, home)
    subprocess.run([sys.executable, "-m", "uv", "lock", "--quiet"], cwd=rollout, env=ENVIRON, check=True)
    locked = prepare(rollout, home)
    assert locked != first
    (rollout / "pyproject.toml").write_text(PROJECT.format(dependencies="[]") + "\n", encoding="utf-8")
    assert prepare(rollout, home) not in (first, locked)


def test_an_interrupted_installation_is_repeated(tmp_path: Path) -> None:
    rollout = declared(tmp_path / "raw")
    python = prepare(rollout, tmp_path / "home")
    stamp = python.parent.parent / COMPLETE
    stamp.unlink()
    python.unlink()
    assert prepare(rollout, tmp_path / "home").exists()
    assert stamp.exists()


def test_two_at_once_make_one(tmp_path: Path) -> None:
    rollout = declared(tmp_path / "raw")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: prepare(rollout, tmp_path / "home"), range(2)))
    assert paths[0] == paths[1]
    assert subprocess.run([paths[0], "-c", ""], check=False).returncode == 0


def test_a_failed_installation_is_reported_with_uv_s_message(tmp_path: Path) -> None:
    rollout = declared(tmp_path / "raw", '["no-such-package-osmosis-test"]')
    with pytest.raises(RepositoryError, match="no-such-package-osmosis-test") as raised:
        prepare(rollout, tmp_path / "home")
    assert str(rollout / "pyproject.toml") in str(raised.value)
    assert "`uv pip install` said:\n  " in str(raised.value)


def test_a_missing_interpreter_is_reported(tmp_path: Path) -> None:
    rollout = declared(tmp_path / "raw")
    text = (rollout / "pyproject.toml").read_text(encoding="utf-8").replace(">=3.10", ">=3.99")
    (rollout / "pyproject.toml").write_text(text, encoding="utf-8")
    with pytest.raises(RepositoryError, match=r"3\.99"):
        prepare(rollout, tmp_path / "home")


def test_an_invalid_declaration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project\n", encoding="utf-8")
    with pytest.raises(RepositoryError, match=r"pyproject\.toml"):
        prepare(tmp_path, tmp_path / "home")


def test_environments_unused_for_a_month_are_removed_when_another_is_built(tmp_path: Path) -> None:
    home = tmp_path / "home"
    old, used = declared(tmp_path / "old"), declared(tmp_path / "used")
    old_python, used_python = prepare(old, home), prepare(used, home)
    for python in (old_python, used_python):
        long_ago = time.time() - 31 * 24 * 3600
        os.utime(python.parent.parent / COMPLETE, (long_ago, long_ago))
    prepare(used, home)
    assert old_python.exists()
    prepare(declared(tmp_path / "new", "[\"pip; python_version < '3'\"]"), home)
    assert not old_python.parent.parent.exists()
    assert used_python.exists()
    assert prepare(old, home) == old_python


def test_an_installation_is_ended_when_its_command_is(tmp_path: Path) -> None:
    stopped = Event()
    with socket.create_server(("127.0.0.1", 0)) as index:
        rollout = declared(tmp_path / "raw", '["any"]')
        # It takes connections, and never answers.
        url = f"http://127.0.0.1:{index.getsockname()[1]}"
        environ = {**ENVIRON, "UV_OFFLINE": "0", "UV_DEFAULT_INDEX": url, "UV_CACHE_DIR": str(tmp_path / "cache")}
        with ThreadPoolExecutor(2) as pool:
            ask = partial(prepare_environment, rollout, folder=tmp_path / "home", environ=environ, stopped=stopped)
            making = pool.submit(ask)
            with index.accept()[0]:
                waiting = pool.submit(ask)
                stopped.set()
                for asked in (making, waiting):
                    with pytest.raises(RepositoryError, match="stopped"):
                        asked.result(30)
    assert not any(str(tmp_path) in " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))


def test_uv_is_the_installed_package_or_the_one_on_the_path(tmp_path: Path) -> None:
    assert uv_command(None, installed=True) == [sys.executable, "-m", "uv"]
    with pytest.raises(RepositoryError, match=r"osmosis-ai\[workflows\]"):
        uv_command(str(tmp_path), installed=False)
    (tmp_path / "uv").touch(mode=0o755)
    assert uv_command(str(tmp_path), installed=False) == [str(tmp_path / "uv")]
