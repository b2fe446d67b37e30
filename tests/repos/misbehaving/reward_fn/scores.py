"""A function that behaves, and one that does what the row's `fault` says."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from osmosis_ai import osmosis_reward

KEPT = []


@osmosis_reward
def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    return 1.0 if solution_str.strip() == ground_truth else 0.0


@osmosis_reward
def faulty(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:
    fault = extra_info.get("fault")
    with Path("seen").open("a", encoding="utf-8") as file:
        file.write(f"score:{fault} {os.getpid()}\n")
    if fault == "exits":
        os._exit(7)
    if fault == "segfaults":
        ctypes.string_at(0)
    if fault == "stops_itself":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stops_its_parent":
        os.kill(os.getppid(), signal.SIGSTOP)
    if fault == "raises_system_exit":
        raise SystemExit(3)
    if fault == "raises_keyboard_interrupt":
        raise KeyboardInterrupt
    if fault == "blocks":
        time.sleep(3600)
    if fault == "holds_the_interpreter":
        ctypes.PyDLL(None).sleep(3600)
    if fault == "leaks":
        # In one go and with the interpreter held, so that no time limit can come first, however busy the machine is.
        KEPT.append(b"x" * (1 << 30))
        time.sleep(3600)
    if fault == "leaves_children":
        subprocess.Popen(["sleep", "3600"])
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    if fault == "forks_and_dies":
        if ctypes.CDLL(None).fork() == 0:
            os.setsid()
            while True:
                signal.pause()
        os._exit(9)
    if fault == "floods":
        for _ in range(600):
            print("y" * 5_000)
        for _ in range(40):
            os.write(1, b"z" * 100_000 + b"\n")
    if fault == "returns_much":
        return "x" * 5_000_000
    if fault == "returns_an_object":
        return threading.Lock()
    return 0.5


async def blocks_the_loop(solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """Not decorated: scores only when it is named."""
    if extra_info.get("fault") == "blocks_the_loop":
        time.sleep(3600)
    return 0.25
