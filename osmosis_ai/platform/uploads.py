"""Receive a file from the network: stream it to disk, hash it, and give it its name only once complete and durable."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import anyio.to_thread

__all__ = ["UploadError", "receive_file", "sync_folder"]

CHUNK = 1 << 20
"""Bytes per write. Each write is handed to a thread, which costs too much for every part that arrives."""
PART = ".part"


class UploadError(Exception):
    """The upload differs from the announced file."""


async def receive_file(target: Path, stream: AsyncIterator[bytes], size: int, sha256: str | None = None) -> str:
    """Write an upload to `target`, and return its hash.

    Args:
        target: The file, which appears only once it is complete.
        stream: The content, in parts.
        size: The expected size in bytes.
        sha256: The expected hash, if known.

    Raises:
        UploadError: The size or the hash differs.
        OSError: The file can't be written.
    """
    # A name of its own, because a client that retries may still be sending the first time.
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}{PART}")
    try:
        try:
            digest, written = await _write(part, stream, size)
            if written != size:
                raise UploadError(f"the upload has {written} bytes, not the announced {size}")
            if sha256 not in (None, digest):
                raise UploadError("the upload's hash differs from the announced file's")
            await anyio.to_thread.run_sync(part.replace, target)
            await anyio.to_thread.run_sync(sync_folder, target.parent)
        finally:
            part.unlink(missing_ok=True)
    except OSError:
        await _discard(stream, size)
        raise
    return digest


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that new and renamed files in it survive a power failure."""
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
                raise UploadError(f"the upload has more than the announced {limit} bytes")
            waiting += chunk
            if len(waiting) >= CHUNK:
                await anyio.to_thread.run_sync(flush)
        await anyio.to_thread.run_sync(sync)
    return digest.hexdigest(), size


async def _discard(stream: AsyncIterator[bytes], limit: int) -> None:
    """Read the rest of an upload: a client that is still sending sees a reset connection, and not the answer."""
    async for chunk in stream:
        limit -= len(chunk)
        if limit < 0:
            return
