"""Export token sequences: the tokens that the engine read and sampled in a rollout, with a mask of the sampled ones.

A turn's prompt should start with the tokens of the previous turn. If an endpoint tokenised the conversation again, it
may not. Then, as in TRL's asynchronous GRPO, a change within the last reply turns that tail into context, which isn't
trained on, and an earlier or larger change starts another sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

from osmosis_ai.exports.base import ExportFormat, ExportOptions, LeftOut, Written, write_lines
from osmosis_ai.records import Record

if TYPE_CHECKING:
    from osmosis_ai.exports.rollouts import ExportedRollout, ExportedTurn

__all__ = ["FORMAT", "NO_TOKENS", "Sequences", "sequences_of"]

FORK_TOKENS = 8
"""A change of this many tokens or more starts another sequence."""
NO_TOKENS = "the endpoint returned no token ids; vLLM does with --param return_token_ids=true"

Drift: TypeAlias = Literal["clean", "realign", "fork"]


class TokenSequence(Record, frozen=True, omit_defaults=False):
    """One training sequence of a rollout."""

    id: str
    """Id of the rollout."""
    row_id: str
    run_index: int
    sequence: int
    """Position among the rollout's sequences, from 0."""
    input_ids: list[int]
    mask: list[int]
    """1 for tokens that the model sampled, 0 for context."""
    logprobs: list[float] | None
    """Log probabilities as sampled, 0 for context; null if the endpoint returned none for a sampled token."""
    prompt_length: int
    """Tokens before the first sampled one."""
    reward: float | None
    transitions: dict[str, int]
    """Turns that followed cleanly, were realigned, or began a sequence, in the whole rollout."""


class Sequences:
    """The sequences that a rollout's turns make, and how often turns drifted."""

    def __init__(self) -> None:
        self.all: list[_Sequence] = []
        self.transitions: dict[str, int] = {"clean": 0, "realign": 0, "fork": 0}

    def add(self, prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float] | None) -> Drift:
        """Add a turn; return how its prompt follows the turn before it."""
        drift = self.all[-1].drift(prompt) if self.all else "fork"
        # The first turn follows nothing, so it isn't a transition.
        if self.all:
            self.transitions[drift] += 1
        if drift == "fork":
            self.all.append(_Sequence())
        self.all[-1].add(prompt, reply, logprobs)
        return drift


class _Sequence:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] | None = []
        self._last_reply = 0

    def drift(self, prompt: Sequence[int]) -> Drift:
        same = _common(self.ids, prompt)
        changed = len(self.ids) - same
        if not changed:
            return "clean"
        return "realign" if same >= self._last_reply and changed < FORK_TOKENS else "fork"

    def add(self, prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float] | None) -> None:
        same = _common(self.ids, prompt)
        # After a realignment, the prompt's own tokens replace the changed tail of the last reply.
        for values in (self.ids, self.mask, self.logprobs):
            if values is not None:
                del values[same:]
        self._append(prompt[same:], 0, [0.0] * (len(prompt) - same))
        self._last_reply = len(self.ids)
        self._append(reply, 1, logprobs)

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float] | None) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        if self.logprobs is not None and logprobs is not None and len(logprobs) == len(ids):
            self.logprobs += logprobs
        # An empty reply needs none.
        elif ids:
            # One turn without log probabilities makes the whole list unusable.
            self.logprobs = None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    # Usually the prompt extends the sequence, and comparing slices is far faster than comparing tokens.
    if a == b[: len(a)]:
        return len(a)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def sequences_of(rollout: ExportedRollout) -> Sequences:
    """Return a rollout's sequences; raise LeftOut if a turn has no token ids."""
    found = Sequences()
    for turn in rollout.turns:
        if turn.prompt_token_ids is None or turn.token_ids is None:
            raise LeftOut(NO_TOKENS)
        found.add(turn.prompt_token_ids, turn.token_ids, turn_logprobs(turn))
    if not found.all:
        raise LeftOut("the rollout has no turn")
    return found


def turn_logprobs(turn: ExportedTurn) -> list[float] | None:
    """Return the log probabilities of a reply's tokens, None if there are none or not as many."""
    content = None if turn.logprobs is None else turn.logprobs.content
    if content is None or turn.token_ids is None or len(content) != len(turn.token_ids):
        return None
    return [token.logprob for token in content]


def _records(rollout: ExportedRollout) -> Iterator[TokenSequence]:
    found = sequences_of(rollout)
    for number, sequence in enumerate(found.all):
        # A sequence of empty replies has nothing to train on.
        if any(sequence.mask):
            yield TokenSequence(
                id=rollout.id,
                row_id=rollout.row_id,
                run_index=rollout.run_index,
                sequence=number,
                input_ids=sequence.ids,
                mask=sequence.mask,
                logprobs=sequence.logprobs,
                prompt_length=sequence.mask.index(1),
                reward=rollout.reward,
                transitions=found.transitions,
            )


def _write(rollouts: Iterable[ExportedRollout], sink: IO[bytes], options: ExportOptions) -> Written:
    return write_lines(rollouts, sink, options, _records)


FORMAT = ExportFormat(
    name="tokens",
    suffix=".jsonl",
    text=True,
    description="Token sequences with a mask of what was sampled, from endpoints that return token ids.",
    read_with=('datasets.load_dataset("json", data_files="run.jsonl")',),
    write=_write,
    record="sequence",
)
