"""Find the `@osmosis_setup` functions of a repository's tools. For workers only, because it imports them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from osmosis_ai.discovery.source import python_files
from osmosis_ai.errors import RepositoryError
from osmosis_ai.mcp_tools.loading import import_failure
from osmosis_ai.tracebacks import locate_function

__all__ = ["Setup", "load_setups"]

DECORATOR = b"osmosis_setup"


class Setup(NamedTuple):
    """A setup function with its place."""

    file: str
    line: int
    function: Callable[[], Any]


def load_setups(mcp_dir: Path, root: Path) -> list[Setup]:
    """Return the setup functions in `mcp_dir`, in order of file and line. Call it after `load_server`.

    A file that mentions the decorator is imported if the server hasn't imported it. Raises RepositoryError, with the
    user's file and line, if that fails.
    """
    mcp_dir, root = mcp_dir.resolve(), root.resolve()
    found: dict[int, Setup] = {}
    for file in sorted(python_files(mcp_dir, root, [])):
        # A pipe of this name would be waited for.
        if not file.is_file() or DECORATOR not in file.read_bytes():
            continue
        modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == str(file)]
        if not modules:
            parts = file.relative_to(mcp_dir).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            try:
                modules = [importlib.import_module(name)]
            except BaseException as error:  # any exception of user code, even SystemExit, is the repository's failure
                shown = file.relative_to(root).as_posix()
                raise RepositoryError(import_failure(error, file, root, shown)) from error
        for value in [value for module in modules for value in vars(module).values()]:
            if callable(value) and getattr(value, "__osmosis_kind__", None) == "setup":
                place = locate_function(value, root)
                if place is not None:
                    found[id(value)] = Setup(place.file, place.line, value)
    return sorted(found.values(), key=lambda setup: setup[:2])
