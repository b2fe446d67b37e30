"""The decorator of rubric functions. Imports nothing heavy, because every rubric file imports it."""

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
    `ground_truth: str` is accepted too, for a rubric that needs a ground truth. `extra_info` has no default, further
    parameters need one, and the return annotation may be missing.

    Calls drop a `data_source` argument that the function doesn't accept.

    Example:
        @osmosis_rubric
        def clear(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
            judge = {"provider": "openai", "model": "gpt-5-mini"}
            return evaluate_rubric("The answer is clear.", solution_str, judge, ground_truth=ground_truth)

    Returns:
        A wrapper with the original at `__wrapped__`. It raises TypeError if an argument has the wrong type, or if the
        function doesn't return a float.

    Raises:
        TypeError: The signature is wrong; the message says where and what to write.
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
