"""The messages between a worker and a process in a sandbox, which loads the repository's code in its place.

The worker's first record is Enter, the sandbox's is Ready or NotReady. The sandbox then serves one rollout, from Open
to the end of its socket, or scores one. User code could forge its records, so the worker accepts only answers to its
own requests.
"""

from __future__ import annotations

import msgspec

from osmosis_ai.mcp_tools.session import CallOutcome
from osmosis_ai.records import Failure, JsonObject, Message, Record, Score, ScoringInput
from osmosis_ai.runtime.protocol import Imported, NotReady, Ready, WorkerSpec

__all__ = [
    "MAX_ANSWER",
    "Answer",
    "Answered",
    "Call",
    "Enter",
    "Open",
    "Opened",
    "Request",
    "Sample",
    "Sampled",
    "ScoreThis",
    "Scored",
    "decode_answer",
    "decode_enter",
    "decode_request",
]

MAX_ANSWER = 64 << 20
"""Maximum size of a sandbox's record, in bytes."""


class Enter(Record, frozen=True):
    """Enter the sandbox of the process `pid`, and load what `spec` names. `sources` is as in `protocol.Boot`."""

    pid: int
    spec: WorkerSpec
    sources: dict[str, bytes] = {}


class Open(Record, frozen=True, tag=True):
    """Open the session of this rollout, and run the setup functions. `meta` is sent with every tool call."""

    id: str
    row_index: int | None
    metadata: JsonObject
    meta: JsonObject


class Call(Record, frozen=True, tag=True):
    """Call a tool. `arguments` is the text that the model wrote."""

    number: int
    name: str
    arguments: str | JsonObject
    timeout: float


class Sampled(Record, frozen=True, tag=True):
    """The model's reply to a Sample, or the error of the request."""

    number: int
    message: Message = {}
    error: str | None = None


class ScoreThis(Record, frozen=True, tag=True):
    """Score a rollout with these functions, one after the other."""

    trajectory: ScoringInput
    functions: list[str]


Request = Open | Call | Sampled | ScoreThis


class Opened(Record, frozen=True, tag=True):
    """The setup functions have run; `failure` is that of the first that raised."""

    failure: Failure | None = None


class Answered(Record, frozen=True, tag=True):
    """A tool call ended."""

    number: int
    outcome: CallOutcome


class Sample(Record, frozen=True, tag=True):
    """A tool asks the rollout's model."""

    number: int
    messages: list[Message]
    params: JsonObject


class Scored(Record, frozen=True, tag=True):
    """The score of the next function."""

    score: Score


Answer = Ready | NotReady | Imported | Opened | Answered | Sample | Scored

decode_enter = msgspec.json.Decoder(Enter).decode
decode_request = msgspec.json.Decoder(Request).decode
decode_answer = msgspec.json.Decoder(Answer).decode
