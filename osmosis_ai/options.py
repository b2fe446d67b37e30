"""How options are declared, and everything that is made from a declaration.

A group is a frozen record whose fields carry an `Option`; a config is a frozen record whose fields are groups. The
command line, the environment, `[tool.osmosis]` in `pyproject.toml`, the check of values, the stored configuration and
the documentation all read these declarations.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from osmosis_ai.compat import FLAGS
from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record

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
SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


class Option(NamedTuple):
    """How one field of a group is given and what it means.

    Attributes:
        help: One sentence for `--help` and the documentation.
        flags: The names on the command line, the long one that names the option first; empty for `--field-name`.
        metavar: The placeholder of its value.
        default: The default in words, where the value alone doesn't say it.
        minimum: The least value of a number.
        choices: The values a text may have.
        identity: The name under which `--resume` compares it, None if runs that differ in it can be continued.
        commands: The commands of a run that take it.
        lasting: It may also come from the environment and from `pyproject.toml`.
        secret: Its value is never stored or shown, and not read from a file.
        read: Reads it from a text; raises ValueError with what to write instead.
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


def read_size(text: str) -> int:
    """Bytes of a size such as 500MB or 2GB; raises ValueError."""
    match = SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError("write a size such as 500MB or 2GB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


once = functools.partial(Option, lasting=False)
"""An option for one run."""


class DeclaredOption(NamedTuple):
    """One option of a config: its place in it, and what its declaration says.

    `name` is its long flag without dashes, with underscores; unique in a config. `panel` is its group's title.
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
        """Its names on the command line."""
        flags = self.option.flags or (f"--{self.field.replace('_', '-')}",)
        return (*flags, *FLAGS.get(flags[0], ()))

    @property
    def flag(self) -> str:
        """The name that messages use."""
        return self.flags[0]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"OSMOSIS_{self.name.upper()}"

    @property
    def base(self) -> Any:
        """Its type without None."""
        if get_origin(self.type) in (Union, UnionType):
            return next(kind for kind in get_args(self.type) if kind is not type(None))
        return self.type

    @property
    def default_text(self) -> str:
        """Its default as documents show it."""
        if self.option.default is not None:
            return self.option.default
        if self.base is bool:
            return "on" if self.default else "off"
        if self.default in (None, [], {}):
            return "–"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def read(self, text: str) -> Any:
        """The value that a text stands for; raises ValueError with what to write instead."""
        if self.option.read is not None:
            return self.option.read(text)
        kind = self.base
        try:
            if kind is bool:
                return SWITCH[text.lower()]
            if kind in (int, float):
                return kind(text)
            if get_origin(kind) is dict:
                return msgspec.json.decode(text, type=dict[str, Any])
        except (KeyError, ValueError, msgspec.DecodeError):
            raise ValueError(f"write {self.wanted}") from None
        return [part.strip() for part in text.split(",") if part.strip()] if get_origin(kind) is list else text

    @property
    def wanted(self) -> str:
        """The values that it takes, for messages."""
        if self.option.choices:
            return " or ".join(self.option.choices)
        bound = "" if self.option.minimum is None else f" of at least {self.option.minimum:g}"
        words = {bool: "true or false", int: f"a whole number{bound}", float: f"a number{bound}", str: "a text"}
        if self.base in words:
            return words[self.base]
        return "a list of texts" if get_origin(self.base) is list else 'an object such as {"top_p": 0.9}'

    def check(self, value: Any, source: str) -> Any:
        """A value of the right type and within bounds, from Python, TOML or a text; raises UsageError.

        The message begins with `source`: the flag, the variable, or the file's key.
        """
        if isinstance(value, str) and self.option.read is not None:
            try:
                return self.option.read(value)
            except ValueError as error:
                raise UsageError(f"{source} {value}: {error}") from None
        if self.option.choices and value not in self.option.choices:
            raise UsageError(f"{source} {value}: it is {' or '.join(self.option.choices)}")
        shown = "[masked]" if self.option.secret else value
        try:
            found = msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            raise UsageError(f"{source} {shown}: write {self.wanted}") from None
        if isinstance(found, float) and not math.isfinite(found):
            raise UsageError(f"{source} {shown}: write a finite number")
        if self.option.minimum is not None and found is not None and found < self.option.minimum:
            raise UsageError(f"{source} {shown}: write {self.wanted}")
        return found


class Setting(NamedTuple):
    """One option's effective value, and where it comes from."""

    option: DeclaredOption
    value: Any
    source: str


@functools.cache
def declared_options(config: type[Record]) -> tuple[DeclaredOption, ...]:
    """The options of a config, group by group."""
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
    """A config from checked options by name; options that are missing have their default; raises UsageError."""
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
    also: Sequence[type[Record]] = (),
) -> tuple[ConfigT, list[Setting]]:
    """A config from all its sources, and each option with its value and source; raises UsageError.

    The command line wins, then the environment, then `pyproject.toml`, which may hold the options of `also` too.
    """
    from_file = _file_values((config, *also), pyproject)
    settings = []
    for option in declared_options(config):
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
    """The options of a config that differ from their defaults, as they are stored with a run: never a key."""
    return {
        option.name: value
        for option, value in option_values(config)
        if value != option.default and not option.option.secret and option.option.lasting
    }


def secret_values(config: Record) -> list[str]:
    """The keys that a config holds."""
    return [value for option, value in option_values(config) if option.option.secret and value]


def option_values(config: Record) -> list[tuple[DeclaredOption, Any]]:
    """Every option of a config with its value."""
    return [(option, getattr(getattr(config, option.group), option.field)) for option in declared_options(type(config))]


def _assembled(config: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    groups: dict[str, dict[str, Any]] = {}
    for option in declared_options(config):
        if option.name in values:
            groups.setdefault(option.group, {})[option.field] = values[option.name]
    types = get_type_hints(config)
    return config(**{name: types[name](**fields) for name, fields in groups.items()})


def _file_values(configs: Sequence[type[Record]], path: Path | None) -> dict[str, Any]:
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
    known = {option.name: option for config in reversed(configs) for option in declared_options(config)}
    values = {}
    for key, value in table.items():
        source = f"{path.name}: [tool.osmosis] {key}"
        option = known.get(key.replace("-", "_"))
        if option is None:
            raise UsageError(f"{source}: there is no such option{_similar(key.replace('-', '_'), known)}")
        if option.option.secret:
            raise UsageError(f"{source}: a key doesn't belong into a file that is committed; use the environment")
        if not option.option.lasting:
            raise UsageError(f"{source}: {option.flag} is for one run; give it on the command line")
        values[option.name] = option.check(value, source + " =")
    return values


def _from_variable(option: DeclaredOption, text: str) -> Any:
    try:
        return option.check(option.read(text.strip()), f"${option.variable}")
    except ValueError as error:
        raise UsageError(f"${option.variable} {text}: {error}") from None


def _similar(name: str, known: Mapping[str, DeclaredOption]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
