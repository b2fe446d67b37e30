"""Make the standard streams usable: closed ones, and encodings that lack characters."""

from __future__ import annotations

import codecs
import os
import sys

__all__ = ["discard_stdout", "prepare_streams"]


def prepare_streams() -> None:
    """Open closed standard streams on the null device; write characters that a stream's encoding lacks as in JSON.

    Call it before anything opens a file, which would take a closed stream's descriptor and receive its output.
    """
    codecs.register_error("osmosis", _escaped)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor, which is this one.
            # Inheritable, as standard streams are and what Python opens isn't.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "w" if descriptor else "r"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="osmosis")  # type: ignore[union-attr]


def discard_stdout() -> None:
    """Send the rest of the output to the null device, so that flushing it at exit doesn't fail again."""
    # Not by replacing `sys.stdout`, whose old object would still flush its buffer at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    # JSON escapes UTF-16 units: two of them for a character such as an emoji.
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place]:02x}{units[place + 1]:02x}" for place in range(0, len(units), 2)), error.end
