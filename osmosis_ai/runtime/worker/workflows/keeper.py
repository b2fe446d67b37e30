"""Run a command in its own process group until it ends or stdin reaches EOF, then kill the whole group.

A worker runs this file as a script and holds the write end of its stdin. However the worker dies, the pipe closes, so
the command never outlives it. The exit code is the command's. To start fast, only the standard library is imported.
"""

import os
import signal
import subprocess
import sys
import threading
import time

PAUSE = 0.02


def main(grace: float, command: "list[str]") -> int:
    """Run the command; on EOF on stdin, send it SIGTERM, then SIGKILL after `grace` seconds."""
    # Handlers that do nothing, because the command would inherit SIG_IGN.
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
    # Kill whatever the command left running in its group.
    _signal(child.pid, signal.SIGKILL)
    return code


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    ended = main(float(sys.argv[1]), sys.argv[2:])
    # Like a shell: 128 plus the signal's number.
    os._exit(ended if ended >= 0 else 128 - ended)
