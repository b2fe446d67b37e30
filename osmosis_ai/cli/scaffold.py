"""Write the files of a template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osmosis_ai.errors import UsageError

__all__ = ["TEMPLATES", "template", "write_new"]

TEMPLATES = Path(__file__).parents[1] / "templates"


def template(file: Path, name: str) -> str:
    """Return the text of a template for something of this name."""
    return file.read_text(encoding="utf-8").replace("@NAME@", name)


def write_new(folder: Path, files: Mapping[Path, str], command: str, *, overwrite: bool = False) -> None:
    """Write files in `folder`, all or none.

    Raises UsageError if one exists, unless `overwrite` is set, or can't be written; `command` is what the message says
    about overwriting.
    """
    existing = [path for path in files if path.exists() or path.is_symlink()]
    if existing and not overwrite:
        names = ", ".join(path.relative_to(folder).as_posix() for path in existing[:5])
        more = f" and {len(existing) - 5} more" if len(existing) > 5 else ""
        raise UsageError(f"{folder} already has {names}{more}, and {command}")
    blocking = [parent for path in files for parent in path.parents if parent.exists() and not parent.is_dir()]
    if blocking:
        raise UsageError(f"{blocking[0]} is a file, not a folder")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # `x` refuses a file that appeared since the check.
            with path.open("w" if overwrite else "x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} can't be written: {error.strerror or error}") from None
