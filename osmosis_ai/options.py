"""Declare options, and read them from every source.

A group is a frozen record whose fields carry an `Option`; a config is a frozen record whose fields are groups. The
command line, the environment, `[tool.osmosis]` in `pyproject.toml`, the checks of values, the stored configuration and
the documentation all read these declarations.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from osmosis_ai.compat import FLAGS
from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record
from osmosis_ai.urls import has_scheme

__all__ = [
    "DeclaredOption",
    "Option",
    "Setting",
    "config_of",
    "declared_options",
    "layered",
    "once",
    "option_values",
    "read_size",
    "secret_values",
    "stored_options",
]

ConfigT = TypeVar("ConfigT", bound=Record)

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
OTHER_TABLES = {"validate"}
"""Tables under `[tool.osmosis]` that hold no options of a run."""

SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


class Option(NamedTuple):
    """The declaration of one field of a group: its meaning, and how users set it.

    Attributes:
        help: One sentence for `--help` and the documentation.
        flags: Names on the command line, starting with the long one that names the option; empty for `--field-name`.
        metavar: Placeholder for the value.
        default: The default in words, if the value alone doesn't explain it.
        minimum: Smallest allowed number.
        choices: Allowed strings.
        identity: Name under which `--resume` compares the option; None if a resumed run may change it.
        commands: Commands that accept the option.
        lasting: True if the environment and `pyproject.toml` may set it too.
        secret: True if its value is never stored or shown, nor read from a file.
        read: Parses a string; raises ValueError with what to write instead.
        path: True if the value may be a path; in `pyproject.toml` it is relative to that file.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    default: str | None = None
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    identity: str | None = None
    commands: tuple[str, ...] = ("test", "eval")
    lasting: bool = True
    secret: bool = False
    read: Callable[[str], Any] | None = None
    path: bool = False


