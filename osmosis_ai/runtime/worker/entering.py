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
PR_SET_SECCOMP = 22
SECCOMP_FILTER = 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
X32 = 0x40000000

# memfd_create, memfd_secret and shmget make memory that no process has to hold, so no limit would bound it; add_key,
# request_key and keyctl reach the user's keyrings, and io_uring_setup gets around these filters.
REFUSED = {
    "x86_64": (0xC000003E, (319, 447, 29, 248, 249, 250, 425)),
    "aarch64": (0xC00000B7, (279, 447, 194, 217, 218, 219, 425)),
}
"""Machines: the number of the architecture, and those of the system calls that are refused."""
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
    if (machine := os.uname().machine) in REFUSED:
        _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(_filter(*REFUSED[machine])), 0, 0))
    _close_all(keep)


class _Instruction(ctypes.Structure):
    """One instruction of a filter: `struct sock_filter`. `yes` and `no` are the instructions to skip."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("yes", ctypes.c_uint8),
        ("no", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    """A filter: `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _filter(architecture: int, refused: tuple[int, ...]) -> _Program:
    """Return a filter that refuses these system calls, and every call of another architecture."""
    calls = [(EQUAL, number) for number in refused]
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
    # The number of skipped instructions leads each match to the last one.
    steps += [(code, len(calls) + 1 - at, 0, value) for at, (code, value) in enumerate([(AT_LEAST, X32), *calls])]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return _Program(len(steps), (_Instruction * len(steps))(*(_Instruction(*step) for step in steps)))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _close_all(keep: set[int]) -> None:
    first = 3
    for descriptor in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, descriptor)
        first = descriptor + 1
