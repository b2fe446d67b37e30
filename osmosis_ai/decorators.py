"""Check a decorated function's signature, and wrap it. Imports only the standard library."""

from __future__ import annotations

import ast
import functools
import inspect
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, ForwardRef, NamedTuple, NoReturn, TypeVar, cast

__all__ = ["Expected", "annotation_members", "check_signature", "wrap"]

F = TypeVar("F", bound=Callable[..., Any])

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_UNDERSTOOD = {"str", "float", "dict", "None"}


class Expected(NamedTuple):
    """A parameter that a signature must have.

    `text` is how to write it. `members` lists the allowed annotations, each as returned by `annotation_members`.
    `default` is True if the parameter must have a default, False if it must not, None if either is fine.
    """

    text: str
    members: tuple[frozenset[str], ...]
    default: bool | None = None

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]


def check_signature(function: Callable[..., Any], decorator: str, expected: Sequence[Expected], form: str) -> None:
    """Check that a function begins with the expected parameters and needs no others; raises TypeError."""
    name = _name(function)

    def refuse(problem: str) -> NoReturn:
        raise TypeError(f"{decorator}: {name}: {problem}. Write: def {getattr(function, '__name__', name)}{form}")

    signature = inspect.signature(function)
    found = list(signature.parameters.values())
    for number, wanted in enumerate(expected, start=1):
        if number > len(found):
            refuse(f"parameter {number} is missing, expected `{wanted.text}`")
        parameter = found[number - 1]
        if parameter.name != wanted.name or parameter.kind in _VARIADIC:
            refuse(f"parameter {number} is `{parameter}`, expected `{wanted.text}`")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            refuse(f"parameter `{wanted.name}` is positional-only, but it is passed by name")
        if parameter.annotation is inspect.Parameter.empty:
            refuse(f"parameter `{wanted.name}` has no annotation, expected `{wanted.text}`")
        if annotation_members(parameter.annotation, function) not in wanted.members:
            refuse(f"parameter `{wanted.name}` is written `{parameter}`, expected `{wanted.text}`")
        has_default = parameter.default is not inspect.Parameter.empty
        if wanted.default is not None and wanted.default != has_default:
            refuse(f"parameter `{wanted.name}` must have {'a' if wanted.default else 'no'} default")
    for parameter in found[len(expected) :]:
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC
        # Scoring passes `data_source` to a function that requires it, as None if the row has none.
        if needed and parameter.name != "data_source":
            refuse(f"parameter `{parameter.name}` has no default, and nothing passes it")
    returned = signature.return_annotation
    if returned is not inspect.Signature.empty and annotation_members(returned, function) != {"float"}:
        refuse(f"the return annotation is `{_text(returned)}`, expected `float`")


def wrap(
    function: F,
    decorator: str,
    kind: str,
    *,
    check_arguments: Callable[[dict[str, Any]], None] | None = None,
    returns_float: bool = True,
) -> F:
    """Wrap a sync or async function: check its calls, and drop `data_source` if the function doesn't accept it.

    `__wrapped__` holds the original; `__osmosis_kind__` marks a decorated function for the runtime. `check_arguments`
    gets a call's arguments by name and raises TypeError for a wrong type. With `returns_float`, a result that isn't a
    float raises TypeError too.
    """
    name = _name(function)
    signature = inspect.signature(function)
    takes_data_source = "data_source" in signature.parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not takes_data_source:
            kwargs.pop("data_source", None)
        if check_arguments is not None:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            try:
                check_arguments(bound.arguments)
            except TypeError as error:
                raise TypeError(f"{decorator}: {name}: {error}") from None

    def after(result: Any) -> Any:
        if returns_float and not isinstance(result, float):
            raise TypeError(
                f"{decorator}: {name} returned {reprlib.repr(result)}, which is of type {type(result).__name__}; "
                "it must return a float, for example `return float(score)`"
            )
        return result

    # Two wrappers, because the runtime checks whether a function is async.
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            before(args, kwargs)
            return after(await function(*args, **kwargs))

        wrapper: Any = async_wrapper
    else:

        @functools.wraps(function)
        def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
            before(args, kwargs)
            return after(function(*args, **kwargs))

        wrapper = sync_wrapper
    wrapper.__osmosis_kind__ = kind
    return cast(F, wrapper)


def annotation_members(annotation: Any, function: Callable[..., Any]) -> frozenset[str]:
    """Name the types an annotation allows: `dict | None` and `"Optional[Dict[str, Any]]"` both give dict and None.

    A generic's parameters are left out. A string annotation is parsed as text. If that leaves an unknown name, the name
    is resolved in the function's module; if this fails too, the text stands.
    """
    if not isinstance(annotation, str):
        return _members_of_type(annotation)
    members = _members_of_text(annotation)
    if members <= _UNDERSTOOD:
        return members
    # Only this annotation: get_type_hints on the function would fail if any other one can't be resolved.
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        resolved = typing.get_type_hints(holder, globalns=getattr(inspect.unwrap(function), "__globals__", {}))["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return members
    return _members_of_type(resolved)


def _members_of_type(annotation: Any) -> frozenset[str]:
    if isinstance(annotation, ForwardRef):
        return _members_of_text(annotation.__forward_arg__)
    origin = typing.get_origin(annotation)
    if origin is typing.Union or origin is types.UnionType:
        return frozenset().union(*map(_members_of_type, typing.get_args(annotation)))
    actual = origin or annotation
    if actual is None or actual is type(None):
        return frozenset({"None"})
    if actual is str or actual is dict:
        return frozenset({actual.__name__})
    if isinstance(actual, type) and issubclass(actual, float):
        return frozenset({"float"})
    return frozenset({repr(annotation)})


def _members_of_text(text: str) -> frozenset[str]:
    try:
        return _members_of_node(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return frozenset({text})


def _members_of_node(node: ast.expr) -> frozenset[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _members_of_node(node.left) | _members_of_node(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _members_of_text(node.value)
    if isinstance(node, ast.Subscript):
        name = _last_name(node.value)
        if name == "Optional":
            return _members_of_node(node.slice) | {"None"}
        if name == "Union":
            options = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return frozenset().union(*map(_members_of_node, options))
        node = node.value
    name = _last_name(node)
    return frozenset({"dict" if name == "Dict" else name})


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or repr(annotation)
