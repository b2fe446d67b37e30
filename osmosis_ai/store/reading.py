"""What a scorer's worker reads from the run store by itself, so that trajectories don't travel through the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from osmosis_ai.errors import StoreError
from osmosis_ai.records import Message, ScoringInput
from osmosis_ai.store.codec import decode_row, unpack
from osmosis_ai.store.schema import open_reader

__all__ = ["read_scoring_inputs"]

_SELECT = """
    SELECT rollouts.row_index, rollouts.row_id, trajectories.data, rows.data
    FROM rollouts JOIN trajectories ON rollout = pk
         JOIN rows ON rows.run = rollouts.run AND rows.row_id = rollouts.row_id
    WHERE pk = ?
"""


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
            row_index, row_id, trajectory, data = found
            row = decode_row(row_index, row_id, data)
            messages = _conversation.decode(unpack(trajectory)).messages
            inputs.append(ScoringInput(messages, row.ground_truth, row_index, row.extra))
    return inputs
