"""Shards of a dataset: `I/N` as typed, and the rows that belong to each."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Shard", "read_shard"]

SHARD = re.compile(r"(\d{1,6})/(\d{1,6})")


class Shard(NamedTuple):
    """Shard `number`, from 1, of `total`."""

    number: int
    total: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """Read `I/N`; raise ValueError with what to write instead."""
        match = SHARD.fullmatch(text.strip())
        if match is None:
            raise ValueError("write a shard and their number, counted from 1, such as 2/4")
        number, total = int(match[1]), int(match[2])
        if not 1 <= number <= total:
            shards = f"shards are 1/{total} to {total}/{total}" if total else "there is at least one shard"
            raise ValueError(f"{shards}, counted from 1")
        return cls(number, total)

    def has(self, row_id: str) -> bool:
        """Return True if a row belongs to this shard, which depends on nothing but the row's id."""
        return int(row_id, 16) % self.total == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def read_shard(text: str) -> str:
    """Return the shortest text for the same shard; raise ValueError with what to write instead."""
    return str(Shard.of(text))
