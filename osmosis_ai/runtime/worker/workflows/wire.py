"""The client of a rollout server, for every released version of the protocol.

All versions accept one `POST /rollout`, and ignore unknown fields. The answer shows how to get the result: with a
lease, the client polls for it (since 0.3.3); without one, the server calls back the URLs in the request, with one
sample (0.3.0 to 0.3.2) or several (0.2.23 to 0.2.31).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Annotated, TypeAlias, TypeVar

import anyio
import msgspec

from osmosis_ai.errors import OsmosisError
from osmosis_ai.http import Answer, HttpClient, HttpError, retry_after
from osmosis_ai.records import JsonObject, Message, Record, Tool
from osmosis_ai.rollout.vocabulary import API_KEY_VARIABLE, POLLING_LEASE_HEADER
from osmosis_ai.runtime.worker.workflows.callbacks import (
    Callbacks,
    Ending,
    RefusedReportError,
    Report,
    graded,
    read_report,
)
from osmosis_ai.tasks import task_group
from osmosis_ai.wire_json import encode_json

__all__ = ["ALIVE_SECONDS", "Asked", "RolloutServer", "RolloutServerError"]

REQUEST_SECONDS = 30.0
CANCEL_SECONDS = 5.0
DELIVERY_SECONDS = 5.0
ALIVE_SECONDS = 5.0
ADMISSION_PAUSE = 1.0
LONGEST_PAUSE = 60.0
SHORTEST_PAUSE = 0.05
POLL_PAUSES = (0.1, 0.5, 1.0, 2.0, 4.0)
BUSY = (429, 503)
GATEWAY = (500, 502, 503, 504)
MAX_BYTES = 64 * 1024 * 1024


T = TypeVar("T")


class RolloutServerError(OsmosisError):
    """The server itself failed, not the rollout: it can't be reached, or its answer makes no sense.

    Attributes:
        lost: True if the server has probably ended, been replaced or been blocked, so the rollout may run again on
            another one.
        blocked: True if user code has certainly blocked the server; it may be another rollout's code.
    """

    def __init__(self, message: str, *, lost: bool = False, blocked: bool = False) -> None:
        super().__init__(message)
        self.lost = lost or blocked
        self.blocked = blocked


class Asked(Record, frozen=True):
    """A rollout to request from a server. Times are in seconds.

    `url` is the base URL for the rollout's model, tools and reports, and `key` the bearer key for all of them. With
    `grade`, the rollout ends with its grading. Servers on released SDKs ignore `tools`.
    """

    id: str
    messages: list[Message]
    url: str
    key: str
    agent_timeout: float
    grader_timeout: float
    label: str | None = None
    metadata: JsonObject | None = None
    tools: list[Tool] = []
    grade: bool = True

    def body(self) -> JsonObject:
        """Return the request's body, which has every form's fields."""
        body: JsonObject = {
            "rollout_id": self.id,
            "initial_messages": self.messages,
            "label": self.label,
            "metadata": self.metadata,
            "chat_completions_url": self.url,
            "completion_callback_url": f"{self.url}/completion",
            # The oldest version has just one key, the controller's, and uses it for model calls too.
            "controller_api_key": self.key,
            "llm_api_key": self.key,
            "agent_timeout_sec": self.agent_timeout,
            "grader_timeout_sec": self.grader_timeout,
            "grade": self.grade,
        }
        if self.grade:
            body["grader_callback_url"] = f"{self.url}/grader"
        if self.tools:
            body |= {"tools": self.tools, "tools_url": f"{self.url}/tools"}
        return body


Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Lease(Record, frozen=True):
    """A server's promise to keep a rollout running while its result is polled. Times are in seconds."""

    # It becomes a header.
    polling_lease_token: Annotated[str, msgspec.Meta(max_length=4096, pattern="^[!-~]+$")]
    result_wait_timeout_sec: Seconds = 30.0
    polling_lease_timeout_sec: Seconds = 120.0


