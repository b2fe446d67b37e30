"""What a child process prints, line by line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

__all__ = ["output_lines"]


async def output_lines(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield each line that a process prints, until it ends. A notice replaces a line beyond the reader's limit."""
    while True:
        try:
            line = await output.readline()
        # asyncio raises it for a line beyond the limit, and drops what it has read of the line. A progress bar that
        # ends with a carriage return is one line for hours.
        except ValueError:
            yield "[a line that is too long]"
            continue
        if not line:
            return
        yield line.decode("utf-8", "replace").rstrip()
