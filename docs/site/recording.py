"""Record docs/images/terminal.svg: the tutorial's first run, which finds a bug, and the run after the fix.

`python docs/site/recording.py [FILE]` runs the commands in a terminal, so the picture shows what a user sees.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text  # noqa: TID251 - a picture, not a terminal

DOCS = Path(__file__).parents[1]
FILE = re.compile(r"^```\w+ file=(mcp/main\.py|reward_fn/\S+|\S+\.jsonl)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("osmosis test", "sed -i s/3.048/0.3048/ mcp/main.py", "osmosis test")
COLUMNS = 92
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; line-height: {line_height}px; }}
.{unique_id}-title {{ font: bold 18px sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's SVG template, without the fonts that it would fetch."""


def main() -> None:
    """Record the commands to the file given as the argument, by default docs/images/terminal.svg."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images" / "terminal.svg"
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        for name, content in FILE.findall((DOCS / "tutorial.md").read_text(encoding="utf-8")):
            file = Path(folder, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(content, encoding="utf-8")
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "green"), (command, "bold")))
            console.print(Text.from_ansi(in_terminal(command, folder).strip("\n")))
    target.write_text(console.export_svg(title="osmosis", code_format=SVG, unique_id="terminal"), encoding="utf-8")


def in_terminal(command: str, folder: str) -> str:
    """Return what a command prints to a terminal of `COLUMNS` columns, without its progress, which goes to stderr."""
    own = {name: value for name, value in os.environ.items() if not re.match("OSMOSIS_|OPENAI_|NO_COLOR|CI$", name)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(  # noqa: S603 - one of the commands above
        command.split(),
        cwd=folder,
        env={**own, "PATH": path, "TERM": "xterm-256color", "OSMOSIS_MODEL": "offline/oracle"},
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    printed = bytearray()
    # On Linux, reading from a terminal fails once its last writer is gone.
    try:
        while data := os.read(reader, 65536):
            printed += data
    except OSError:
        pass
    os.close(reader)
    assert process.wait() == 0, f"{command}: {printed.decode()}"
    return printed.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main()
