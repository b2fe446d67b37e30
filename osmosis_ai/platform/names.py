"""Generate names for runs: an adjective, an animal and a number, which can't be mistaken for an id (a UUID)."""

from __future__ import annotations

import secrets

__all__ = ["new_name"]

# Lists of strings would be harder to read.
ADJECTIVES = """
    agile bold brave bright calm clever crisp curious daring eager fair fast fond gentle glad grand happy honest humble
    keen kind lively loyal lucid lucky merry mild neat nimble noble patient plucky polite proud quick quiet rapid ready
    sharp shy silent smart snug solid steady still sunny swift tidy true vivid warm wise witty
""".split()  # noqa: SIM905
ANIMALS = """
    badger bear beaver bison crane crow deer dolphin eagle elk falcon ferret finch fox gecko goose gull hare hawk heron
    horse ibis jackal jay kite koala lark lemur lion lynx magpie marten mole moose newt orca otter owl panda petrel
    puffin quail rabbit raven robin salmon seal shrew sparrow stork swan tern tiger toad trout turtle vole walrus weasel
    whale wolf wren yak zebra
""".split()  # noqa: SIM905


def new_name() -> str:
    """Return a random name."""
    return f"{secrets.choice(ADJECTIVES)}-{secrets.choice(ANIMALS)}-{secrets.randbelow(900) + 100}"
