"""A worker as it starts where there is no fork server: in a new interpreter, with its sockets handed over."""

from __future__ import annotations

import multiprocessing
import signal
import socket
from pathlib import Path

from osmosis_ai.records import FunctionRef
from osmosis_ai.runtime import protocol
from osmosis_ai.runtime.worker.main import HEADER, Boot, pack, worker_main

PATIENCE = 60.0
REWARD = """
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str == ground_truth else 0.0
"""


def receive(events: socket.socket) -> protocol.Event:
    """The next event that isn't a sign of life."""
    while True:
        (size,) = HEADER.unpack(exactly(events, HEADER.size))
        event = protocol.decode_event(exactly(events, size))
        if not isinstance(event, protocol.Beat):
            return event


def exactly(events: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = events.recv(size - len(data))
        assert more, "the worker is gone"
        data += more
    return data


def test_a_worker_in_a_new_interpreter_does_its_jobs(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD, encoding="utf-8")
    ref = FunctionRef("rewards:exact", "rewards", "exact", str(tmp_path))
    boot = Boot(protocol.WorkerSpec(str(tmp_path), protocol.Limits(), functions=[ref]))
    jobs, jobs_far = socket.socketpair()
    events, events_far = socket.socketpair()
    arguments = (jobs_far, events_far, protocol.encode(boot))
    process = multiprocessing.get_context("spawn").Process(target=worker_main, args=arguments)
    with jobs, events:
        with jobs_far, events_far:
            process.start()
        events.settimeout(PATIENCE)
        ready = receive(events)
        assert isinstance(ready, protocol.Ready)
        assert ready.functions == ["rewards:exact"]
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}]
        jobs.sendall(pack(protocol.ScoreJob("job", messages, 0, "42", {}, ["rewards:exact"])))
        done = receive(events)
        while not isinstance(done, protocol.ScoresDone):
            done = receive(events)
        assert [score.value for score in done.scores] == [1.0]
        jobs.sendall(pack(protocol.Stop()))
        process.join(PATIENCE)
        # It ends with its whole group.
        assert process.exitcode == -signal.SIGKILL
