"""State of the process, as careless repositories keep it."""

import os
from pathlib import Path

SEEN = Path(__file__).with_name("seen")
rollouts = 0


def note(word):
    global rollouts
    rollouts += 1
    with SEEN.open("a", encoding="utf-8") as file:
        file.write(f"{word} {os.getpid()}\n")