class RolloutServer:
    """A client of the rollout server at an address, which may require a key.

    A report may arrive up to `delivery` seconds after its deadline. If it doesn't, the server gets `alive` seconds to
    answer a health check.
    """

    def __init__(
        self, url: str, *, key: str | None = None, delivery: float = DELIVERY_SECONDS, alive: float = ALIVE_SECONDS
    ) -> None:
        self.url = url.rstrip("/")
        self._delivery = delivery
        self._alive = alive
        # No limit on connections: the caller bounds the number of in-flight rollouts.
        self._http = HttpClient(REQUEST_SECONDS, key=key, max_reply_bytes=MAX_BYTES)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def health(self, seconds: float) -> JsonObject:
        """Return the server's health; raise RolloutServerError if it doesn't answer within `seconds`."""
        try:
            answer = await self._http.get(f"{self.url}/health", seconds=seconds)
            if answer.status == 401:
                raise RolloutServerError(f"it requires an API key: set {API_KEY_VARIABLE} to the server's key")
            if answer.status != 200:
                raise RolloutServerError(answer.describe(None)[0])
            body = answer.json()
        except HttpError as error:
            raise RolloutServerError(str(error), lost=True) from error
        if not isinstance(body, dict):
            raise RolloutServerError(f"{self.url}/health answered with something else than a JSON object")
        return body

    async def run(self, asked: Asked, callbacks: Callbacks, taken: Callable[[], None] = lambda: None) -> Ending:
        """Run a rollout to its end, within its deadlines even if the server ignores them.

        Calls `taken` when the server has accepted the rollout. If the caller is cancelled, it tells the server to
        cancel the rollout.

        Raises:
            RolloutServerError: The server is at fault.
        """
        cancels = True
        try:
            lease = await self._admit(asked)
            taken()
            if lease is None:
                ending = await self._called_back(asked, callbacks)
            else:
                ending = await self._polled(asked, lease)
            cancels = ending.trouble in ("callback_timeout", "missing_grader_callback")
            return ending
        except RolloutServerError as error:
            cancels = not error.blocked
            raise
        finally:
            if cancels:
                with anyio.CancelScope(shield=True):
                    await self.cancel(asked.id)

    async def cancel(self, rollout_id: str) -> None:
        """Ask the server to cancel a rollout. Older servers can't; there, the rollout's model calls start to fail."""
        with anyio.move_on_after(CANCEL_SECONDS):
            try:
                await self._http.post(f"{self.url}/rollout/cancel", encode_json({"ids": [rollout_id]}))
            except HttpError:
                # Errors don't matter: later calls of the rollout are refused anyway.
                return

    async def _admit(self, asked: Asked) -> Lease | None:
        """Submit the rollout, waiting while the server's queue is full; return the lease if there is one to poll."""
        url, body = f"{self.url}/rollout", encode_json(asked.body())
        deadline = monotonic() + asked.agent_timeout
        while True:
            try:
                # A server blocked by another rollout's code will accept this one later.
                answer = await self._http.post(url, body, seconds=asked.agent_timeout + self._delivery)
            except HttpError as error:
                # Don't send it again, because the server may have started it.
                raise RolloutServerError(str(error), lost=True) from error
            if answer.status not in BUSY:
                break
            pause = retry_after(answer.headers)
            pause = min(max(ADMISSION_PAUSE if pause is None else pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            if monotonic() + pause > deadline:
                said = answer.describe(None)[0]
                raise RolloutServerError(f"the server took no rollout for {asked.agent_timeout:g} s: {said}")
            await anyio.sleep(pause)
        if answer.status not in (200, 202):
            raise RolloutServerError(answer.describe(None)[0], lost=answer.status >= 500)
        reply = _json_of(answer)
        if not isinstance(reply, dict):
            raise RolloutServerError(f"{url} answered with something else than a JSON object")
        if "polling_lease_token" not in reply:
            return None
        try:
            return msgspec.convert(reply, Lease)
        except msgspec.ValidationError as error:
            raise RolloutServerError(f"{url} answered with a lease that can't be read: {error}") from error

    async def _called_back(self, asked: Asked, callbacks: Callbacks) -> Ending:
        """Wait for the callbacks. The grading may arrive first; `Callbacks` ignores repeated and late ones."""
        any_report = callbacks.until(lambda: callbacks.completion is not None or callbacks.grading is not None)
        await self._in_time(any_report, monotonic() + asked.agent_timeout)
        if callbacks.completion is None and callbacks.grading is None:
            return _late(asked, grading=False, refused=callbacks.refused)
        if callbacks.completion is None and callbacks.grading is not None and callbacks.grading.status != "success":
            # The other callback may give the reason.
            with anyio.move_on_after(self._delivery):
                await callbacks.until(lambda: callbacks.completion is not None)
        completion = callbacks.completion
        if completion is not None and completion.status != "success":
            return _failed(completion)
        if not asked.grade:
            return Ending()
        grading = callbacks.until(lambda: callbacks.grading is not None)
        await self._in_time(grading, monotonic() + asked.grader_timeout)
        if callbacks.grading is None:
            return _late(asked, grading=True, refused=callbacks.refused)
        return graded(callbacks.grading)

    async def _polled(self, asked: Asked, lease: Lease) -> Ending:
        """Poll until the result is final. The server also answers whenever the rollout's status changes."""
        deadline = monotonic() + asked.agent_timeout
        grading = False
        while True:
            polled = monotonic()
            report = await self._in_time(self._poll(asked.id, lease), deadline)
            if report is None:
                return _late(asked, grading=grading)
            if report.status == "grading" and not grading:
                grading, deadline = True, monotonic() + asked.grader_timeout
            if report.err_category == "lease_expired":
                message = "it let the lease expire although the client kept polling, so user code must have blocked it"
                raise RolloutServerError(message, blocked=True)
            if report.status in ("success", "failure", "cancelled"):
                return _result(report, asked, grading=grading)
            # Avoid a tight loop with a server that answers at once without news.
            await anyio.sleep(max(0.0, polled + SHORTEST_PAUSE - monotonic()))

    async def _in_time(self, report: Awaitable[T], deadline: float) -> T | None:
        """Wait for a report until its deadline plus the time for delivery; return None if it is late.

        Raises RolloutServerError if the server doesn't answer meanwhile, because user code blocks it.
        """

        async def check_alive() -> None:
            await anyio.sleep(max(0.0, deadline - monotonic()))
            try:
                await self.health(self._alive)
            except RolloutServerError as error:
                if error.lost:
                    message = f"at a rollout's deadline, it answered nothing for {self._alive:g} s: {error}"
                    raise RolloutServerError(message, blocked=True) from error

        arrived: T | None = None
        async with task_group() as group:
            group.start_soon(check_alive)
            with anyio.move_on_after(deadline + self._delivery - monotonic()) as scope:
                arrived = await report
            if not scope.cancelled_caught:
                group.cancel_scope.cancel()
        return arrived

    async def _poll(self, rollout_id: str, lease: Lease) -> Report:
        url = f"{self.url}/rollout/{rollout_id}/result"
        renewed = monotonic()
        pauses = iter(POLL_PAUSES)
        while True:
            try:
                answer = await self._http.get(
                    url,
                    seconds=lease.result_wait_timeout_sec + self._delivery,
                    headers={POLLING_LEASE_HEADER: lease.polling_lease_token},
                )
                problem = None if answer.status == 200 else answer.describe(None)[0]
                if problem is not None and answer.status not in GATEWAY:
                    # An unknown rollout or lease: this isn't the server that accepted the rollout.
                    raise RolloutServerError(problem, lost=answer.status in (403, 404))
            except HttpError as error:
                problem = str(error)
            if problem is None:
                try:
                    return read_report(answer.body, rollout_id)
                except RefusedReportError as error:
                    raise RolloutServerError(f"{url} answered with a result that can't be read: {error}") from error
            pause = next(pauses, None)
            if pause is None or monotonic() + pause - renewed > lease.polling_lease_timeout_sec:
                raise RolloutServerError(problem, lost=True)
            await anyio.sleep(pause)


def _result(report: Report, asked: Asked, *, grading: bool) -> Ending:
    """Judge a polled result, which doesn't tell a failed workflow from a failed grading."""
    if report.status == "success":
        return graded(report) if asked.grade else Ending(report.all_samples)
    bare = not (report.sample or report.err_message or report.err_category)
    if report.status == "failure" and asked.grade and (grading or bare or report.sample is not None):
        return graded(report)
    return _failed(report)


def _failed(report: Report) -> Ending:
    message = report.err_message or (
        "the server cancelled the rollout" if report.status == "cancelled" else "the workflow failed without a message"
    )
    return Ending(trouble="workflow_failed", message=message, category=report.err_category)


def _late(asked: Asked, *, grading: bool, refused: str | None = None) -> Ending:
    if refused is not None:
        return Ending(trouble="rollout_protocol_error", message=f"the server's callback can't be used: {refused}")
    if grading:
        message = f"grading took longer than {asked.grader_timeout:g} s"
        return Ending(trouble="missing_grader_callback", message=message, category="timeout")
    message = f"the workflow took longer than {asked.agent_timeout:g} s"
    return Ending(trouble="callback_timeout", message=message, category="timeout")


def _json_of(answer: Answer) -> object:
    try:
        return answer.json()
    except HttpError as error:
        raise RolloutServerError(str(error)) from error
