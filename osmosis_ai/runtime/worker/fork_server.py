"""The fork server's main function. Slow imports wait until `main` has armed the lifeline."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from typing import NoReturn

from osmosis_ai.process_tree import adopt_orphans, end_with, wake_with
from osmosis_ai.runtime.worker.forking import SANDBOXED, TEMPLATE, WORKER, Forker

__all__ = ["main"]


def main(line: int, lifeline: int, preload: list[str]) -> NoReturn:
    """Run the fork server of another process: import the workers' modules, then fork workers until that process ends.

    `line` is the descriptor of a socket for `LINE` requests. `lifeline` is the descriptor of a pipe's end; the other
    end closes when that process ends. `preload` lists the modules to import besides the worker's own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[:] = ["osmosis"]
    adopt_orphans()
    # During the imports it can't notice the end of its line. Afterwards `Forker` does, and also ends the children.
    armed = end_with(lifeline)
    for name in preload:
        importlib.import_module(name)
    from osmosis_ai.code_hashes import leave_out_imported
    from osmosis_ai.runtime.worker.main import template_main, worker_main
    from osmosis_ai.runtime.worker.sandboxed import main as sandboxed_main

    leave_out_imported()
    if armed is not None:
        # User code may have stopped this process by then.
        wake_with(armed)
    requests = socket.socket(fileno=line)
    os.set_inheritable(line, False)
    os.set_inheritable(lifeline, False)
    forker = Forker(
        requests,
        requests,
        {
            WORKER: lambda jobs, events: worker_main(jobs, events, lifeline),
            SANDBOXED: sandboxed_main,
            TEMPLATE: lambda control, reports: template_main(control, reports, lifeline),
        },
    )
    forker.serve()
