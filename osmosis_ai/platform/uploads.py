"""A file from the network: streamed to disk, hashed, and under its name only when it is whole and durable."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread

__all__ = ["UploadError", "receive_file", "sync_folder"]

CHUNK = 1 << 20
PART = ".part"


class UploadError(Exception):
    """What came isn't the file that was announced."""


async def receive_file(target: Path, stream: AsyncIterator[bytes], size: int, sha256: str | None = None) -> str:
    """Write a file of this size, and of this hash if that is known, and return its hash; raise UploadError, OSError."""
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}{PART}")
    try:
        digest, written = await _write(part, stream, size)
        if written != size:
            raise UploadError(f"the upload has {written} bytes, not the {size} that were announced")
        if sha256 not in (None, digest):
            raise UploadError("the upload isn't the file that was announced: its hash differs")
        await anyio.to_thread.run_sync(part.replace, target)
        await anyio.to_thread.run_sync(sync_folder, target.parent)
    finally:
        part.unlink(missing_ok=True)
    return digest


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def _write(part: Path, stream: AsyncIterator[bytes], limit: int) -> tuple[str, int]:
    digest, size, waiting = hashlib.sha256(), 0, bytearray()

    def flush() -> None:
        digest.update(waiting)
        file.write(waiting)
        waiting.clear()

    def sync() -> None:
        flush()
        file.flush()
        os.fsync(file.fileno())

    with part.open("wb") as file:
        async for chunk in stream:
            size += len(chunk)
            if size > limit:
                raise UploadError(f"the upload has more than the {limit} bytes that were announced")
            waiting += chunk
            if len(waiting) >= CHUNK:
                await anyio.to_thread.run_sync(flush)
        await anyio.to_thread.run_sync(sync)
    return digest.hexdigest(), size
