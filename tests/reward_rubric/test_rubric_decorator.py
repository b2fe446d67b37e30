"""@osmosis_rubric: accepted and refused signatures, and the error messages."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from osmosis_ai import osmosis_rubric

HEADERS = {
    "real": "from typing import *\nimport typing\n",
    "strings": "from __future__ import annotations\nfrom typing import *\nimport typing\n",
}
SIGNATURE = "(solution_str: str, ground_truth: str | None, extra_info: dict) -> float"


def define(signature: str = SIGNATURE, header: str = HEADERS["real"], body: str = "return 1.0") -> Callable[..., Any]:
    """Decorate `def judge<signature>`, as the text of a module of its own."""
    names: dict[str, Any] = {"osmosis_rubric": osmosis_rubric}
    source = f"{header}\n@osmosis_rubric\ndef judge{signature}:\n    {body}\n"
    # Not to inherit this module's own `from __future__ import annotations`.
    exec(compile(source, "judge.py", "exec", dont_inherit=True), names)
    function: Callable[..., Any] = names["judge"]
    return function


@pytest.mark.parametrize("header", HEADERS.values(), ids=list(HEADERS))
@pytest.mark.parametrize(
    "signature",
    [
        SIGNATURE,
        "(solution_str: str, ground_truth: Optional[str], extra_info: dict) -> float",
        "(solution_str: str, ground_truth: typing.Optional[str], extra_info: dict)",
        "(solution_str: str, ground_truth: Union[None, str], extra_info: dict) -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict) -> float",
        "(solution_str: str, ground_truth: str | None, extra_info: dict[str, Any], **kwargs) -> float",
        "(solution_str: 'str', ground_truth: 'str | None', extra_info: 'dict') -> 'float'",
        "(solution_str: str, ground_truth: str | None, extra_info: dict, strict: bool = True) -> float",
    ],
)
def test_the_signature_is_accepted(signature: str, header: str) -> None:
    judge = define(signature, header)
    assert judge("text", None, {}) == 1.0
    assert judge(solution_str="text", ground_truth="answer", extra_info={"model": "m"}, data_source="d") == 1.0


@pytest.mark.parametrize("header", HEADERS.values(), ids=list(HEADERS))
@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ("()", "parameter 1 is missing, expected `solution_str: str`"),
        (
            "(messages: list, ground_truth: str | None, extra_info: dict)",
            "parameter 1 is `messages: .*`, expected `sol",
        ),
        ("(solution_str: str, ground_truth: str | None)", "parameter 3 is missing, expected `extra_info: dict`"),
        (
            "(solution_str: str, extra_info: dict, ground_truth: str | None)",
            "parameter 2 is `extra_info: .*`, expected",
        ),
        ("(solution_str, ground_truth: str | None, extra_info: dict)", "`solution_str` has no annotation"),
        ("(solution_str: str | None, ground_truth: str | None, extra_info: dict)", "`solution_str` is written"),
        ("(solution_str: str, ground_truth: int | None, extra_info: dict)", "`ground_truth` is written .*int"),
        ("(solution_str: str, ground_truth: str | None, extra_info: dict | None)", "`extra_info` is written"),
        ("(solution_str: str, ground_truth: str | None, extra_info: dict = None)", "`extra_info` must have no default"),
        ("(solution_str: str, ground_truth: str | None, extra_info: dict, weight)", "`weight` has no default"),
        ("(solution_str: str, ground_truth: str | None, extra_info: dict) -> str", "return annotation is `str`"),
    ],
)
def test_another_signature_is_refused_at_decoration(signature: str, problem: str, header: str) -> None:
    with pytest.raises(TypeError, match=problem) as caught:
        define(signature, header)
    message = str(caught.value)
    assert message.startswith("@osmosis_rubric: judge: ")
    assert message.endswith(
        "Write: def judge(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float"
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((1, None, {}), "argument `solution_str` must be a str, but 1 is of type int"),
        ((None, None, {}), "argument `solution_str` must be a str, but None is of type NoneType"),
        (("text", 42, {}), "argument `ground_truth` must be a str or None, but 42 is of type int"),
        (("text", None, None), "argument `extra_info` must be a dict, but None is of type NoneType"),
        (("text", None, [1]), r"argument `extra_info` must be a dict, but \[1\] is of type list"),
    ],
)
def test_an_argument_of_another_type_is_refused_at_the_call(arguments: tuple[Any, ...], problem: str) -> None:
    judge = define(body="raise AssertionError('was called')")
    with pytest.raises(TypeError, match=f"@osmosis_rubric: judge: {problem}"):
        judge(*arguments)
    with pytest.raises(TypeError, match=problem):
        judge(**dict(zip(("solution_str", "ground_truth", "extra_info"), arguments, strict=True)))


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(TypeError, match="judge: missing a required argument: 'extra_info'"):
        define()("text", None)


@pytest.mark.parametrize("value", ["1", "True", "None", "'0.5'"])
def test_a_result_that_is_no_float_is_a_type_error(value: str) -> None:
    with pytest.raises(TypeError, match=r"@osmosis_rubric: judge returned .* must return a float"):
        define(body=f"return {value}")("text", None, {})


def test_async_functions_are_checked_alike() -> None:
    @osmosis_rubric
    async def judge(solution_str: str, ground_truth: str | None, extra_info: dict[str, Any]) -> float:
        return extra_info.get("value", 0.5)  # type: ignore[no-any-return]

    assert inspect.iscoroutinefunction(judge)
    assert asyncio.run(judge("text", None, {})) == 0.5
    with pytest.raises(TypeError, match="`solution_str` must be a str"):
        asyncio.run(judge(5, None, {}))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned 'high'"):
        asyncio.run(judge("text", None, {"value": "high"}))


def test_the_original_stays_reachable_and_the_mark_is_set() -> None:
    judge: Any = define()
    assert judge.__osmosis_kind__ == "rubric"
    assert judge.__wrapped__(7, None, {}) == 1.0
