"""A document's shell session: `osmosis` runs in this process, everything else in bash."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from commands import run_merged

SYNTAX = re.compile(r"[|<>&;()$`*]|^(until|cd)\b")
"""What only bash understands."""
ASSIGNMENT = re.compile(r"(?:export )?([A-Z_]+)=(\S*)$")


class Shell:
    """Runs one command after the other, as if they had been typed.

    Args:
        folder: The working directory.
        environ: Environment variables at the start.
    """

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = dict(environ)
        self.code = 0

    def run(self, command: str) -> str:
        """Run a command and return its stdout and stderr; `code` is then its exit code."""
        if command == "echo $?":
            output, self.code = f"{self.code}\n", 0
        elif entered := re.fullmatch(r"cd (\S+)", command):
            self.folder, output = self.folder / entered[1], ""
        elif SYNTAX.search(_without_quoted(command)):
            output = self._bash(command)
        elif exported := ASSIGNMENT.match(command):
            self.environ[exported[1]], output = exported[2], ""
        else:
            words = shlex.split(command)
            environ = dict(self.environ)
            while assigned := ASSIGNMENT.match(words[0]):
                environ[assigned[1]] = assigned[2]
                del words[0]
            if words[0] == "osmosis":
                self.code, output = run_merged(*words[1:], cwd=self.folder, environ=environ)
            else:
                output = self._bash(command)
        return output

    def _bash(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=300,
        )
        self.code = done.returncode
        return done.stdout


def script(block: str) -> list[str]:
    """The commands of a block of shell code: one a line, or the whole block when its lines belong together."""
    joined = block.replace("\\\n", " ")
    if re.search(r"&$|^until\b", joined, re.MULTILINE):
        return [joined]
    return joined.splitlines()


def _without_quoted(command: str) -> str:
    return re.sub(r"'[^']*'", "", command)
