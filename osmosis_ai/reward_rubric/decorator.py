"""The decorator of rubric functions. Imports nothing heavy: repositories import it in every rubric file."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from osmosis_ai.decorators import Expected, check_signature, wrap

__all__ = ["osmosis_rubric"]

F = TypeVar("F", bound=Callable[..., Any])

_STR = frozenset({"str"})
_EXPECTED = (
    Expected("solution_str: str", (_STR,)),
    Expected("ground_truth: str | None", (_STR | {"None"}, _STR)),
    Expected("extra_info: dict", (frozenset({"dict"}),), default=False),
)
_FORM = "(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float"


def osmosis_rubric(function: F) -> F:
    """Mark a function, sync or async, as a rubric function.

    It must have the signature `(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float`.
    `ground_truth: str` is accepted too, for a rubric that isn't meant for rows without one. `extra_info` has no
    default, further parameters need one, and the return annotation may be missing.

    A `data_source` argument is dropped from a call when the function can't take it.

    Args:
        function: The function to mark.

    Returns:
        A wrapper with the original at `__wrapped__`. It raises TypeError when an argument has the wrong type or when
        the function returns no float.

    Raises:
        TypeError: The signature is not kept; the message says where and what to write.
    """
    check_signature(function, "@osmosis_rubric", _EXPECTED, _FORM)
    return wrap(function, "@osmosis_rubric", "rubric", check_arguments=_check_arguments)


def _check_arguments(arguments: dict[str, Any]) -> None:
    wanted: tuple[tuple[str, tuple[type, ...], str], ...] = (
        ("solution_str", (str,), "a str"),
        ("ground_truth", (str, type(None)), "a str or None"),
        ("extra_info", (dict,), "a dict"),
    )
    for name, kinds, text in wanted:
        if name in arguments and not isinstance(arguments[name], kinds):
            value = arguments[name]
            raise TypeError(
                f"argument `{name}` must be {text}, but {reprlib.repr(value)} is of type {type(value).__name__}"
            )
