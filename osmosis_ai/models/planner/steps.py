"""Tool calls for anything but arithmetic: which tools a prompt speaks of, in which order, and with which part of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .evidence import QUOTED, Evidence, mask_quotes, numbers_in, quoted_in, words_in
from .expressions import word_set
from .matching import ToolSpec
from .schemas import Leaf, kind

__all__ = ["Step", "find_steps", "names_tool"]

_MAX_STEPS = 12
_SHORTEST_ABBREVIATION = 5
_MAX_VALUES_IN_A_ROW = 6
_START_WORDS = word_set("start begin init initialize initialise open new create connect login reset")
_COMMON = word_set(
    """a an and are as at be by can do does for from get give has have how i if in into is it its make me my of on or
    out please run set so string text than that the their them then there these this to tool tools use used user using
    value values want was were what when which who will with you your number numbers data info item list name one new
    all any each given return returns result"""
)
_BREAK = re.compile(r",\s*(?:and\s+)?(?:then\s+)?|;\s*|\.\s+|\s+(?:and\s+)?then\s+|\s+and\s+|\s+again\b")


@dataclass(frozen=True)
class Step:
    """One intended call: the tool, and the part of the prompt that speaks of it."""

    tool: ToolSpec
    segment: str


def find_steps(prompt: str, specs: Sequence[ToolSpec]) -> list[Step]:
    """Return the calls a prompt asks for, in its order; at least one if there is any tool."""
    if not specs:
        return []
    mentions = _mentions(prompt, specs)
    if mentions:
        ends = [start for start, _ in mentions[1:]] + [len(prompt)]
        starts = [0, *ends[:-1]]
        steps = [Step(spec, prompt[a:b]) for (_, spec), a, b in zip(mentions, starts, ends, strict=True)]
        steps = [piece for step in _joined(steps) for piece in _split(step)]
    else:
        steps = _split(Step(_closest(prompt, specs), prompt))
    opener = next((spec for spec in specs if _START_WORDS & set(spec.words) and not _needs(spec)), None)
    if opener is not None and all(step.tool != opener for step in steps):
        steps.insert(0, Step(opener, ""))
    return steps[:_MAX_STEPS]


def names_tool(prompt: str, specs: Sequence[ToolSpec]) -> bool:
    """Whether a prompt speaks of one of the tools by its name."""
    return bool(_mentions(prompt, specs))


def _mentions(prompt: str, specs: Sequence[ToolSpec]) -> list[tuple[int, ToolSpec]]:
    """Where the prompt uses a word of a tool's name; of tools that share the word, the one that fits best there."""
    by_stem: dict[str, list[ToolSpec]] = {}
    for spec in specs:
        telling = [word for word in spec.words if word not in _COMMON and len(word) > 2] or list(spec.words)
        for stem in dict.fromkeys(_stem(word) for word in telling):
            by_stem.setdefault(stem, []).append(spec)
    masked = mask_quotes(prompt)
    words = [(match.start(), _stem(match.group().lower())) for match in re.finditer(r"[^\W\d_]+", masked)]
    found: list[tuple[int, ToolSpec]] = []
    for position, (start, stem) in enumerate(words):
        candidates = by_stem.get(stem) or _abbreviated(stem, by_stem)
        if candidates:
            near = [word for _, word in words[max(0, position - 4) : position + 8]]
            found.append((start, max(candidates, key=lambda spec: _closeness(spec, near))))
    return found


def _abbreviated(stem: str, by_stem: dict[str, list[ToolSpec]]) -> list[ToolSpec]:
    """The tools whose names shorten a word of the prompt, as `concat` does "concatenate"."""
    lengths = range(len(stem) - 1, _SHORTEST_ABBREVIATION - 1, -1)
    return next((by_stem[stem[:length]] for length in lengths if stem[:length] in by_stem), [])


