"""Cassettes: recorded model replies as lines of JSON, to be reviewed, committed and replayed without a key.

A reply is found by its request as it is rendered (model, messages, tools, parameters) and the attempt, so five attempts
at a row replay five samples. Endpoint and key aren't part of a recording, and known keys are masked in all of it, the
request included. A request without a recording fails; it never reaches a model.

Any number of processes share a file. Each appends whole lines under a lock, and the first recording of a request counts
for all of them, so that a replay gives every rollout what it got when it was recorded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from osmosis_ai.errors import ModelError, StartError, UsageError
from osmosis_ai.folders import replaced_file
from osmosis_ai.masking import Masker
from osmosis_ai.models.base import ChatModel, Listen, streamed
from osmosis_ai.models.recorded_requests import Rendered, miss_message
from osmosis_ai.records import CassetteSpec, Completion, JsonObject, Message, ModelSpec, Record, Row, Tool

if TYPE_CHECKING:
    from osmosis_ai.failures import FailureKind
    from osmosis_ai.models.host import HostOptions
else:
    # A cassette written by another version may name a kind that this version doesn't know.
    FailureKind = str

__all__ = [
    "ENGINE",
    "Cassette",
    "CassetteModel",
    "Recording",
    "judge_file",
    "policy_file",
    "prune",
    "read_cassette",
    "recorded_models",
    "unused_recordings",
]

KEY_VERSION = 1
"""Part of every key; raise it when the meaning of a recording changes."""
KEY_DIGITS = 16
"""Hexadecimal digits of a key, 64 bits: short enough to read in a diff, too long to collide within a file."""


class RecordedError(Record, frozen=True):
    """A request that failed, as `ModelError` has it."""

    message: str
    kind: FailureKind
    status: int | None = None


class RecordedTools(Record, frozen=True, tag_field="record", tag="tools"):
    """Tools that recordings refer to by `name`, the hash of their definitions."""

    name: str
    definitions: list[Tool]


class Recording(Record, frozen=True, tag_field="record", tag="reply"):
    """One request and its reply, or the error it ended in.

    `messages` continue the conversation of the recording `after`, its reply included; without one they are all of it.
    `repeat` numbers equal requests of one rollout, and `draw` is that of `ModelHost.for_rollout`.
    """

    key: str
    model: str
    attempt: int
    messages: list[Message]
    after: str | None = None
    tools: str | None = None
    params: JsonObject = {}
    repeat: int = 0
    draw: str = ""
    reply: Completion | None = None
    error: RecordedError | None = None


_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(Recording | RecordedTools).decode
_decode_messages = msgspec.json.Decoder(list[Message]).decode
_decode_completion = msgspec.json.Decoder(Completion).decode


def policy_file(path: Path) -> Path:
    """Return the cassette of policies in a folder, or the named `.jsonl` file."""
    return path if path.suffix == ".jsonl" else path / "policy.jsonl"


def judge_file(path: Path) -> Path:
    """Return the cassette of judges in a folder, or beside the named `.jsonl` file."""
    return path.with_suffix(".judges.jsonl") if path.suffix == ".jsonl" else path / "judges.jsonl"


class CassetteContents:
    """The content of a cassette: recordings by key, and tools by name."""

    def __init__(self) -> None:
        self.replies: dict[str, Recording] = {}
        self.tools: dict[str, list[Tool]] = {}

    def add(self, line: bytes) -> None:
        """Add a line; the last recording of a key counts. Raises msgspec.DecodeError."""
        entry = _decode(line)
        if isinstance(entry, RecordedTools):
            self.tools[entry.name] = entry.definitions
        else:
            self.replies[entry.key] = entry

    def messages(self, recording: Recording) -> list[Message]:
        """Return the whole conversation of a recorded request."""
        parts: list[list[Message]] = []
        seen: set[str] = set()
        current: Recording | None = recording
        # A file edited by hand may chain in a circle.
        while current is not None and current.key not in seen:
            seen.add(current.key)
            parts.append(current.messages)
            current = self.replies.get(current.after) if current.after is not None else None
            if current is not None and current.reply is not None:
                parts.append([current.reply.message])
        return [message for part in reversed(parts) for message in part]

    def rendered(self, recording: Recording) -> Rendered:
        """Return the recorded request as it was rendered."""
        return Rendered(
            recording.model,
            recording.attempt,
            self.messages(recording),
            self.tools.get(recording.tools or "", []),
            recording.params,
        )

    def lines(self) -> Iterator[bytes]:
        """Yield the lines in the order of a tidy file: tools, then each conversation from its first request on."""
        used = {recording.tools for recording in self.replies.values()}
        for name in sorted(self.tools):
            if name in used:
                yield _encode(RecordedTools(name, self.tools[name]))
        following: dict[str | None, list[Recording]] = {}
        for recording in self.replies.values():
            known = recording.after if recording.after in self.replies else None
            following.setdefault(known, []).append(recording)

        def place(recording: Recording) -> tuple[str, bytes, int, int, str]:
            first = _encode_sorted(recording.messages)
            return recording.model, first, recording.attempt, recording.repeat, recording.key

        # A stack instead of recursion: a conversation may have more turns than the interpreter has frames.
        waiting = sorted(following.pop(None, []), key=place, reverse=True)
        while waiting:
            recording = waiting.pop()
            yield _encode(recording)
            waiting += sorted(following.pop(recording.key, []), key=place, reverse=True)


def read_cassette(path: Path) -> CassetteContents:
    """Read a cassette, empty if there is no file.

    Raises:
        UsageError: It can't be read, or a line isn't a recording; the message names the line.
    """
    found = CassetteContents()
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise UsageError(f"the recordings in {path} can't be read: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            # People edit these files.
            if line.strip():
                found.add(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path}:{number} is not a recorded reply: {error}; remove the line") from error
    return found


def recorded_models(path: Path) -> list[str]:
    """Return the names of the models in a cassette; raise UsageError if it can't be read."""
    return sorted({recording.model for recording in read_cassette(path).replies.values()})


