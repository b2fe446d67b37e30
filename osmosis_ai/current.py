"""The rollout that running code belongs to, and setup functions. Imports only the standard library."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["CurrentRollout", "current_rollout", "osmosis_setup", "rollout_scope"]

F = TypeVar("F", bound=Callable[[], Any])


class _Scratch:
    """A folder that is created on first use."""

    def __init__(self, parent: str | None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._over = False

    def folder(self) -> Path:
        with self._lock:
            if self._over:
                raise RuntimeError("the rollout is over, and so is its scratch folder")
            if self._folder is None:
                if self._parent is not None:
                    Path(self._parent).mkdir(mode=0o700, parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix="osmosis-", dir=self._parent))
            return self._folder

    def remove(self) -> None:
        with self._lock:
            self._over = True
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class CurrentRollout:
    """The rollout that the calling tool, setup function or agent loop runs for.

    Attributes:
        id: The rollout's id. Every attempt at a row has its own.
        row_index: The row's position in the dataset, from 0; None if a trainer requested the rollout.
        metadata: The row's other columns, or the metadata of the trainer's request; never the ground truth.
    """

    id: str
    row_index: int | None
    metadata: Mapping[str, Any]
    _scratch: _Scratch = field(repr=False, compare=False)

    @property
    def scratch(self) -> Path:
        """This rollout's own folder, empty at first. It is created on first use, and removed when the rollout ends."""
        return self._scratch.folder()


_current: ContextVar[CurrentRollout | None] = ContextVar("current_rollout", default=None)


def current_rollout() -> CurrentRollout:
    """Return the rollout that the calling code runs for.

    Tools, `@osmosis_setup` functions and agent loops may call it, sync or async, and so may threads that run in a copy
    of their context (`asyncio.to_thread`).

    Raises:
        RuntimeError: The caller belongs to no rollout, such as code at import time, a reward function, or a server in
            another process.

    Example:
        >>> @mcp.tool
        ... def save(name: str, text: str) -> str:
        ...     (current_rollout().scratch / name).write_text(text)
        ...     return "saved"
    """
    found = _current.get()
    if found is None:
        raise RuntimeError(
            "current_rollout() was called outside a rollout; call it in a tool or an @osmosis_setup function, "
            "not while a module is imported"
        )
    return found


def osmosis_setup(function: F) -> F:
    """Mark a function in `mcp/` that runs before each rollout, in the rollout's session and within its time limit.

    The function takes no arguments, and may be async. If it raises, the rollout fails, and the model isn't called.

    Raises:
        TypeError: The function requires an argument.

    Example:
        >>> @osmosis_setup
        ... def open_shop() -> None:
        ...     shutil.copy("shop.db", current_rollout().scratch / "shop.db")
    """
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            name = getattr(function, "__name__", "the function")
            raise TypeError(
                f"@osmosis_setup: {name}: parameter `{parameter.name}` has no default, and nothing passes it; "
                "call osmosis_ai.current_rollout() for the row"
            )
    function.__osmosis_kind__ = "setup"  # type: ignore[attr-defined]
    return function


@contextmanager
def rollout_scope(
    rollout_id: str, row_index: int | None, metadata: Mapping[str, Any], scratch: str | None
) -> Iterator[None]:
    """Make a rollout the current one in the block, and remove its scratch folder afterwards.

    Args:
        rollout_id, row_index, metadata: As in `CurrentRollout`.
        scratch: The parent of scratch folders; None for the system's temporary folder.
    """
    own = _Scratch(scratch)
    token = _current.set(CurrentRollout(rollout_id, row_index, metadata, own))
    try:
        yield
    finally:
        _current.reset(token)
        own.remove()
