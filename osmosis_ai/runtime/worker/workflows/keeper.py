"""Run a command in a process group of its own until it ends, or until stdin does: then end the whole group.

A worker runs this file as a script, with the other end of stdin's pipe in its hands: however the worker ends, the
command doesn't outlive it. The exit code is the command's. Only the standard library is imported, to start fast.
"""

import os
import signal
import subprocess
import sys
import threading
import time

PAUSE = 0.02


def main(grace: float, command: "list[str]") -> int:
    """Run the command; at the end of stdin it gets SIGTERM, and SIGKILL after `grace` seconds."""
    # A handler, because what is ignored would be ignored in the command, too.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(  # noqa: S603 - the worker's own words
        command, stdin=subprocess.DEVNULL, start_new_session=True
    )

    def follow() -> None:
        while os.read(0, 4096):
            pass
        _signal(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and child.returncode is None:
            time.sleep(PAUSE)
        _signal(child.pid, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    code = child.wait()
    # What it left behind in its group.
    _signal(child.pid, signal.SIGKILL)
    return code


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    ended = main(float(sys.argv[1]), sys.argv[2:])
    # As a shell has it: a signal's number above 128.
    os._exit(ended if ended >= 0 else 128 - ended)