def unused_recordings(spec: CassetteSpec) -> list[Recording]:
    """Return the recordings that no process of a run used."""
    used = set(_lines_of(Path(spec.uses)))
    return [one for one in read_cassette(Path(spec.path)).replies.values() if one.key not in used]


def prune(path: Path, keys: Iterable[str] = ()) -> None:
    """Put a cassette's lines into order, without the recordings of these keys; raise StartError if that fails."""
    if not path.exists():
        return
    try:
        with _locked(path) as file:
            found = read_cassette(path)
            for key in keys:
                found.replies.pop(key, None)
            tidy = b"".join(line + b"\n" for line in found.lines())
            file.seek(0)
            # Left alone if tidy: recording replays as well, and a run that records nothing should change nothing.
            if file.read() == tidy:
                return
            with replaced_file(path) as sink:
                sink.write(tidy)
    except OSError as error:
        raise StartError(f"the recordings in {path} can't be written: {error.strerror or error}") from error


class Cassette:
    """A cassette as one process uses it. Not thread-safe: it belongs to one event loop."""

    def __init__(self, spec: CassetteSpec, masker: Masker) -> None:
        self.spec = spec
        self.masker = masker
        self._path = Path(spec.path)
        self._found = read_cassette(self._path)
        # Inode and offset up to which the file is known. No file has inode 0, so the first `put` reads all of it again:
        # other processes may have appended since the constructor read it.
        self._read: tuple[int, int] = (0, 0)
        self._new: set[str] = set()

    def get(self, key: str) -> Recording | None:
        """Return the recording of a request, and note its use.

        When recording, return None for an error that an earlier run recorded, so that the request is made again.
        """
        found = self._found.replies.get(key)
        if found is None or (self.spec.mode == "record" and found.reply is None and key not in self._new):
            return None
        self._note(key)
        return found

    def put(self, recording: Recording, tools: list[Tool]) -> Recording:
        """Add a recording, unless another process has added one for its key; return the one that counts.

        Raises:
            StartError: The file can't be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path) as file:
                # Under the lock, and before the look-up: the first recording of a request counts for every process.
                self._catch_up(file)
                known = self._found.replies.get(recording.key)
                # A recorded error gives way to a reply, which comes later in the file and so counts.
                if known is None or known.reply is None:
                    if recording.tools is not None and recording.tools not in self._found.tools:
                        self._append(file, RecordedTools(recording.tools, tools))
                    self._append(file, recording)
                    known = recording
        except OSError as error:
            raise StartError(f"the recordings in {self._path} can't be written: {error.strerror or error}") from error
        self._new.add(recording.key)
        self._note(recording.key)
        return known

    def missing(self, request: Rendered) -> ModelError:
        """Return the error for a request without a recording, with the nearest recording and the difference."""
        recorded = [self._found.rendered(one) for one in self._found.replies.values()]
        message = miss_message(request, recorded, self._path.name)
        return ModelError(f"{message}; {self.spec.advice}", kind="unrecorded")

    def _append(self, file: BinaryIO, entry: Recording | RecordedTools) -> None:
        line = _encode(entry)
        file.seek(0, os.SEEK_END)
        file.write(line + b"\n")
        file.flush()
        self._found.add(line)
        self._read = (os.fstat(file.fileno()).st_ino, file.tell())

    def _catch_up(self, file: BinaryIO) -> None:
        """Read what other processes have appended since; a replaced file is read as a whole."""
        inode, done = self._read
        now = os.fstat(file.fileno()).st_ino
        file.seek(done if inode == now else 0)
        for line in file:
            self._found.add(line)
        self._read = (now, file.tell())

    def _note(self, key: str) -> None:
        # One unbuffered write in append mode, so that the lines of several processes don't mix.
        with Path(self.spec.uses).open("ab", buffering=0) as file:
            file.write(f"{key}\n".encode())


class CassetteModel:
    """One rollout's model in front of a cassette: it answers from recordings, and records what `inner` answers.

    Args:
        inner: Answers requests that aren't recorded; None to replay only.
        cassette: Holds the recordings.
        model: The model's name, part of the key.
        params: Sampling parameters of every request, part of the key.
        attempt: The rollout's attempt at its row.
        draw: Tells a later sample of the same attempt from earlier ones.
        asked: Counts equal requests, if several models share the count.
    """

    def __init__(
        self,
        inner: ChatModel | None,
        cassette: Cassette,
        model: str,
        params: JsonObject,
        attempt: int,
        draw: str = "",
        *,
        asked: Counter[str] | None = None,
    ) -> None:
        self._inner = inner
        self._cassette = cassette
        self._model = model
        self._params = params
        self._attempt = attempt
        self._draw = draw
        self._asked: Counter[str] = Counter() if asked is None else asked
        self._last: tuple[str, list[Message]] | None = None

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Return the recorded reply to this request, else the model's; raise ModelError if it failed or is missing."""
        inner = self._inner
        request = None if inner is None else partial(inner.complete, messages, tools, params)
        return await self._answer(messages, tools, params, request)

    async def stream(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
    ) -> Completion:
        """Return the recorded reply as a whole, else the model's, and pass on its parts."""
        inner = self._inner
        request = None if inner is None else partial(streamed, inner, messages, tools, params, listen)
        return await self._answer(messages, tools, params, request)

    async def aclose(self) -> None:
        """Close the inner model, but not the cassette, which its opener closes."""
        if self._inner is not None:
            await self._inner.aclose()

    async def _answer(
        self,
        messages: list[Message],
        tools: list[Tool],
        params: JsonObject,
        request: Callable[[], Awaitable[Completion]] | None,
    ) -> Completion:
        sent = {name: value for name, value in {**self._params, **params}.items() if value is not None}
        try:
            rendered = self._rendered(messages, tools, sent)
        except (TypeError, ValueError, RecursionError) as error:
            if request is not None:
                return await request()  # the model reports better what isn't JSON
            raise ModelError(f"the request isn't JSON: {error}", kind="bad_request") from error
        key, repeat = self._key(rendered)
        found = self._cassette.get(key)
        if found is not None:
            return self._replayed(found, rendered.messages)
        if request is None:
            raise self._cassette.missing(rendered)
        try:
            completion = await request()
        except ModelError as error:
            text = self._cassette.masker.text(str(error))
            self._put(key, repeat, rendered, error=RecordedError(text, error.kind, error.status))
            raise
        # The rollout continues with what a replay will give it, so that later requests have the same keys then.
        masked = _round_trip(completion, self._cassette.masker)
        # JSON can't carry this reply, so a replay will miss this request.
        if masked is None:
            return completion
        recorded = self._put(key, repeat, rendered, reply=masked)
        if recorded.reply is masked:
            self._last = key, [*rendered.messages, masked.message]
            return masked
        # Another process recorded this request first.
        return self._replayed(recorded, rendered.messages)

    def _rendered(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Rendered:
        """Return the request with known keys masked, as it is recorded and compared."""
        mask = self._cassette.masker.encoded
        return Rendered(
            self._model,
            self._attempt,
            _decode_messages(mask(_encode(messages))),
            _decode_messages(mask(_encode(tools))),
            msgspec.json.decode(mask(_encode(params)), type=JsonObject),
        )

    def _key(self, request: Rendered) -> tuple[str, int]:
        """Return the request's key, and how often this rollout made the same request before."""
        identity = [KEY_VERSION, request.model, request.attempt, self._draw]
        # Endpoint and provider aren't part of the key: a recording made at one address replays without any.
        digest = hashlib.sha256(_encode_sorted([identity, request.params, request.messages]))
        # Not sorted: the model reads a schema's properties in this order.
        digest.update(_encode(request.tools))
        key = digest.hexdigest()[:KEY_DIGITS]
        repeat = self._asked[key]
        self._asked[key] += 1
        if repeat:
            digest.update(b"%d" % repeat)
        return digest.hexdigest()[:KEY_DIGITS], repeat

    def _put(
        self,
        key: str,
        repeat: int,
        request: Rendered,
        *,
        reply: Completion | None = None,
        error: RecordedError | None = None,
    ) -> Recording:
        after, messages = None, request.messages
        if self._last is not None and messages[: len(self._last[1])] == self._last[1]:
            after, messages = self._last[0], messages[len(self._last[1]) :]
        name = hashlib.sha256(_encode(request.tools)).hexdigest()[:KEY_DIGITS] if request.tools else None
        recording = Recording(
            key, self._model, self._attempt, messages, after, name, request.params, repeat, self._draw, reply, error
        )
        return self._cassette.put(recording, request.tools)

    def _replayed(self, recording: Recording, messages: list[Message]) -> Completion:
        if recording.error is not None:
            error = recording.error
            raise ModelError(error.message, kind=error.kind, status=error.status)
        if recording.reply is None:
            raise ModelError(f"recording {recording.key} has neither a reply nor an error", kind="unrecorded")
        self._last = recording.key, [*messages, recording.reply.message]
        return msgspec.structs.replace(recording.reply, cached=True, attempts=0)


class _Host:
    """Recorded replies in place of a model."""

    def __init__(self, spec: ModelSpec, cassette: Cassette) -> None:
        self.spec = spec
        self._cassette = cassette

    def for_rollout(self, row: Row, run_index: int, draw: str = "") -> ChatModel:
        return CassetteModel(None, self._cassette, self.spec.model, self.spec.params, run_index, draw)

    def price_known(self) -> bool:
        return True  # a replay costs nothing

    async def probe(self) -> None:
        """Do nothing: recordings are checked when the run is prepared."""

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


class _Engine:
    def create(self, spec: ModelSpec, options: HostOptions) -> _Host:
        if options.cassette is None:
            raise StartError(f"there are no recordings for {spec.name}")
        return _Host(spec, options.cassette)

    def preload(self, spec: ModelSpec) -> None:
        return  # nothing to import

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        """Return None: requests go nowhere."""
        return None


ENGINE = _Engine()


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading and appending, locked against other processes, also if one replaces it meanwhile."""
    while True:
        with path.open("a+b") as file:
            # `prune` renames a new file into place, so the lock may be held on one that has no name any more.
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return


def _lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def _round_trip(completion: Completion, masker: Masker) -> Completion | None:
    """Return a reply as a replay will give it, keys masked; None if JSON would change it (a NaN, a lone surrogate)."""
    try:
        data = _encode(completion)
        if _decode_completion(data) != completion:
            return None
    except (TypeError, ValueError):
        return None
    return _decode_completion(masker.encoded(data))
