"""Enter a sandbox that `bwrap` has made, as `nsenter` does: for a process that has its modules loaded already (Linux).

A sandbox's namespaces belong to a user namespace, where the process gets every capability, which it needs to enter
them. `bwrap --disable-userns` then leads into a second user namespace below it, in which no more can be made; there
the process gives up its capabilities for good.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["enter_sandbox"]

NAMESPACES = ("mnt", "ipc", "uts", "net", "pid", "cgroup")
NS_GET_PARENT = 0xB702
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522
SIGNALLED = 128


def enter_sandbox(pid: int, keep: set[int]) -> None:
    """Return in a child process in the sandbox that the process `pid` is in, with these open files and the first three.

    The calling process waits for the child and ends as it did; one killed by a signal ends it with that number plus
    128. Raises OSError.
    """
    inner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    spaces = [fcntl.ioctl(inner, NS_GET_PARENT)]
    for name in NAMESPACES:
        # The network's may be shared.
        if not Path(f"/proc/{pid}/ns/{name}").samefile(f"/proc/self/ns/{name}"):
            spaces.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
    libc = ctypes.CDLL(None, use_errno=True)
    for space in (*spaces, inner):
        _check(libc.setns(space, 0))
    # Only a child is in the new process namespace.
    child = os.fork()
    if child:
        _close_all(set())
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else SIGNALLED - code)
    os.setsid()
    with suppress(OSError):
        for capability in range(64):
            _check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()))
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _close_all(keep)


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _close_all(keep: set[int]) -> None:
    first = 3
    for descriptor in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, descriptor)
        first = descriptor + 1
