"""Manage the rollouts of a server: accept each once, queue and run it, and deliver its result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import msgspec

from osmosis_ai.errors import OsmosisError, OsmosisRolloutError
from osmosis_ai.folders import OWN_FOLDER, UnreadableError, private_folder, replaced_file
from osmosis_ai.masking import Masker
from osmosis_ai.records import Record
from osmosis_ai.rollout.client import TrainerPool, encode
from osmosis_ai.rollout.core.base import file_stem
from osmosis_ai.rollout.core.schemas import RolloutRequest, RolloutResponse
from osmosis_ai.rollout.runner import RolloutRunner, error_response
from osmosis_ai.rollout.server.ledger import Ledger, OpenRollout
from osmosis_ai.rollout.settings import ClientSettings, ServerSettings

__all__ = ["Figures", "Rollouts", "UnavailableError"]

_OPEN = ("asked", "queued", "running", "delivering")
logger = logging.getLogger(__name__)


class UnavailableError(OsmosisError):
    """The server can't accept rollouts now."""


class Figures(Record, frozen=True):
    """Counts of a server's rollouts."""

    active_rollouts: int
    queued_rollouts: int
    completed_rollouts: int
    undelivered_rollouts: int


class _Entry:
    """One accepted rollout. Once finished, it keeps only the data that a repeated request needs."""

    # Small, because finished ones are remembered for an hour by default.
    __slots__ = ("answer", "answered", "number", "phase", "refusal", "scope", "since")

    def __init__(self, number: int = 0) -> None:
        # Its number in the ledger, once recorded.
        self.number = number
        self.answered = anyio.Event()
        self.answer: bytes | None = None
        self.refusal: OsmosisError | None = None
        self.phase: Literal["asked", "queued", "running", "delivering", "finished"] = "asked"
        self.scope = anyio.CancelScope()
        self.since = time.monotonic()


