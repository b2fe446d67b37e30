"""@osmosis_reward: accepted and refused signatures, and the error messages."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from osmosis_ai import osmosis_reward

HEADERS = {
    "real": "from typing import *\nimport typing\n",
    "strings": "from __future__ import annotations\nfrom typing import *\nimport typing\n",
}


def define(signature: str, header: str = HEADERS["real"], body: str = "return 1.0") -> Callable[..., Any]:
    """Decorate `def score<signature>`, as the text of a module of its own."""
    names: dict[str, Any] = {"osmosis_reward": osmosis_reward}
    source = f"{header}\n@osmosis_reward\ndef score{signature}:\n    {body}\n"
    # Not to inherit this module's own `from __future__ import annotations`.
    exec(compile(source, "score.py", "exec", dont_inherit=True), names)
    function: Callable[..., Any] = names["score"]
    return function


@pytest.mark.parametrize("header", HEADERS.values(), ids=list(HEADERS))
@pytest.mark.parametrize(
    "signature",
    [
        "(solution_str: str, ground_truth: str, extra_info: dict = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs)",
        "(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: None | dict = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: Optional[dict] = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: typing.Optional[dict] = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: Union[dict, None] = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict[str, Any] = {}) -> float",
        "(solution_str: str, ground_truth: str, extra_info: Dict = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: Optional[Dict[str, Any]] = None) -> float",
        "(solution_str: 'str', ground_truth: 'str', extra_info: 'dict | None' = None) -> 'float'",
        "(solution_str: str, ground_truth: str, extra_info: Optional['dict'] = None) -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict = None, data_source: str = '') -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict = None, *, data_source) -> float",
        "(solution_str: str, ground_truth: str, extra_info: dict = None, tolerance: float = 0.1, *args) -> float",
        "(solution_str: str, *, ground_truth: str, extra_info: dict = None) -> float",
    ],
)
def test_the_classic_signature_is_accepted(signature: str, header: str) -> None:
    assert define(signature, header)(solution_str="a", ground_truth="b", data_source="c") == 1.0


@pytest.mark.parametrize("header", HEADERS.values(), ids=list(HEADERS))
@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ("(solution_str: str)", "parameter 2 is missing, expected `ground_truth: str`"),
        ("(solution_str: str, ground_truth: str)", "parameter 3 is missing, expected `extra_info: dict = None`"),
        ("(solution_str: str, ground_truth: str, **kwargs)", r"parameter 3 is `\*\*kwargs`, expected `extra_info"),
        (
            "(solution_str: str, answer: str, extra_info: dict = None)",
            "parameter 2 is `answer: .*`, expected `ground_t",
        ),
        ("(solution_str: str, extra_info: dict = None, ground_truth: str = '')", "parameter 2 is `extra_info"),
        ("(solution_str: str, *ground_truth: str, extra_info: dict = None)", r"parameter 2 is `\*ground_truth"),
        ("(solution_str, ground_truth: str, extra_info: dict = None)", "`solution_str` has no annotation"),
        ("(solution_str: str, ground_truth, extra_info: dict = None)", "`ground_truth` has no annotation"),
        ("(solution_str: str, ground_truth: str, extra_info=None)", "`extra_info` has no annotation"),
        ("(solution_str: bytes, ground_truth: str, extra_info: dict = None)", "`solution_str` is written .*bytes"),
        ("(solution_str: str, ground_truth: str | None, extra_info: dict = None)", r"`ground_truth` is written .*None"),
        (
            "(solution_str: str, ground_truth: Optional[str], extra_info: dict = None)",
            "`ground_truth` is written .*Opt",
        ),
        ("(solution_str: str, ground_truth: str, extra_info: list = None)", "`extra_info` is written .*list"),
        ("(solution_str: str, ground_truth: str, extra_info: dict | list = None)", "`extra_info` is written"),
        ("(solution_str: str, ground_truth: str, extra_info: Any = None)", "`extra_info` is written .*Any"),
        ("(solution_str: str, ground_truth: str, extra_info: dict)", "`extra_info` must have a default"),
        ("(solution_str: str, /, ground_truth: str, extra_info: dict = None)", "`solution_str` is positional-only"),
        ("(solution_str: str, ground_truth: str, extra_info: dict = None, *, weight)", "`weight` has no default"),
        ("(solution_str: str, ground_truth: str, extra_info: dict = None) -> int", "return annotation is `int`"),
        ("(solution_str: str, ground_truth: str, extra_info: dict = None) -> float | None", "return annotation is"),
        ("(solution_str: str, ground_truth: str, extra_info: dict = None) -> None", "return annotation is `None`"),
    ],
)
def test_another_signature_is_refused_at_decoration(signature: str, problem: str, header: str) -> None:
    with pytest.raises(TypeError, match=problem) as caught:
        define(signature, header)
    message = str(caught.value)
    assert message.startswith("@osmosis_reward: score: ")
    assert message.endswith(
        "Write: def score(solution_str: str, ground_truth: str, extra_info: dict = None, **kwargs) -> float"
    )


@pytest.mark.parametrize("signature", ["(messages, ground_truth, metadata)", "(prompt: int) -> int", "()", "(*args)"])
def test_any_other_first_parameter_is_accepted_as_it_is(signature: str) -> None:
    function = define(signature, body="return 'anything'")
    assert function(*["a"] * len(inspect.signature(function).parameters)) == "anything"


def test_a_string_annotation_that_names_an_alias_counts_as_what_it_stands_for() -> None:
    header = "from __future__ import annotations\nfrom typing import Optional as Maybe\nInfo = Maybe[dict]\nText = str"
    signature = "(solution_str: Text, ground_truth: Text, extra_info: Info = None) -> float"
    assert define(signature, header)("a", "b") == 1.0


def test_a_string_annotation_that_cannot_be_resolved_is_refused_by_its_text() -> None:
    with pytest.raises(TypeError, match=r"`extra_info` is written `extra_info: 'Info' = None`"):
        define("(solution_str: str, ground_truth: str, extra_info: 'Info' = None)")


def test_an_unresolvable_annotation_elsewhere_does_not_matter() -> None:
    signature = "(solution_str: 'str', ground_truth: 'str', extra_info: 'dict' = None, config: 'Missing' = None)"
    assert define(signature)("a", "b") == 1.0


def test_the_alias_is_looked_for_in_the_module_of_the_function_that_was_written() -> None:
    names: dict[str, Any] = {}
    exec(
        "Text = str\ndef score(solution_str: 'Text', ground_truth: 'Text', extra_info: dict = None): return 1.0", names
    )

    @functools.wraps(names["score"])
    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        return names["score"](*args, **kwargs)

    assert osmosis_reward(elsewhere)("a", "b") == 1.0


@pytest.mark.parametrize(
    ("value", "shown"),
    [("1", "returned 1, .* type int"), ("True", "returned True, .* type bool"), ("None", "returned None")],
)
def test_a_result_that_is_no_float_is_a_type_error(value: str, shown: str) -> None:
    signature = "(solution_str: str, ground_truth: str, extra_info: dict = None)"
    function = define(signature, body=f"return {value}")
    with pytest.raises(TypeError, match=f"@osmosis_reward: score {shown}.*must return a float"):
        function("a", "b")


@pytest.mark.parametrize("header", HEADERS.values(), ids=list(HEADERS))
def test_a_subclass_of_float_is_a_float(header: str) -> None:
    signature = "(solution_str: str, ground_truth: str, extra_info: dict = None) -> Points"
    header += "class Points(float): pass\n"
    assert define(signature, header, body="return Points(0.5)")("a", "b") == 0.5


def test_async_functions_are_checked_alike() -> None:
    @osmosis_reward
    async def good(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
        return float(solution_str == ground_truth)

    @osmosis_reward
    async def bad(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
        return 1

    assert inspect.iscoroutinefunction(good)
    assert asyncio.run(good("a", "a", data_source="x")) == 1.0  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bad returned 1"):
        asyncio.run(bad("a", "a"))

    with pytest.raises(TypeError, match="parameter 2 is missing"):

        @osmosis_reward
        async def refused(solution_str: str) -> float:
            return 1.0


def test_data_source_reaches_a_function_that_takes_it_and_no_other() -> None:
    def plain(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
        return 1.0

    def named(
        solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, data_source: str = ""
    ) -> float:
        return float(data_source == "gsm8k")

    def anything(
        solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
    ) -> float:
        return float(kwargs == {"data_source": "gsm8k"})

    for function in (plain, named, anything):
        assert osmosis_reward(function)("a", "b", data_source="gsm8k") == 1.0


def test_the_original_stays_reachable_and_the_wrapper_looks_like_it() -> None:
    def score(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
        """Scores."""
        return 1.0

    wrapped: Any = osmosis_reward(score)
    assert wrapped.__wrapped__ is score
    assert wrapped.__osmosis_kind__ == "reward"
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__module__) == ("score", "Scores.", __name__)
    assert inspect.signature(wrapped) == inspect.signature(score)
    assert not hasattr(score, "__osmosis_kind__")


def test_an_exception_of_the_function_passes_through() -> None:
    signature = "(solution_str: str, ground_truth: str, extra_info: dict = None)"
    with pytest.raises(KeyError, match="tolerance"):
        define(signature, body="return extra_info['tolerance']")("a", "b", {})
