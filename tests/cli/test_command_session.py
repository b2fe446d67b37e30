"""The frame of every command: errors become a line and an exit code, keys are masked, Ctrl-C stops once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
import typer

from osmosis_ai.cli.session import ExitCode, SharedOptions, command_session, interrupts, shared_options
from osmosis_ai.errors import StoreError, UsageError
from osmosis_ai.shortage import NO_THREAD, shortage_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (UsageError("[bold]no[/] such file"), "error: [bold]no[/] such file\n", ExitCode.COULD_NOT_START),
        (StoreError("the disk is full"), "error: the disk is full\n", ExitCode.COULD_NOT_START),
        (KeyboardInterrupt(), "interrupted\n", ExitCode.INTERRUPTED),
        (
            RuntimeError(NO_THREAD),
            f"error: {shortage_of(RuntimeError(NO_THREAD))}\n",
            ExitCode.COULD_NOT_START,
        ),
    ],
)
def test_an_error_is_a_line_on_stderr_and_an_exit_code(
    error: BaseException, said: str, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, command_session(quiet=True):
        raise error
    assert ended.value.exit_code == code
    assert tuple(capsys.readouterr()) == ("", said)


def test_a_store_that_fails_once_a_run_has_started_is_a_failed_run() -> None:
    with pytest.raises(typer.Exit) as ended, command_session(store_error=ExitCode.FAILED):
        raise StoreError("the disk is full")
    assert ended.value.exit_code == ExitCode.FAILED


def test_what_is_wrong_with_the_command_itself_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), command_session():
        raise ZeroDivisionError


def test_the_end_that_a_command_chose_is_its_own() -> None:
    with pytest.raises(typer.Exit) as ended, command_session():
        raise typer.Exit(1)
    assert ended.value.exit_code == 1


def test_keys_of_the_environment_of_env_files_and_of_options_are_masked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {name: f"sk-of-the-{name}" for name in ("environment", "directory", "repository", "option")}
    monkeypatch.setenv("SOME_API_KEY", keys["environment"])
    (folder / ".env").write_text(f"OTHER_API_KEY={keys['directory']}\nSHARED=directory\n", encoding="utf-8")
    (folder / "repository").mkdir()
    (folder / "repository" / ".env").write_text(f"MORE_TOKEN={keys['repository']}\nSHARED=no\n", encoding="utf-8")
    with command_session() as session:
        session.use(folder / "repository", keys=[keys["option"]])
        session.output.line(" ".join(keys.values()))
        session.output.say(" ".join(keys.values()))
        assert session.environ["SHARED"] == "directory"
    assert tuple(capsys.readouterr()) == (f"{' '.join(['[masked]'] * 4)}\n",) * 2


def test_an_env_file_that_cannot_be_read_is_an_error_like_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / ".env").write_bytes(b"NAME=\xff\n")
    with pytest.raises(typer.Exit) as ended, command_session():
        raise AssertionError
    assert ended.value.exit_code == ExitCode.COULD_NOT_START
    assert ".env: not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "own", "expected"),
    [
        (None, SharedOptions(), SharedOptions()),
        (SharedOptions("/group", "/store", True), SharedOptions(), SharedOptions("/group", "/store", True)),
        (
            SharedOptions("/group", "/store"),
            SharedOptions("/own", "/other", True),
            SharedOptions("/own", "/other", True),
        ),
    ],
)
def test_options_before_and_after_a_subcommand_are_the_same(
    group: SharedOptions | None, own: SharedOptions, expected: SharedOptions
) -> None:
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)), obj=group)
    assert shared_options(context, *own) == expected


@pytest.mark.anyio
async def test_the_first_ctrl_c_stops_and_the_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    stopped = anyio.Event()
    with anyio.fail_after(30), interrupts(stopped.set):
        os.kill(os.getpid(), signal.SIGINT)
        await stopped.wait()
    assert signal.getsignal(signal.SIGINT) is before