class Rollouts:
    """A queue that accepts rollouts, runs a limited number concurrently, and delivers their results or keeps them in a
    folder."""

    def __init__(
        self,
        runner: RolloutRunner,
        settings: ServerSettings,
        client: ClientSettings,
        undelivered: Path,
        trainer_key: str | None = None,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._undelivered = undelivered
        self._trainer_key = trainer_key
        self._ledger = Ledger(undelivered)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._open: set[_Entry] = set()
        self._group: anyio.abc.TaskGroup | None = None
        self._pool = TrainerPool(client)
        self._completed = 0
        self._kept = 0
        self.is_stopping = False

    @property
    def figures(self) -> Figures:
        phases = [entry.phase for entry in self._open]
        return Figures(phases.count("running"), phases.count("queued"), self._completed, self._kept)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Accept rollouts inside the block.

        When the block ends, refuse new rollouts, end waiting ones at once, give running ones a grace period, and report
        all of them to their trainers. Raises StartError if the runner can't start.
        """
        self._slots = anyio.Semaphore(self._settings.max_concurrent_rollouts)
        self._changed = anyio.Condition()
        await self._runner.start()
        try:
            # In this order, so that the connections outlive the tasks that deliver results.
            async with self._pool, anyio.create_task_group() as self._group:
                for number, rollout in self._lost():
                    self._group.start_soon(self._report_lost, number, rollout)
                try:
                    yield
                finally:
                    await self._stop()
        finally:
            self._group = None
            self._ledger.close()
            with anyio.CancelScope(shield=True):
                await self._runner.aclose()

    async def accept(self, request: RolloutRequest) -> bytes:
        """Accept a rollout, or recognize one accepted before.

        Returns:
            The encoded InitResponse, which is the same for every request with the same idempotency key.

        Raises:
            UnavailableError: The server is stopping, not started, or full.
            OsmosisError: The loop failed to list its tools; nothing was started.
        """
        # The prefix keeps the two kinds of key apart.
        key = ("key", request.idempotency_key) if request.idempotency_key else ("rollout", request.rollout_id)
        entry = self._entries.get(key)
        if entry is None:
            if self.is_stopping:
                raise UnavailableError("the server accepts no new rollouts: it is stopping")
            if self._group is None:
                raise UnavailableError("the application is not started: the server must run its ASGI lifespan")
            if len(self._open) >= self._settings.max_open_rollouts:
                raise UnavailableError(f"the server already has {len(self._open)} open rollouts; try again later")
            # No await between lookup and insertion, so that only one of many equal requests starts the rollout.
            entry = self._entries[key] = _Entry()
            self._open.add(entry)
            # Not in the request's own task, because its client may disconnect.
            self._group.start_soon(self._serve, key, entry, request)
        await entry.answered.wait()
        if entry.answer is None:
            raise entry.refusal or UnavailableError("the server stopped before the rollout began")
        return entry.answer

    async def _serve(self, key: tuple[str, str], entry: _Entry, request: RolloutRequest) -> None:
        response = None
        try:
            with entry.scope:
                if not await self._answer(entry, request):
                    return
                response = await self._run(entry, request)
        finally:
            if entry.answer is None:
                # Nothing was started, so the client may repeat the request.
                self._entries.pop(key, None)
                self._open.discard(entry)
                entry.answered.set()
        if entry.answer is None:
            return
        if response is None:
            response = error_response(request, "the server stopped before the rollout had ended")
        why, seconds = response.error_message or response.finish_reason, time.monotonic() - entry.since
        logger.info("rollout %r: %s (%s) in %.1f s", request.rollout_id, response.status.value, why, seconds)
        # A new scope, so that a cancelled rollout is still reported.
        entry.scope = anyio.CancelScope()
        entry.phase = "delivering"
        await self._notify()
        await self._deliver(entry, request, response)
        entry.phase = "finished"
        self._open.discard(entry)
        self._completed += 1
        asyncio.get_running_loop().call_later(self._settings.record_ttl_seconds, self._entries.pop, key, None)
        await self._notify()

    async def _answer(self, entry: _Entry, request: RolloutRequest) -> bool:
        try:
            tools = await self._runner.tools(request)
            answer = encode({"rollout_id": request.rollout_id, "tools": tools})
            entry.number = self._note(request)
            entry.answer = answer
        except OsmosisError as error:
            entry.refusal = error
        except Exception as error:
            # A bug in the runner fails only this rollout.
            logger.exception("rollout %r: asking for its tools failed", request.rollout_id)
            entry.refusal = OsmosisRolloutError(f"can't get the loop's tools: {type(error).__name__}")
        if entry.answer is None:
            logger.error("rollout %r was refused: %s", request.rollout_id, entry.refusal)
            return False
        entry.phase = "queued"
        entry.answered.set()
        return True

    def _note(self, request: RolloutRequest) -> int:
        """Record a rollout in the ledger before its trainer relies on it."""
        try:
            return self._ledger.accept(request)
        except OSError as error:
            # A full disk shouldn't stop a training run.
            logger.error("rollout %r is in no file, and lost if the server is killed: %s", request.rollout_id, error)
            # No rollout has this number, so the ledger ignores its end.
            return 0

    def _end(self, entry: _Entry) -> None:
        try:
            self._ledger.end(entry.number)
        except OSError as error:
            logger.error("a rollout that has ended may be reported again after a restart: %s", error)

    def _lost(self) -> list[tuple[int, OpenRollout]]:
        try:
            return self._ledger.lost()
        except (OSError, UnreadableError) as error:
            logger.error("rollouts of a server that was killed can't be read: %s", error)
            return []

    async def _run(self, entry: _Entry, request: RolloutRequest) -> RolloutResponse:
        async with self._slots:
            entry.phase, entry.since = "running", time.monotonic()
            try:
                return await self._runner.run(request)
            except Exception as error:
                # As above; an accepted rollout always ends with a result.
                logger.exception("rollout %r: running it failed", request.rollout_id)
                return error_response(request, f"the rollout could not be run: {type(error).__name__}: {error}")

    async def _report_lost(self, number: int, rollout: OpenRollout) -> None:
        """Report a rollout that an earlier server left as an ERROR, or keep that if its trainer needs a lost key."""
        key = self._trainer_key if rollout.has_key else None
        request = RolloutRequest(rollout_id=rollout.rollout_id, server_url=rollout.server_url, messages=[], api_key=key)
        response = error_response(request, "the server was killed before the rollout had ended")
        entry = _Entry(number)
        if rollout.has_key and key is None:
            self._keep(entry, request, response, "the server was killed, and the trainer's key with it")
            return
        entry.phase = "delivering"
        self._open.add(entry)
        await self._deliver(entry, request, response)
        self._open.discard(entry)
        await self._notify()

    async def _deliver(self, entry: _Entry, request: RolloutRequest, response: RolloutResponse) -> None:
        reason: str | None = "the server stopped before the trainer had accepted it"
        try:
            with entry.scope:
                await self._pool.client(request).complete_rollout(response)
                reason = None
                self._end(entry)
        except OsmosisRolloutError as error:
            reason = str(error)
        except Exception as error:
            # As above: the result is kept, and the other rollouts go on.
            logger.exception("rollout %r: delivering its result failed", request.rollout_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            if reason is not None:
                self._keep(entry, request, response, reason)

    def _keep(self, entry: _Entry, request: RolloutRequest, response: RolloutResponse, reason: str) -> None:
        self._kept += 1
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        file = self._undelivered / f"{stamp}-{file_stem(request.rollout_id)}-{secrets.token_hex(3)}.json"
        # `response` is the callback's body, ready to be sent again; the trainer's key is masked.
        content = {"server_url": request.server_url, "reason": reason, "response": response.model_dump()}
        try:
            if self._undelivered.parent.name == OWN_FOLDER:
                private_folder(self._undelivered.parent)
            self._undelivered.mkdir(mode=0o700, parents=True, exist_ok=True)
            masked = Masker([request.api_key or ""]).encoded(encode(content))
            encoded = msgspec.json.format(masked, indent=2) + b"\n"
            with replaced_file(file, private=True) as sink:
                sink.write(encoded)
            self._end(entry)
        except (OSError, OsmosisRolloutError) as error:
            message = "rollout %r: its result can't be delivered (%s) nor kept (%s): it is lost"
            logger.error(message, request.rollout_id, reason, error)
        else:
            logger.error("rollout %r: its result can't be delivered (%s); kept in %s", request.rollout_id, reason, file)

    async def _stop(self) -> None:
        self.is_stopping = True
        self._cancel("asked", "queued")
        running = self.figures.active_rollouts
        logger.info("stopping: %s still running", "1 rollout is" if running == 1 else f"{running} rollouts are")
        await self._until_none("running", seconds=self._settings.shutdown_grace_seconds)
        self._cancel("asked", "queued", "running")
        await self._until_none(*_OPEN, seconds=self._settings.delivery_grace_seconds)
        self._cancel("delivering")

    def _cancel(self, *phases: str) -> None:
        for entry in self._open:
            if entry.phase in phases:
                entry.scope.cancel()

    async def _until_none(self, *phases: str, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            async with self._changed:
                while any(entry.phase in phases for entry in self._open):
                    await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
