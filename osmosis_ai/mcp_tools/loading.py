"""Import a repository's `mcp/main.py` as `python mcp/main.py` would, and find the server in it.

For workers only: loading permanently changes the process's `sys.path`, `sys.argv` and `sys.modules`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

from osmosis_ai.errors import RepositoryError
from osmosis_ai.imports import SourceLoader, import_from, import_hint
from osmosis_ai.tracebacks import describe, locate

__all__ = ["import_failure", "import_fastmcp", "load_server", "prepare_path"]

_USUAL_NAMES = ("mcp", "server", "app")


class _StderrHandler(logging.Handler):
    """Writes to what is stderr now: in a worker, the log of the rollout that the calling code belongs to."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{record.levelname}: {self.format(record)}\n")


_STDERR = _StderrHandler()


def import_fastmcp() -> None:
    """Import fastmcp without the warnings of its own imports, which users can't fix."""
    with warnings.catch_warnings(record=True):
        import fastmcp  # noqa: F401
    log = logging.getLogger("fastmcp")
    # Its own handlers wrap lines, which cuts a long key in two that no masking finds, and need 0.1 s for a traceback.
    for handler in list(log.handlers):
        log.removeHandler(handler)
        log.addHandler(_STDERR)


def prepare_path(mcp_dir: Path, root: Path) -> None:
    """Make imports in this process work as in `python mcp/main.py` run in the repository's root.

    `sys.path` then begins with the mcp folder and the root. The SDK is imported first, so that `mcp` never means the
    repository's own folder. Call it once, before importing any code of the repository.
    """
    import_fastmcp()
    import mcp.types  # noqa: F401

    mcp_dir = mcp_dir.resolve()
    import_from(root, [str(mcp_dir), str(root.resolve())], scripts=mcp_dir)


def load_server(entry: Path, name: str | None = None) -> object:
    """Import `main.py` under the module name `main` and return the MCP server in it.

    The server is the variable `name`, else `mcp`, `server` or `app`, else the module's only server. It is a
    `fastmcp.FastMCP`, or the MCP SDK's `FastMCP` (1.x) or `MCPServer` (2.x). The parent of `main.py`'s folder is the
    repository's root. Call `prepare_path` first.

    Raises:
        RepositoryError: `main.py` is missing, can't be imported, or defines no server or several. The message gives the
            user's file, line and exception.
    """
    entry = entry.resolve()
    root = entry.parent.parent
    shown = entry.relative_to(root).as_posix()
    if not entry.is_file():
        raise RepositoryError(f"{shown}: there is no such file; it is where the MCP server is created")
    module = _import_main(entry, root, shown)
    servers = {key: value for key, value in vars(module).items() if _is_server(value)}
    if name is not None:
        return _named(module, name, servers, shown)
    usual = [servers[usual] for usual in _USUAL_NAMES if usual in servers]
    # By id, because several names may be bound to one server.
    distinct = usual[:1] or list({id(server): server for server in servers.values()}.values())
    if len(distinct) == 1:
        return distinct[0]
    if distinct:
        raise RepositoryError(
            f"{shown}: holds {len(distinct)} servers: {_listed(servers)}. "
            f"Name the one to use, as in `--mcp {shown}:{next(iter(servers))}`, or call it `mcp`."
        )
    raise RepositoryError(_no_server(module, shown, entry.parent))