def _closeness(spec: ToolSpec, stems: list[str]) -> float:
    name = {_stem(word) for word in spec.words}
    described = {_stem(word) for word in words_in(spec.description)} - {_stem(word) for word in _COMMON}
    near = set(stems)
    # Of two tools that fit alike, the one whose name says no more than the prompt does.
    return len(name & near) + 0.2 * len(described & near) - 0.1 * len(name - near)


def _joined(steps: list[Step]) -> list[Step]:
    """Steps of one tool become one where either has nothing to call it with ("use the reverse tool to reverse …")."""
    joined: list[Step] = []
    for step in steps:
        before = joined[-1] if joined else None
        if before is not None and before.tool == step.tool and (not _has_values(before) or not _has_values(step)):
            joined[-1] = replace(step, segment=before.segment + step.segment)
        else:
            joined.append(step)
    return joined


def _has_values(step: Step) -> bool:
    return bool(_values(step.tool, step.segment))


def _values(spec: ToolSpec, segment: str) -> int:
    choices = [value for leaf in spec.leaves for option in leaf.options for value in _enum(option)]
    return len(numbers_in(segment)) + len(quoted_in(segment)) + len(Evidence(segment, segment).mentioned(choices))


def _enum(option: dict[str, object]) -> list[object]:
    values = option.get("enum")
    return values if isinstance(values, list) else []


def _split(step: Step) -> list[Step]:
    """A tool is called for each set of values that the segment has for it ("move up, up, then left")."""
    # A break inside quotes is none: blank them for the search only.
    masked = QUOTED.sub(lambda match: "_" * len(match.group()), step.segment)
    bounds = [0, *(match.end() for match in _BREAK.finditer(masked)), len(masked)]
    pieces = [(step.segment[a:b], _given_values(step.tool, step.segment[a:b])) for a, b in itertools.pairwise(bounds)]
    telling = [(piece, given) for piece, given in pieces if any(given.values())]
    wanted = _given_values(step.tool, None)
    if len(telling) < 2 or not any(wanted.values()):
        return [step]
    for what, count in wanted.items():
        enough = [given[what] >= count for _, given in telling]
        none = not any(given[what] for _, given in telling)
        if not all(enough) and not none:
            return [step]
    return [replace(step, segment=piece) for piece, _ in telling[:_MAX_VALUES_IN_A_ROW]]


def _given_values(spec: ToolSpec, text: str | None) -> dict[str, int]:
    """How many values of each kind a text has for a tool's required parameters; without a text, how many they want."""
    counts: dict[str, int] = {}
    for leaf in _needs(spec):
        choices = [value for option in leaf.options for value in _enum(option)]
        kinds = {kind(option) for option in leaf.options}
        if choices:
            counts["/".join(leaf.path)] = 1 if text is None else len(Evidence(text, text).mentioned(choices))
        elif kinds & {"integer", "number"}:
            counts["#"] = counts.get("#", 0) + 1 if text is None else len(numbers_in(text))
        elif "string" in kinds:
            counts["'"] = counts.get("'", 0) + 1 if text is None else len(quoted_in(text))
        elif kinds & {"array", "object"}:
            return {}
    return counts


def _needs(spec: ToolSpec) -> list[Leaf]:
    return [leaf for leaf in spec.leaves if leaf.required]


def _closest(prompt: str, specs: Sequence[ToolSpec]) -> ToolSpec:
    """The tool whose description and parameters share most with a prompt that names none."""
    stems = {_stem(word) for word in words_in(prompt)} - {_stem(word) for word in _COMMON}

    def likeness(spec: ToolSpec) -> tuple[int, int]:
        about = {_stem(word) for word in words_in(spec.description)}
        for leaf in spec.leaves:
            for option in leaf.options:
                about |= {_stem(word) for word in words_in(leaf.name)}
                about |= {_stem(word) for value in _enum(option)[:64] for word in words_in(str(value))}
        offered = numbers_in(prompt) or quoted_in(prompt)
        return len(about & stems), -len(_needs(spec)) if not offered else 0

    return max(specs, key=likeness)


def _stem(word: str) -> str:
    for ending in ("ings", "ing", "ers", "er", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word
