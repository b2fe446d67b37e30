"""Resolve `--rubric` values to decorated functions and entries of rubric files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from osmosis_ai.discovery.repository import Repository
from osmosis_ai.discovery.scan import Component, Problem, resolve_function, scan_functions
from osmosis_ai.discovery.source import relative_to_root
from osmosis_ai.errors import FunctionError, UsageError
from osmosis_ai.folders import given_path
from osmosis_ai.imports import content_hash
from osmosis_ai.records import Failure, FunctionRef
from osmosis_ai.reward_rubric.configs import DEFAULT_FILE, Rubric, did_you_mean, load_rubrics

__all__ = ["discovered_rubrics", "resolve_rubrics", "rubric_files"]

ALL = "all"
SUFFIXES = (".yaml", ".yml")


def resolve_rubrics(specs: list[str], repository: Repository, cwd: Path) -> tuple[list[FunctionRef], list[Failure]]:
    """Find the rubrics that `--rubric` values name.

    `all` is every `@osmosis_rubric` function in `reward_rubric/` and every entry of the repository's
    `rubric_configs.yaml`. `FILE#ID` is an entry of a rubric file and `FILE` all of its entries; the file is looked up
    in the working directory, then in the repository's root. Anything else is a function (its bare name or
    `MODULE:FUNCTION`), or the id of an entry of the repository's `rubric_configs.yaml`.

    Returns:
        Each rubric once, in the order given. An entry of a file has no module, its id as the attribute, and its file
        relative to its root. With `all`, also the files that can't be used.

    Raises:
        FunctionError: There is no such rubric, or its file can't be used; the message lists the rubrics.
    """
    refs: list[FunctionRef] = []
    problems: list[Failure] = []
    for spec in map(str.strip, specs):
        refs += _all(repository, problems) if spec == ALL else _resolve(spec, repository, cwd)
    return list({ref.name: ref for ref in refs}.values()), problems


def rubric_files(specs: list[str], repository: Repository, cwd: Path) -> list[Path]:
    """Return the rubric files that `--rubric` values refer to, even if they don't exist or can't be used."""
    files = [_named_file(spec.strip()) or str(repository.root / DEFAULT_FILE) for spec in specs]
    return list(dict.fromkeys(_find(file, repository, cwd) for file in files))


def discovered_rubrics(repository: Repository) -> tuple[list[FunctionRef], list[Problem]]:
    """Return a repository's `@osmosis_rubric` functions, and the files that could not be read."""
    components, problems = _components(repository)
    found = [resolve_function(f"{c.module}:{c.name}", components, repository.root, repository.root) for c in components]
    return found, problems


def _all(repository: Repository, problems: list[Failure]) -> list[FunctionRef]:
    found, unreadable = discovered_rubrics(repository)
    problems += [problem.as_failure("rubric") for problem in unreadable]
    try:
        found += _default_entries(repository)
    except FunctionError as error:
        problems.append(Failure("rubric", str(error), kind="load", file=DEFAULT_FILE))
    if not found and not problems:
        raise FunctionError(f"--rubric all: there are no rubrics. {_what_there_is([], [])}")
    return found


def _resolve(spec: str, repository: Repository, cwd: Path) -> list[FunctionRef]:
    file = _named_file(spec)
    if file is not None:
        return _of_file(spec, file, spec.removeprefix(file).removeprefix("#"), repository, cwd)
    components, problems = _components(repository)
    if ":" in spec:
        return [msgspec.structs.replace(resolve_function(spec, components, repository.root, cwd), kind="rubric")]
    if any(component.name == spec for component in components):
        return [resolve_function(spec, components, repository.root, cwd)]
    entries = _default_entries(repository)
    matching = [entry for entry in entries if entry.attribute == spec]
    if matching:
        return matching
    # The rubric may be in a file that could not be read.
    if problems:
        raise FunctionError(str(problems[0]))
    hint = did_you_mean(spec, [component.name for component in components] + [entry.attribute for entry in entries])
    raise FunctionError(f"--rubric {spec!r}: there is no such rubric{hint} {_what_there_is(components, entries)}")


def _of_file(spec: str, file: str, rubric_id: str, repository: Repository, cwd: Path) -> list[FunctionRef]:
    path = _find(file, repository, cwd)
    if not path.is_file():
        raise FunctionError(f"--rubric {spec}: there is no file {file}; write FILE#ID, as in {DEFAULT_FILE}#my_rubric")
    entries = _entries(path, repository.root)
    if not rubric_id:
        return entries
    matching = [entry for entry in entries if entry.attribute == rubric_id]
    if not matching:
        there = [entry.attribute for entry in entries]
        hint = f"{did_you_mean(rubric_id, there)} It has: {', '.join(there)}"
        raise FunctionError(f"--rubric {spec}: {file} has no rubric {rubric_id!r}{hint}")
    return matching


def _named_file(spec: str) -> str | None:
    """Return the file of `FILE#ID` or `FILE`; None if the value names something else."""
    file, mark, _ = spec.rpartition("#")
    if mark:
        return file
    return spec if spec.endswith(SUFFIXES) else None


def _find(file: str, repository: Repository, cwd: Path) -> Path:
    candidates = [given_path(file, base) for base in (cwd, repository.root)]
    return next((path for path in candidates if path.is_file()), candidates[-1])


def _default_entries(repository: Repository) -> list[FunctionRef]:
    path = repository.root / DEFAULT_FILE
    return _entries(path, repository.root) if path.is_file() else []


def _entries(path: Path, root: Path) -> list[FunctionRef]:
    try:
        return [_ref(rubric, path, root) for rubric in load_rubrics(path)]
    except UsageError as error:
        raise FunctionError(str(error)) from None


def _ref(rubric: Rubric, path: Path, root: Path) -> FunctionRef:
    file = relative_to_root(path, root)
    # The hash covers what changes scores: neither the entry's line nor the key.
    model_info = {name: value for name, value in rubric.model_info.items() if name != "api_key"}
    said = msgspec.structs.replace(rubric, line=0, model_info=model_info)
    content = content_hash(msgspec.json.encode(said, order="deterministic"))
    name = f"{file}#{rubric.id}"
    return FunctionRef(name, "", rubric.id, str(root), kind="rubric", file=file, line=rubric.line, content=content)


def _components(repository: Repository) -> tuple[Sequence[Component], list[Problem]]:
    if repository.rubric_dir is None:
        return [], []
    result = scan_functions(repository.rubric_dir, repository.root, "rubric")
    return result.components, result.problems


def _what_there_is(components: Sequence[Component], entries: Sequence[FunctionRef]) -> str:
    names = [f"{component.module}:{component.name}" for component in components] + [entry.name for entry in entries]
    if names:
        return f"There are: {', '.join(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"Write an @osmosis_rubric function in reward_rubric/, or a rubric file {DEFAULT_FILE}"