def _import_main(entry: Path, root: Path, shown: str) -> ModuleType:
    loaded = sys.modules.get("main")
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(entry):
            return loaded
        raise RepositoryError(f"{shown}: another module called `main` is already loaded in this process")
    spec = importlib.util.spec_from_file_location("main", entry, loader=SourceLoader("main", str(entry)))
    if spec is None or spec.loader is None:  # never so for a path and a loader
        raise RepositoryError(f"{shown}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.argv[:] = [str(entry)]
    # Registered before it runs, so that `from main import mcp` in a tool module finds this very module.
    sys.modules["main"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as exc:  # whatever the user's code raises, SystemExit too, is the repository's failure
        sys.modules.pop("main", None)
        raise RepositoryError(import_failure(exc, entry, root, shown)) from exc
    return module


def import_failure(exc: BaseException, entry: Path, root: Path, shown: str) -> str:
    """Explain why a module of the repository can't be imported: place, exception, source line and a hint.

    If no line is known, the place is `shown`, the name of `entry`, the module's file.
    """
    place = locate(exc, root)
    message = f"{place or shown}: {describe(exc)}"
    if place is not None and place.text:
        message += f"\n    {place.text}"
    hint = _hint(exc, entry.parent, root, place.text if place else "")
    return f"{message}\n{hint}" if hint else message


def _hint(exc: BaseException, mcp_dir: Path, root: Path, line: str) -> str | None:
    if isinstance(exc, ImportError):
        missing = exc.name or ""
        text = str(exc)
        if missing.startswith("mcp.server.fastmcp") or (missing == "mcp.server" and "'FastMCP'" in text):
            return (
                "The installed MCP SDK is version 2, which has no FastMCP of its own. "
                "Write `from fastmcp import FastMCP` instead, or install `mcp<2`."
            )
        if missing.startswith("mcp.server.mcpserver") or (missing == "mcp.server" and "'MCPServer'" in text):
            return (
                "The installed MCP SDK is version 1, which has no MCPServer. "
                "Write `from fastmcp import FastMCP` instead, or install `mcp>=2`."
            )
        if hint := import_hint(exc, root, mcp_dir):
            return hint
    if isinstance(exc, SystemExit):
        return "The code exited while it was imported."
    if isinstance(exc, KeyboardInterrupt):
        return "The import was interrupted."
    if re.search(r"\.run(_\w+)?\(", line):
        return 'Start the server only when the file runs as a script: put it under `if __name__ == "__main__":`.'
    return None


def _named(module: ModuleType, name: str, servers: dict[str, object], shown: str) -> object:
    if name in servers:
        return servers[name]
    found = f"The servers there: {_listed(servers)}." if servers else "There is no server in it at all."
    if hasattr(module, name):
        raise RepositoryError(f"{shown}: `{name}` is {_kind(getattr(module, name))}, not an MCP server. {found}")
    raise RepositoryError(f"{shown}: has no `{name}`. {found}")


def _no_server(module: ModuleType, shown: str, mcp_dir: Path) -> str:
    message = f"{shown}: no MCP server found, in `mcp`, `server`, `app` or any other name"
    near = [
        f"`{usual}` is {_kind(getattr(module, usual))}"
        for usual in _USUAL_NAMES
        if hasattr(module, usual) and not isinstance(getattr(module, usual), ModuleType)
    ]
    message += f" ({'; '.join(near)}). " if near else ". "
    for other in list(sys.modules.values()):
        file = getattr(other, "__file__", None)
        if file and other is not module and Path(file).is_relative_to(mcp_dir):
            for key, value in list(vars(other).items()):
                if _is_server(value):
                    return message + f"There is one elsewhere; import it there: `from {other.__name__} import {key}`"
    return message + (
        'Create it when the module is imported, outside of functions and of `if __name__ == "__main__":`, '
        'for example: `from fastmcp import FastMCP`, then `mcp = FastMCP("tools")`'
    )


def _is_server(value: object) -> bool:
    return isinstance(value, _server_types())


@functools.cache
def _server_types() -> tuple[type, ...]:
    from fastmcp import FastMCP

    types: list[type] = [FastMCP]
    # One of the two exists, by SDK generation.
    for module, attribute in (("mcp.server.fastmcp", "FastMCP"), ("mcp.server.mcpserver", "MCPServer")):
        try:
            types.append(getattr(importlib.import_module(module), attribute))
        except ModuleNotFoundError:
            continue
    return tuple(types)


def _listed(servers: dict[str, object]) -> str:
    names: dict[int, list[str]] = {}
    for key, server in servers.items():
        names.setdefault(id(server), []).append(f"`{key}`")
    return ", ".join(" = ".join(same) for same in names.values())


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
