"""User code's output in the run's log: labelled, masked and bounded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from osmosis_ai.runtime.logs import (
    JOB_BYTES,
    KEPT_LOGS,
    LINE_CHARACTERS,
    LogWriter,
    hand_over_log,
    held_output,
    last_lines,
    new_log,
)


def written(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def test_only_the_latest_logs_are_kept_whatever_their_names(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for number in range(KEPT_LOGS + 5):
        log = logs / f"{KEPT_LOGS + 5 - number:03}.log"
        log.touch()
        os.utime(log, (number, number))
    new_log(tmp_path, "a-run").touch()
    kept = sorted(logs.iterdir())
    assert len(kept) == KEPT_LOGS
    assert (kept[0].name, kept[-2].name, kept[-1].name) == ("001.log", f"{KEPT_LOGS - 1:03}.log", "a-run.log")


def test_a_log_that_turns_out_to_belong_to_a_run_replaces_none_of_the_runs_others(tmp_path: Path) -> None:
    def hand_over() -> None:
        new = new_log(tmp_path, "new")
        new.write_text("latest", encoding="utf-8")
        hand_over_log(new, "a-run")

    for _ in range(3):
        hand_over()
    logs = tmp_path / "logs"
    assert sorted(log.name for log in logs.iterdir()) == ["a-run-2.log", "a-run-3.log", "a-run.log"]
    (logs / "a-run.log").unlink()
    hand_over()
    assert sorted(log.name for log in logs.iterdir()) == ["a-run-2.log", "a-run-3.log", "a-run-4.log"]
    # One that is gone already is no error.
    hand_over_log(logs / "gone.log", "a-run")


def test_a_log_that_cannot_be_written_fails_nobody(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    writer = LogWriter(log, str)
    # Its folder was removed before the first line.
    writer.write("row 1 run 0", "stdout", "one")
    assert written(log) == ["[row 1 run 0 stdout] one"]
    assert log.stat().st_mode & 0o77 == 0
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    LogWriter(in_the_way / "a.log", str).write("row 1 run 0", "stdout", "two")
    LogWriter(Path("/dev/full"), str).write("row 1 run 0", "stdout", "three")


def test_a_line_has_its_label_and_stream_and_no_key(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", lambda text: text.replace("sk-secret", "[masked]"))
    writer.write("row 1 run 0", "stdout", "the key is sk-secret")
    assert written(tmp_path / "log") == ["[row 1 run 0 stdout] the key is [masked]"]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_writers_append_to_one_log(tmp_path: Path) -> None:
    for label in "ab":
        LogWriter(tmp_path / "log", str).write(label, "stderr", "said")
    assert written(tmp_path / "log") == ["[a stderr] said", "[b stderr] said"]


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    LogWriter(tmp_path / "log", str).write("a", "stdout", "x" * (LINE_CHARACTERS + 1))
    (line,) = written(tmp_path / "log")
    assert line.endswith(f"x … ({LINE_CHARACTERS + 1} characters)")


def test_a_label_that_floods_the_log_is_cut_off_alone_and_only_while_its_job_runs(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log", str)
    line = "x" * (LINE_CHARACTERS - 1)
    for _ in range(JOB_BYTES // LINE_CHARACTERS + 5):
        writer.write("flooding", "stdout", line)
    writer.write("other", "stdout", "said")
    writer.forget("flooding")
    writer.write("flooding", "stdout", "again")
    assert [shown for shown in written(tmp_path / "log") if line not in shown] == [
        "[flooding stdout] … further output left out, over 1 MiB",
        "[other stdout] said",
        "[flooding stdout] again",
    ]


def test_without_a_log_lines_are_only_shown(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("wb") as shown:
        LogWriter(None, str, live=shown.fileno()).write("a", "stdout", "said")
    assert written(tmp_path / "shown") == ["[a stdout] said"]


def test_the_last_lines_of_a_worker_are_its_own_and_no_jobs(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert last_lines(log, 7, 2) == []
    writer = LogWriter(log, str)
    for label, line in (
        ("worker 7", "one"),
        ("row 0 run 0", "a job's"),
        ("worker 7", "two"),
        ("worker 77", "another's"),
        ("worker 7", "[three] of it"),
    ):
        writer.write(label, "stderr", line)
    assert last_lines(log, 7, 2) == ["two", "[three] of it"]
    assert last_lines(log, 8, 2) == []


def test_output_that_a_dead_process_held_back_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    held_output(log, 7).write_bytes(b"one\ntwo\nthr\xff\n")
    assert last_lines(log, 7, 2) == ["two", "thr\ufffd"]
    assert last_lines(log, 7, 2) == []


PROGRAM = """
import os, subprocess, sys, threading
from contextvars import ContextVar
from pathlib import Path
from osmosis_ai.runtime.logs import LogWriter, capture_output

label = ContextVar("label", default="the worker")
captured = capture_output(LogWriter(Path(sys.argv[1]), str), label.get)
label.set("job")
print("printed", "in parts", end="")
sys.stderr.write("no end")
captured.finish("job")
print("after")
label.set("the worker")
os.write(1, b"from C\\n")
subprocess.run([sys.executable, "-c", "import sys; print(repr(sys.stdin.read())); sys.stderr.write('child')"])
print("the rest", end="")
captured.close()
os.write(1, b"too late\\n")
"""


def test_all_output_of_a_process_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)], input="typed", capture_output=True, encoding="utf-8", timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = [re.sub(r"^\[worker \d+", "[worker PID", line) for line in written(log)]
    assert sorted(lines) == sorted(
        [
            "[job stdout] printed in parts",
            "[job stderr] no end",
            "[job stdout] after",
            "[worker PID stdout] from C",
            # What user code starts can't read what is typed for the command.
            "[worker PID stdout] ''",
            "[worker PID stderr] child",
            "[the worker stdout] the rest",
        ]
    )
