"""A worker's events leave its process whole and in order, from whatever thread they come."""

from __future__ import annotations

import os
import socket
import threading

from osmosis_ai.runtime.protocol import Acting, decode_event, receive_frame
from osmosis_ai.runtime.worker.main import Outbox, worker_label
from osmosis_ai.runtime.worker.worker import job_label

THREADS, EVENTS = 4, 50


def test_events_of_several_threads_do_not_mix() -> None:
    near, far = socket.socketpair()
    with near, far:
        outbox = Outbox(near)
        # Longer than the socket's buffer, so that a write takes several steps.
        filler = "x" * 20_000

        def send(thread: int) -> None:
            for number in range(EVENTS):
                outbox.send(Acting(f"{thread} {number} {filler}"))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        received: dict[str, list[int]] = {}
        for _ in range(THREADS * EVENTS):
            event = decode_event(receive_frame(far))
            assert isinstance(event, Acting)
            sender, number, rest = event.job.split()
            assert rest == filler
            received.setdefault(sender, []).append(int(number))
        for thread in threads:
            thread.join()
    assert received == {str(thread): list(range(EVENTS)) for thread in range(THREADS)}


def test_a_copy_of_the_process_that_user_code_forked_sends_nothing() -> None:
    near, far = socket.socketpair()
    with near, far:
        outbox = Outbox(near)
        child = os.fork()
        if not child:
            # It ends here, with code 0.
            outbox.send(Acting("copy"))
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        outbox.send(Acting("own"))
        assert decode_event(receive_frame(far)) == Acting("own")


def test_output_outside_a_job_is_the_workers() -> None:
    assert worker_label() == f"worker {os.getpid()}"
    token = job_label.set("row 1 run 0")
    assert worker_label() == "row 1 run 0"
    job_label.reset(token)
