"""The decorator of reward functions. Imports nothing heavy, because every reward file imports it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from osmosis_ai.decorators import Expected, check_signature, wrap

__all__ = ["osmosis_reward"]

F = TypeVar("F", bound=Callable[..., Any])

_STR = frozenset({"str"})
_DICT = frozenset({"dict"})
_EXPECTED = (
    Expected("solution_str: str", (_STR,)),
    Expected("ground_truth: str", (_STR,)),
    Expected("extra_info: dict = None", (_DICT, _DICT | {"None"}), default=True),
)
_FORM = "(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float"


def osmosis_reward(function: F) -> F:
    """Mark a function, sync or async, as a reward function.

    A function whose first parameter is `solution_str` must have the classic signature
    `(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float`. `extra_info` may also be
    `dict | None`, further parameters need a default, and the return annotation may be missing. It must return a float,
    not an int or a bool. Any other function is accepted unchanged, and the decorator doesn't check its result.

    Calls drop a `data_source` argument that the function doesn't accept.

    Example:
        @osmosis_reward
        def exact(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float:
            return float(solution_str.strip() == ground_truth)

    Returns:
        A wrapper with the original at `__wrapped__`. It raises TypeError if a classic function doesn't return a float.

    Raises:
        TypeError: The signature isn't the classic one; the message says where and what to write.
    """
    parameters = inspect.signature(function).parameters
    classic = next(iter(parameters), None) == "solution_str"
    if classic:
        check_signature(function, "@osmosis_reward", _EXPECTED, _FORM)
    return wrap(function, "@osmosis_reward", "reward", returns_float=classic)
