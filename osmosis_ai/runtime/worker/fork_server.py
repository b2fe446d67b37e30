"""The fork server's main function. It may import nothing yet that takes long: what does is what it is there for."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

from osmosis_ai.process_tree import adopt_orphans, end_with
from osmosis_ai.runtime.worker.forking import TEMPLATE, WORKER, Forker

__all__ = ["main"]

PRELOAD = "osmosis_ai.runtime.worker.preload"


def main(line: int, lifeline: int, preload: list[str]) -> NoReturn:
    """Be the fork server of a process: import what workers need, then fork them until that process is gone.

    `line` is the descriptor of a socket on which `LINE` is asked for, `lifeline` that of a pipe's end; the other end
    closes when that process is gone. `preload` are modules to import besides.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[:] = ["osmosis"]
    adopt_orphans()
    # While it imports it doesn't see its line end; afterwards there may be more to end than itself.
    armed = end_with(lifeline)
    for name in (*preload, PRELOAD):
        importlib.import_module(name)
    from osmosis_ai.runtime.worker.main import template_main, worker_main

    if armed is not None:
        os.close(armed)
    requests = socket.socket(fileno=line)
    os.set_inheritable(line, False)
    os.set_inheritable(lifeline, False)
    forker = Forker(
        requests,
        requests,
        {
            WORKER: lambda jobs, events: worker_main(jobs, events, lifeline),
            TEMPLATE: lambda control, reports: template_main(control, reports, lifeline),
        },
    )
    forker.serve()
