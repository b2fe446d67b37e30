"""Tools that take their process down, hold it up, or leave something behind. Each writes where it ran to `seen`."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from fastmcp import FastMCP

mcp = FastMCP("misbehaving")
KEPT = []


def leave_trace(name: str) -> None:
    with Path("seen").open("a", encoding="utf-8") as file:
        file.write(f"{name} {os.getpid()}\n")


@mcp.tool
def fine() -> str:
    """Behave."""
    leave_trace("fine")
    return "fine"


@mcp.tool
def exits() -> str:
    """End the process."""
    leave_trace("exits")
    os._exit(7)


@mcp.tool
def segfaults() -> str:
    """Read from address 0."""
    leave_trace("segfaults")
    ctypes.string_at(0)
    return "not reached"


@mcp.tool
def stops_itself() -> str:
    """Stop the process."""
    leave_trace("stops_itself")
    os.kill(os.getpid(), signal.SIGSTOP)
    return "not reached"


@mcp.tool
def stops_its_parent() -> str:
    """Stop the process that this one was forked from."""
    leave_trace("stops_its_parent")
    os.kill(os.getppid(), signal.SIGSTOP)
    return "stopped"


@mcp.tool
async def raises_system_exit() -> str:
    """Raise SystemExit on the event loop."""
    sys.exit(3)


@mcp.tool
def raises_keyboard_interrupt() -> str:
    """Raise KeyboardInterrupt in a thread."""
    raise KeyboardInterrupt


@mcp.tool
async def blocks_a_thread() -> str:
    """Sleep for an hour in a thread."""
    await asyncio.to_thread(time.sleep, 3600)
    return "not reached"


@mcp.tool
async def blocks_the_loop() -> str:
    """Sleep for an hour on the event loop."""
    leave_trace("blocks_the_loop")
    time.sleep(3600)
    return "not reached"


@mcp.tool
def holds_the_interpreter() -> str:
    """Sleep for an hour in C code that lets no other thread run."""
    leave_trace("holds_the_interpreter")
    ctypes.PyDLL(None).sleep(3600)
    return "not reached"


@mcp.tool
def leaks() -> str:
    """Take memory until somebody objects."""
    leave_trace("leaks")
    # In one go and with the interpreter held, so that no time limit can come first, however busy the machine is.
    KEPT.append(b"x" * (1 << 30))
    time.sleep(3600)


@mcp.tool
def leaves_children() -> str:
    """Start processes and forget them: one in this group, one in a session of its own."""
    leave_trace("leaves_children")
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    return "left two"


@mcp.tool
def detaches() -> str:
    """Start a process that is nobody's child, in a session of its own."""
    leave_trace("detaches")
    detach = "import subprocess; subprocess.Popen(['sleep', '3600'], start_new_session=True)"
    subprocess.run([sys.executable, "-c", detach], check=True)
    return "detached one"


@mcp.tool
def leaves_children_and_dies() -> str:
    """Start the same two processes and end this one, so that nobody is left who knows them."""
    leave_trace("leaves_children_and_dies")
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    os._exit(8)


@mcp.tool
def forks() -> str:
    """Fork this process twice; the copies keep everything that was open, one of them in a session of its own."""
    leave_trace("forks")
    for session in (False, True):
        if os.fork() == 0:
            if session:
                os.setsid()
            while True:
                time.sleep(3600)
    return "forked"


@mcp.tool
def forks_and_dies() -> str:
    """Fork this process, then end it: what the copies keep open must not keep the run waiting."""
    leave_trace("forks_and_dies")
    libc = ctypes.CDLL(None)  # below Python, where no hook of it can run
    for session in (False, True):
        if libc.fork() == 0:
            if session:
                os.setsid()
            while True:
                signal.pause()
    os._exit(9)


@mcp.tool
def floods() -> str:
    """Write megabytes to stdout, from Python and from below it."""
    for _ in range(600):
        print("y" * 5_000)
    for _ in range(40):
        os.write(1, b"z" * 100_000 + b"\n")
    return "flooded"


@mcp.tool
def returns_much() -> str:
    """Return 5 MB."""
    return "x" * 5_000_000


@mcp.tool
def returns_an_object() -> object:
    """Return what isn't JSON."""
    return threading.Lock()
