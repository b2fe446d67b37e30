"""What a scorer's worker reads from the run store by itself, so that trajectories don't travel through the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from osmosis_ai.errors import StoreError
from osmosis_ai.records import Message, ScoringInput
from osmosis_ai.store.codec import decode_row, unpack
from osmosis_ai.store.schema import open_reader
from osmosis_ai.store.tables import Columns, select

__all__ = ["read_scoring_inputs"]


class _Stored(Columns):
    table: ClassVar[str] = "rollouts"

    row_index: int
    row_id: str
    row_data: bytes
    trajectory: bytes


_SELECT = f"""
    SELECT {select(_Stored, row_data="rows.data", trajectory="trajectories.data")}
    FROM rollouts JOIN trajectories ON rollout = pk
         JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id
    WHERE pk = ?
"""  # noqa: S608 - names of columns


class _Conversation(msgspec.Struct):
    """The part of a trajectory that is scored."""

    messages: list[Message]


_conversation = msgspec.json.Decoder(_Conversation)


def read_scoring_inputs(path: Path, keys: Sequence[int]) -> list[ScoringInput]:
    """What functions score, of stored rollouts, in the order of their keys.

    Args:
        path: The run store's file.
        keys: The rollouts' keys, from `RunStore.scoring_keys`.

    Raises:
        StoreError: The file can't be read, or a rollout was removed.
    """
    inputs = []
    with open_reader(path) as db:
        for key in keys:
            found = db.execute(_SELECT, (key,)).fetchone()
            if found is None:
                raise StoreError(f"a rollout was removed from {path} meanwhile")
            stored = _Stored(*found)
            row = decode_row(stored.row_index, stored.row_id, stored.row_data)
            messages = _conversation.decode(unpack(stored.trajectory)).messages
            inputs.append(ScoringInput(messages, row.ground_truth, row.index, row.extra))
    return inputs
