"""Mutate JSON values by their structure. `make fuzz` runs more cases than the suite does, from another seed."""

from __future__ import annotations

import os
import random
from typing import Any

CASES = int(os.environ.get("FUZZ_CASES", "1500"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1.5, 1e300, 10**12 + 1, 2**63, 10**30),
    *("", "c", "\x00\x1b[2J", "x" * 5000, [], {}, [None], [[]], {"id": None}),
    *({"tool_calls": [{}]}, {"tool_calls": True}, ["f"], {"type": "Stop"}, {"type": "ScoresDone"}),
]
"""What someone may put where something else belongs."""


def generator() -> random.Random:
    return random.Random(SEED)


def mutated(value: Any, chance: random.Random) -> Any:
    """Replace one part of a JSON value with an odd one, remove it, repeat it, or nest it deeply."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.85:
        copy = dict(value) if isinstance(value, dict) else list(value)
        place: Any = chance.choice(list(copy)) if isinstance(copy, dict) else chance.randrange(len(copy))
        way = chance.random()
        if way < 0.1:
            del copy[place]
        elif way < 0.15 and isinstance(copy, list):
            copy.append(copy[place])
        else:
            copy[place] = mutated(copy[place], chance)
        return copy
    if chance.random() < 0.05:
        return nested(value, chance.choice([100, 190, 250, 900, 5000]))
    return chance.choice(ODD)


def nested(value: Any, levels: int) -> Any:
    """Put a value below this many lists and dicts."""
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value
