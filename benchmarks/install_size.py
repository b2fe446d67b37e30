"""Measure an installation's disk space by package, and the space that dropping each of our requirements would save.

Run it with the Python of the environment to measure: `ENVIRONMENT/bin/python benchmarks/install_size.py`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path

OURS = "osmosis-ai"
REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


def files(distribution: Distribution) -> Iterator[Path]:
    """Yield a distribution's files, compiled ones included."""
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        yield path
        if path.suffix == ".py":
            yield Path(cache_from_source(str(path)))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def reached(start: str, installed: Mapping[str, Distribution], without: str = "") -> set[str]:
    """Return the packages that a package needs, including itself, but without one of its requirements."""
    found: set[tuple[str, str]] = set()
    waiting = [(start, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found or name not in installed:
            continue
        found.add((name, extra))
        for text in installed[name].requires or ():
            match, only = REQUIREMENT.match(text), EXTRA.search(text)
            assert match is not None
            needed = normal(match[1])
            if (only[1] if only else "") == extra and not (name == start and needed == without):
                waiting += [(needed, ""), *((needed, each.strip()) for each in (match[2] or "").split(",") if each)]
    return {name for name, _ in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", type=int, default=25, help="list the N largest")
    options = parser.parse_args()
    installed = {normal(each.metadata["Name"]): each for each in distributions()}
    # The blocks that the files take, as `du` counts them.
    size = {
        name: sum(path.stat().st_blocks * 512 for path in files(each) if path.is_file()) / 1e6
        for name, each in installed.items()
    }
    print(f"{sum(size.values()):.0f} MB in {len(size)} packages")
    for name in sorted(size, key=size.__getitem__, reverse=True)[: options.top]:
        print(f"{size[name]:7.1f} MB  {name}")
    whole = reached(OURS, installed)
    print(f"\nof which {OURS} needs {sum(size[name] for name in whole):.0f} MB in {len(whole)}; without")
    direct = {normal(match[1]) for text in installed[OURS].requires or () if (match := REQUIREMENT.match(text))}
    saved = {name: whole - reached(OURS, installed, name) for name in direct & installed.keys()}
    for name in sorted(saved, key=lambda name: sum(size[each] for each in saved[name]), reverse=True):
        if saved[name]:
            print(f"{sum(size[each] for each in saved[name]):7.1f} MB  {len(saved[name]):3} packages  {name}")


if __name__ == "__main__":
    main()
