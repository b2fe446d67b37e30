"""Find errors in a server's output: the traceback of a reported error, and a missing module that ended the server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.text import cut

__all__ = ["Raised", "find_missing", "find_raised"]

MAX_LINES = 200
MAX_CHARACTERS = 20_000
# Our own SDK adds that it shows only the repository's code.
START = "Traceback (most recent call last"
MISSING = re.compile(r"^ModuleNotFoundError: (?:No module named '(?P<module>[\w-]+)|.*osmosis-ai\[(?P<extra>[\w-]+)\])")
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')


class Raised(NamedTuple):
    """Where an error was raised: the innermost line of the rollout's own code, relative to the root, and the traceback.

    `type` is the name of the exception's class.
    """

    file: str
    line: int
    detail: str
    type: str


def find_raised(output: Sequence[str], message: str, folder: Path, root: Path) -> Raised | None:
    """Return the latest traceback that ends with this error message and passes through a file in `folder`."""
    text = message.strip().partition("\n")[0]
    if not text:
        return None
    for end in range(len(output) - 1, -1, -1):
        if not re.match(r"^[\w.]+: ", output[end]) or not output[end].endswith(f": {text}"):
            continue
        for start in range(end - 1, max(end - MAX_LINES, -1), -1):
            if START in output[start]:
                heading = output[start][output[start].index(START) :]
                return _raised([heading, *output[start + 1 : end + 1]], folder, root)
    return None


def _raised(trace: Sequence[str], folder: Path, root: Path) -> Raised | None:
    found = None
    for line in trace:
        frame = FRAME.match(line)
        if frame is None:
            continue
        # Our own SDK's paths are relative to the rollout's folder.
        file = folder / frame["file"]
        # Packages installed below the folder aren't the rollout's own code.
        if file.is_relative_to(folder) and "site-packages" not in frame["file"]:
            found = os.path.relpath(file, root), int(frame["line"])
    if found is None:
        return None
    name = trace[-1].partition(": ")[0].rpartition(".")[2]
    return Raised(*found, cut("\n".join(trace), MAX_CHARACTERS), name)


def find_missing(output: Sequence[str], folder: Path, *, own_sdk: bool) -> str | None:
    """Return how to install the module that a server was missing; None if it ended for another reason.

    Args:
        output: The server's last lines.
        folder: The rollout's folder.
        own_sdk: True if the server ran on the current interpreter.
    """
    match = next((match for line in reversed(output) if (match := MISSING.match(line))), None)
    if match is None:
        return None
    what = f"osmosis-ai[{match['extra']}]" if match["extra"] else match["module"]
    if own_sdk:
        return f"install it beside osmosis: {sys.executable} -m pip install '{what}'"
    return f"add {what} to `dependencies` in {folder / 'pyproject.toml'}"
