"""Turn declared options into a command's parameters, and the typed ones into a config."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import msgspec
import typer

from osmosis_ai.config import RunConfig
from osmosis_ai.environment import environment_of
from osmosis_ai.errors import UsageError
from osmosis_ai.options import DeclaredOption, Setting, config_of, declared_options, layered, once
from osmosis_ai.records import Record

__all__ = [
    "Given",
    "Json",
    "Nodes",
    "OutputConfig",
    "OutputOptions",
    "WorkersPerNode",
    "effective_config",
    "output_options",
    "takes",
]

ConfigT = TypeVar("ConfigT", bound=Record)

Given = dict[str, Any]
"""The options that were typed, by name."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on one line of stdout, and nothing else.")]
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="With --cluster: use at most N nodes.")]
WorkersPerNode = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="With --cluster: N processes per node. Default: its CPUs.")
]


class OutputOptions(Record, frozen=True):
    """Output: how a run is shown."""

    watch: Annotated[bool, once("Re-run what each save affects; press q to quit.")] = False
    view: Annotated[bool, once("Show the run in the browser while it is running.")] = False
    output: Annotated[str | None, once("Write the results here; - is --json.", ("--output", "-o"), "FILE")] = None
    junit: Annotated[
        str | None, once("Also write the scores as test results in JUnit's form.", metavar="FILE", commands=("eval",))
    ] = None
    quiet: Annotated[bool, once("No progress and no banner, only results.", ("--quiet", "-q"))] = False
    json: Annotated[bool, once("Print the results as one line of JSON on stdout, and nothing else.")] = False


class OutputConfig(Record, frozen=True):
    """The output options of a command."""

    output: OutputOptions = OutputOptions()


class Effective(Record, Generic[ConfigT], frozen=True):
    """A config with the source of each of its options."""

    config: ConfigT
    settings: list[Setting]


def takes(*configs: type[Record], command: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of configs as parameters; it receives the typed ones as `given`.

    `command` restricts them to the options of that command.
    """
    options = [
        option
        for config in configs
        for option in declared_options(config)
        if command is None or command in option.option.commands
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        # Resolved here: with the annotations future they are text, which means nothing in another module.
        hints = inspect.get_annotations(function, eval_str=True)
        own = [
            parameter.replace(annotation=hints.get(name, Any), kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(function).parameters.items()
            if name != "given"
        ]
        parameters = [*map(_parameter, options), *own]

        def wrapper(**arguments: Any) -> None:
            typed = [(option, arguments.pop(option.name)) for option in options]
            given = {
                option.name: _parse_pairs(option, value) if get_origin(option.base) is dict else value
                for option, value in typed
                # A repeatable option that wasn't typed is None or an empty list, depending on the version of click.
                if value is not None and value not in ([], ())
            }
            function(given=given, **arguments)

        # typer reads a command's parameters from its signature and annotations.
        wrapper.__name__ = function.__name__
        wrapper.__doc__ = function.__doc__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def effective_config(kind: type[ConfigT], given: Given, cwd: Path, *, root: Path | None = None) -> Effective[ConfigT]:
    """Merge the typed options with the environment and the repository's `pyproject.toml` into a config.

    The repository is the agent's, unless `root` names it. Options of other configs are ignored. Raises UsageError.
    """
    from osmosis_ai.runtime.run.prepare import find_root

    typed = {option.name: given[option.name] for option in declared_options(kind) if option.name in given}
    # This `.env` may name the agent and so the repository, whose own `.env` comes second.
    environ = environment_of(os.environ, cwd)
    root = root or find_root(
        typed.get("mcp") or environ.get("OSMOSIS_MCP"), typed.get("module"), typed.get("rollout"), cwd
    )
    environ = environment_of(environ, root)
    also = () if kind is RunConfig else (RunConfig,)
    return Effective(*layered(kind, typed, environ, root / "pyproject.toml", cwd=cwd, also=also))


def output_options(given: Given) -> OutputOptions:
    """Return the output options among the typed ones."""
    names = {option.name for option in declared_options(OutputConfig)}
    return config_of(OutputConfig, {name: value for name, value in dash_is_json(given).items() if name in names}).output


def dash_is_json(given: Given) -> Given:
    """Return the typed options with `--json` in place of `-o -`."""
    if given.get("output") != "-":
        return given
    return {**{name: value for name, value in given.items() if name != "output"}, "json": True}


def _parameter(option: DeclaredOption) -> inspect.Parameter:
    declared = option.option
    help = declared.help
    if option.default_text not in ("–", "off"):
        help = f"{help} Default: {option.default_text}."
    flags = list(option.flags)
    kind: Any = option.base
    bounds: dict[str, Any] = {}
    if kind is bool:
        # What the environment or pyproject.toml turns on must be possible to turn off.
        if declared.lasting:
            flags[0] = f"{flags[0]}/--no-{flags[0].removeprefix('--')}"
    elif get_origin(kind) in (list, dict):
        # typer knows no dicts; `_parse_pairs` reads NAME=VALUE afterwards.
        kind = list[str]
    elif kind not in (int, float) or declared.read is not None:
        kind = str
    else:
        bounds["min"] = declared.minimum
    shown = typer.Option(
        *flags,
        metavar=declared.metavar,
        help=help,
        rich_help_panel=option.panel,
        autocompletion=(lambda: list(declared.choices)) if declared.choices else None,
        **bounds,
    )
    # Every option defaults to None here, to tell an omitted option from a typed default.
    annotation = Annotated[kind | None, shown]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parse_pairs(option: DeclaredOption, given: list[str]) -> dict[str, Any]:
    """Parse the values of a repeatable option: NAME=JSON, or NAME=TEXT if its values are texts."""
    flag, is_text = option.flags[0], get_args(option.base)[1] is str
    pairs: dict[str, Any] = {}
    for typed in given:
        name, sign, value = typed.partition("=")
        if not sign or not name.strip():
            example = "LANG=en" if is_text else "top_p=0.9"
            raise UsageError(f"{flag} {typed}: write {option.option.metavar}, for example {flag} {example}")
        try:
            pairs[name.strip()] = value if is_text else msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise UsageError(
                f"{flag} {typed}: {value!r} is not JSON; a text needs quotes: {flag} '{name}=\"{value}\"'"
            ) from None
    return pairs
