"""Name the missing extra of this package when the import of an agent framework fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str, *modules: str) -> Iterator[None]:
    """Name an extra in the error of a failing import in this block, if the extra provides the missing module.

    Args:
        extra: The extra.
        modules: Its top-level modules.

    Raises:
        ModuleNotFoundError: A module of the extra is missing. Other errors stay as they are.
    """
    try:
        yield
    except ImportError as error:
        # openai-agents raises an ImportError of its own if litellm is missing.
        missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if not isinstance(missing, ModuleNotFoundError) or missing.name not in modules:
            raise
        message = f"{missing.name} isn't installed: pip install 'osmosis-ai[{extra}]'"
        raise ModuleNotFoundError(message, name=missing.name, path=missing.path) from error
