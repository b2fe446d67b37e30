"""Check rubric files, and that the judges' API keys are set."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from osmosis_ai.discovery.source import (
    UnreadableError,
    dotted_name,
    parse_file,
    python_files,
    relative_to_root,
    statements,
)
from osmosis_ai.errors import UsageError
from osmosis_ai.validate.check import Check, Subject
from osmosis_ai.validate.findings import Finding, Place, finding
from osmosis_ai.validate.secrets import kind_of_value, secret_finding

__all__ = ["CHECKS", "check_key_variables", "check_rubric_files"]


def check_rubric_files(root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check `rubric_configs.yaml` and the YAML files in `reward_rubric/`, and that their judges' API keys are set."""
    from osmosis_ai.reward_rubric.configs import DEFAULT_FILE, load_rubrics
    from osmosis_ai.reward_rubric.target import key_variable

    found = [root / DEFAULT_FILE, *sorted((root / "reward_rubric").glob("*.y*ml"))]
    for path in (path for path in found if path.exists()):
        shown = relative_to_root(path, root)
        if not path.resolve().is_relative_to(root.resolve()):
            yield finding("OSM002", "a link to a place outside the repository", Place(shown))
            continue
        try:
            rubrics = load_rubrics(path)
        except UsageError as error:
            message = str(error).removeprefix(str(path))
            line = re.match(r":(\d+)", message)
            message = message[line.end() :] if line else message
            yield finding("OSM210", message.lstrip(": "), Place(shown, int(line[1]) if line else None))
            continue
        said: set[str] = set()
        for rubric in rubrics:
            info = rubric.model_info
            if (kind := kind_of_value("api_key", info.get("api_key") or "")) is not None:
                yield secret_finding(kind, Place(shown, rubric.line, "api_key"))
            variable = info.get("api_key_env") or key_variable(str(info.get("provider")))
            # A judge at an address of one's own may need no key.
            if not info.get("api_key") and not info.get("api_base") and not environ.get(variable):
                if variable not in said:
                    yield _unset(variable, shown, rubric.line)
                said.add(variable)


def check_key_variables(folder: Path, root: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the variables from which rubric functions read their judge's API key are set.

    The variables are the constants passed as `api_key_env`, else those of the providers that a file names.
    """
    from osmosis_ai.reward_rubric.target import KEY_VARIABLES

    said: set[str] = set()
    for path in python_files(folder, root, []):
        try:
            tree = parse_file(path)
        except UnreadableError:
            continue  # the scan reports it
        names = dict(_values_of(tree, "api_key_env"))
        # A file that passes a key, or names a variable, doesn't need the providers' own variables.
        if not names and "api_key" not in dict(_values_of(tree, "api_key", any_value=True)):
            names = {
                KEY_VARIABLES[provider]: line
                for provider, line in _values_of(tree, "provider")
                if provider in KEY_VARIABLES
            }
        for name, line in names.items():
            if not environ.get(name) and name not in said:
                said.add(name)
                yield _unset(name, relative_to_root(path, root), line)


def _values_of(tree: ast.Module, key: str, *, any_value: bool = False) -> Iterator[tuple[str, int]]:
    """Yield the constants given for a key: in a dict, as a keyword argument, or as the default of a `.get`."""
    constants = {
        node.targets[0].id: node.value
        for node in statements(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            values = [value for name, value in pairs if isinstance(name, ast.Constant) and name.value == key]
        elif isinstance(node, ast.Call):
            values = [keyword.value for keyword in node.keywords if keyword.arg == key]
            if dotted_name(node.func, {}).endswith(".get") and len(node.args) == 2:
                first = node.args[0]
                values += [node.args[1]] if isinstance(first, ast.Constant) and first.value == key else []
        for value in values:
            value = constants.get(value.id, value) if isinstance(value, ast.Name) else value
            if any_value:
                yield key, value.lineno
            elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value, value.lineno


def _unset(name: str, file: str, line: int) -> Finding:
    hint = f"Export {name}, or write it to .env, which git must ignore."
    return finding("OSM209", f"{name} isn't set, so the judge can't be called", Place(file, line, name), hint)


def _check_keys(subject: Subject) -> Iterator[Finding]:
    folder = subject.root / "reward_rubric"
    return check_key_variables(folder, subject.root, subject.environ) if folder.is_dir() else iter(())


CHECKS = (
    Check("keys of judges", "OSM209", _check_keys),
    Check(
        "rubric files", "OSM002 OSM208 OSM209 OSM210", lambda subject: check_rubric_files(subject.root, subject.environ)
    ),
)