def read_size(text: str) -> int:
    """Parse a size such as 500MB or 2GB into bytes; raise ValueError."""
    match = SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError("write a size such as 500MB or 2GB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


once = functools.partial(Option, lasting=False)
"""Declare an option that only the command line sets."""


class DeclaredOption(NamedTuple):
    """One option of a config: its location and its declaration.

    `name` is the long flag without leading dashes and with underscores, unique in a config. `panel` is the group's
    title.
    """

    name: str
    group: str
    field: str
    type: Any
    default: Any
    panel: str
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        """Names on the command line."""
        flags = self.option.flags or (f"--{self.field.replace('_', '-')}",)
        return (*flags, *FLAGS.get(flags[0], ()))

    @property
    def flag(self) -> str:
        """Name that messages use."""
        return self.flags[0]

    @property
    def variable(self) -> str:
        """Environment variable that sets the option."""
        return f"OSMOSIS_{self.name.upper()}"

    @property
    def base(self) -> Any:
        """The type without None."""
        if get_origin(self.type) in (Union, UnionType):
            return next(kind for kind in get_args(self.type) if kind is not type(None))
        return self.type

    @property
    def default_text(self) -> str:
        """The default, as the documentation shows it."""
        if self.option.default is not None:
            return self.option.default
        if self.base is bool:
            return "on" if self.default else "off"
        if self.default in (None, "", [], {}):
            return "–"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def read(self, text: str) -> Any:
        """Parse a string; raise ValueError with what to write instead."""
        if self.option.read is not None:
            return self.option.read(text)
        kind = self.base
        try:
            if kind is bool:
                return SWITCH[text.lower()]
            if kind in (int, float):
                return kind(text)
            if get_origin(kind) is dict:
                return msgspec.json.decode(text, type=kind)
        except (KeyError, ValueError, msgspec.DecodeError):
            raise ValueError(f"write {self.wanted}") from None
        return [part.strip() for part in text.split(",") if part.strip()] if get_origin(kind) is list else text

    @property
    def wanted(self) -> str:
        """The allowed values, for messages."""
        if self.option.choices:
            return " or ".join(self.option.choices)
        bound = "" if self.option.minimum is None else f" of at least {self.option.minimum:g}"
        words = {bool: "true or false", int: f"a whole number{bound}", float: f"a number{bound}", str: "a string"}
        if self.base in words:
            return words[self.base]
        return "a list of strings" if get_origin(self.base) is list else 'an object such as {"top_p": 0.9}'

    def check(self, value: Any, source: str) -> Any:
        """Convert a value from Python, TOML or a string and check its bounds; raise UsageError.

        The message begins with `source`: the flag, the variable or the file's key.
        """
        if isinstance(value, str) and self.option.read is not None:
            try:
                return self.option.read(value)
            except ValueError as error:
                raise UsageError(f"{source} {value}: {error}") from None
        if self.option.choices and value not in self.option.choices:
            raise UsageError(f"{source} {value}: write {self.wanted}")
        # The message may end up in a terminal or a CI log.
        shown = "[masked]" if self.option.secret else value
        try:
            found = msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            raise UsageError(f"{source} {shown}: write {self.wanted}") from None
        # NaN would pass every bound.
        if isinstance(found, float) and not math.isfinite(found):
            raise UsageError(f"{source} {shown}: write a finite number")
        if self.option.minimum is not None and found is not None and found < self.option.minimum:
            raise UsageError(f"{source} {shown}: write {self.wanted}")
        return found


class Setting(NamedTuple):
    """One option's effective value and its source."""

    option: DeclaredOption
    value: Any
    source: str


@functools.cache
def declared_options(config: type[Record]) -> tuple[DeclaredOption, ...]:
    """List the options of a config, group by group."""
    found: list[DeclaredOption] = []
    for group_name, group in get_type_hints(config).items():
        if not (isinstance(group, type) and issubclass(group, Record)):
            continue
        panel = (group.__doc__ or "").partition(":")[0]
        hints = get_type_hints(group, include_extras=True)
        for field in msgspec.structs.fields(group):
            hint = hints[field.name]
            # Before Python 3.11 a default of None wraps the annotation in an Optional.
            if get_origin(hint) in (Union, UnionType):
                hint = next(part for part in get_args(hint) if get_origin(part) is Annotated)
            kind, option = get_args(hint)[:2]
            default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            long = (option.flags or (f"--{field.name}",))[0]
            name = long.removeprefix("--").replace("-", "_")
            found.append(DeclaredOption(name, group_name, field.name, kind, default, panel, option))
    return tuple(found)


def config_of(config: type[ConfigT], options: Mapping[str, Any]) -> ConfigT:
    """Check options and build a config; missing ones keep their defaults. Raise UsageError."""
    known = {option.name: option for option in declared_options(config)}
    checked = {}
    for name, value in options.items():
        if name not in known:
            raise UsageError(f"there is no option {name!r}{_similar(name, known)}")
        checked[name] = known[name].check(value, known[name].flag)
    return _assembled(config, checked)


def layered(
    config: type[ConfigT],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    pyproject: Path | None,
    *,
    cwd: Path | None = None,
    also: Sequence[type[Record]] = (),
) -> tuple[ConfigT, list[Setting]]:
    """Build a config from all sources, and list each option with its value and source; raise UsageError.

    The command line wins, then the environment, then `pyproject.toml`, which may also hold the options of `also`. Paths
    in the file become relative to `cwd`.
    """
    # All of the file is checked, even options that the command line overrides.
    from_file = _file_values((config, *also), pyproject, cwd)
    settings = []
    for option in declared_options(config):
        # An empty variable counts as unset.
        variable = environ.get(option.variable, "")
        if option.name in given:
            setting = Setting(option, option.check(given[option.name], option.flag), "command line")
        elif option.option.lasting and variable.strip():
            setting = Setting(option, _from_variable(option, variable), f"${option.variable}")
        elif option.name in from_file:
            setting = Setting(option, from_file[option.name], "pyproject.toml")
        else:
            setting = Setting(option, option.default, "default")
        settings.append(setting)
    return _assembled(config, {one.option.name: one.value for one in settings}), settings


def stored_options(config: Record) -> dict[str, Any]:
    """Return the options that differ from their defaults, as stored with a run: never a key."""
    return {
        option.name: value
        for option, value in option_values(config)
        if value != option.default and not option.option.secret and option.option.lasting
    }


def secret_values(config: Record) -> list[str]:
    """Return the keys in a config."""
    return [value for option, value in option_values(config) if option.option.secret and value]


def option_values(config: Record) -> list[tuple[DeclaredOption, Any]]:
    """Pair every option of a config with its value."""
    return [(option, getattr(getattr(config, option.group), option.field)) for option in declared_options(type(config))]


def _assembled(config: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    groups: dict[str, dict[str, Any]] = {}
    for option in declared_options(config):
        if option.name in values:
            groups.setdefault(option.group, {})[option.field] = values[option.name]
    types = get_type_hints(config)
    return config(**{name: types[name](**fields) for name, fields in groups.items()})


def _file_values(configs: Sequence[type[Record]], path: Path | None, cwd: Path | None) -> dict[str, Any]:
    if path is None or not path.is_file():
        return {}
    from osmosis_ai.toml_files import TomlError, read_toml

    try:
        document = read_toml(path, path.parent)
    except TomlError as error:
        raise UsageError(f"{path}: {error.message}") from None
    tool = document.get("tool")
    table = tool.get("osmosis", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.osmosis] is {table!r}; write a table of options, such as max-turns = 20")
    # Reversed, so that the first config's declaration wins where two configs share a name.
    known = {option.name: option for config in reversed(configs) for option in declared_options(config)}
    values = {}
    for key, value in table.items():
        if key in OTHER_TABLES:
            continue
        source = f"{path.name}: [tool.osmosis] {key}"
        option = known.get(key.replace("-", "_"))
        if option is None:
            raise UsageError(f"{source}: there is no such option{_similar(key.replace('-', '_'), known)}")
        if option.option.secret:
            raise UsageError(f"{source}: a key doesn't belong in a committed file; use the environment")
        if not option.option.lasting:
            raise UsageError(f"{source}: {option.flag} applies to a single run; pass it on the command line")
        values[option.name] = checked = option.check(value, source + " =")
        if option.option.path and cwd is not None and not (has_scheme(checked) or checked.startswith("~")):
            values[option.name] = os.path.normpath(Path(os.path.relpath(path.parent, cwd), checked))
    return values


def _from_variable(option: DeclaredOption, text: str) -> Any:
    try:
        return option.check(option.read(text.strip()), f"${option.variable}")
    except ValueError as error:
        raise UsageError(f"${option.variable} {text}: {error}") from None


def _similar(name: str, known: Mapping[str, DeclaredOption]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
