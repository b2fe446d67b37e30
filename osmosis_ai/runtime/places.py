"""Tell what a worker loads from where that lies: workers may run on another machine than the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from osmosis_ai.runtime.protocol import Places, WorkerSpec

__all__ = ["attach", "detach"]


def detach(spec: WorkerSpec) -> tuple[WorkerSpec, Places]:
    """Take the paths of this machine out of a spec.

    Args:
        spec: What a worker loads, by paths of this machine.

    Returns:
        The spec with the root left open and paths relative to it, and where things are on this machine.
    """
    root = os.path.normpath(Path(spec.root).absolute())
    places = Places(root, store=spec.store, cache=spec.cache, debug_dir=spec.debug_dir)
    named = _with_paths(spec, lambda path: os.path.relpath(path, root))
    return msgspec.structs.replace(named, root="", store=None, cache=None, debug_dir=None), places


def attach(spec: WorkerSpec, places: Places) -> WorkerSpec:
    """Put the paths of the worker's machine into a spec.

    Args:
        spec: What `detach` gave.
        places: Where things are on this machine.
    """
    found = _with_paths(spec, lambda path: os.path.normpath(Path(places.root, path)))
    return msgspec.structs.replace(
        found, root=places.root, store=places.store, cache=places.cache, debug_dir=places.debug_dir
    )


def _with_paths(spec: WorkerSpec, change: Callable[[str], str]) -> WorkerSpec:
    replace = msgspec.structs.replace
    mcp, agent = spec.mcp, spec.agent
    return replace(
        spec,
        mcp=replace(mcp, path=change(mcp.path)) if mcp is not None and mcp.path is not None else mcp,
        agent=replace(agent, root=change(agent.root)) if agent is not None else None,
        functions=[replace(ref, root=change(ref.root)) for ref in spec.functions],
    )
