"""Find the agent loop that `-m MODULE:ATTRIBUTE` names, without importing it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from osmosis_ai.discovery.scan import bound_names, find_module, is_installed, near
from osmosis_ai.discovery.source import UnreadableError, importable_functions, parse_file, relative_to_root
from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record

__all__ = ["AgentSource", "resolve_agent"]


class AgentSource(Record, frozen=True):
    """An agent loop that is named but not loaded.

    `module` and `attribute` say how to import it, with `root` first on `sys.path`. `file` is its source, relative to
    `root` if inside, `line` the line that binds it, and `folder` the top folder of its package.
    """

    module: str
    attribute: str
    root: str
    file: str | None = None
    line: int | None = None
    folder: str | None = None

    @property
    def name(self) -> str:
        """The `MODULE:ATTRIBUTE` that named it."""
        return f"{self.module}:{self.attribute}"


def resolve_agent(text: str, cwd: Path) -> AgentSource:
    """Resolve a `-m` value such as `server:agent_loop` or `mypackage.agents:MyAgent`.

    The module is searched for in the working directory, then among installed packages. The source shows, as far as it
    can, that the attribute exists; only a worker that loads it knows its type. Raises UsageError.
    """
    module, colon, attribute = (part.strip() for part in text.partition(":"))
    if not colon or not attribute.isidentifier() or not _is_dotted(module):
        raise UsageError(_malformed(text, module, attribute))
    found = find_module(module, cwd)
    if found is not None and found.origin is not None:
        return _in_file(module, attribute, cwd, Path(found.origin))
    if found is None and is_installed(module, [cwd]):
        return AgentSource(module, attribute, str(cwd))
    if found is not None:
        raise UsageError(f"-m {text}: {module} is a folder; name a module in it: {module}.MODULE:{attribute}")
    if module.endswith(".py"):
        raise UsageError(_malformed(text, module, attribute))
    python = sorted(file.stem for file in cwd.glob("*.py"))
    close = near(module, python)
    hint = f" The modules there: {', '.join(python[:10])}." if python else ""
    raise UsageError(f"-m {text}: there is no module {module} in {cwd}{close}{hint}")


def _is_dotted(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def _malformed(text: str, module: str, attribute: str) -> str:
    path = module.replace("\\", "/").removeprefix("./")
    dotted = path.removesuffix(".py").strip("/").replace("/", ".")
    if dotted and dotted != module and _is_dotted(dotted):
        return f"-m {text}: the module is written with dots, as in an import: {dotted}:{attribute or 'agent_loop'}"
    if _is_dotted(module) and not attribute:
        return f"-m {text}: the name of the loop is missing; write MODULE:ATTRIBUTE, for example {module}:agent_loop"
    return f"-m {text!r} names no agent loop; write MODULE:ATTRIBUTE, for example server:agent_loop"


def _in_file(module: str, attribute: str, cwd: Path, file: Path) -> AgentSource:
    shown = relative_to_root(file, cwd)
    package = Path(shown).parts[0] if len(Path(shown).parts) > 1 else None
    source = AgentSource(module, attribute, str(cwd), shown, folder=package)
    if file.suffix != ".py":
        return source
    try:
        tree = parse_file(file)
    except UnreadableError:
        # The worker that imports it reports the error.
        return source
    bound = bound_names(tree)
    names = {**(bound or {}), **{node.name: node.lineno for node in importable_functions(tree)}}
    # If the module binds names dynamically, only the worker that imports it can tell.
    if bound is None or attribute in names:
        return msgspec.structs.replace(source, line=names.get(attribute))
    raise UsageError(f"-m {module}:{attribute}: there is no {attribute} in {shown}{near(attribute, names)}")
