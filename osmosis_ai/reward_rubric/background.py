"""Run all judge calls of a process on the event loop of one background thread.

LiteLLM's clients belong to the loop that first used them, so sharing one loop keeps connections open between calls from
any thread or event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from osmosis_ai.errors import ProviderRequestError
from osmosis_ai.records import CassetteSpec, ModelSpec
from osmosis_ai.reward_rubric.target import JUDGE_PRICED, Target, current_cassette, has_price, missing_key

if TYPE_CHECKING:
    from osmosis_ai.models.cassette import Cassette

__all__ = ["cassette_of", "client_of", "submit", "wait"]

T = TypeVar("T")

CLOSING_SECONDS = 2.0
"""Seconds that connections have to close when the process exits."""
CONCURRENCY = 64
"""Maximum number of concurrent requests to one judge from this process."""
# For these, LiteLLM would ask a server whether the model takes a schema.
ASKED_ONLINE = frozenset({"ollama", "ollama_chat", "huggingface"})
# These can authenticate without an API key; LiteLLM finds their credentials.
OWN_CREDENTIALS = ("azure", "bedrock", "sagemaker", "vertex_ai", "watsonx", "github_copilot")


class JudgeClient:
    """A judge's client and request limiter, kept for the life of the process."""

    def __init__(self, target: Target) -> None:
        # Imported late: LiteLLM takes seconds, and a replay needs none of it.
        from osmosis_ai.models.litellm import LiteLLMModel, import_litellm, missing_keys
        from osmosis_ai.models.retry import AdaptiveLimiter

        if os.environ.get(JUDGE_PRICED) and not has_price(target):
            unpriced = "no price is known for it, so --max-cost can't be enforced; it wasn't called"
            raise ProviderRequestError(target.provider, target.model, unpriced)
        if target.api_key is None and not target.provider.startswith(OWN_CREDENTIALS):
            for variable in missing_keys(target.name):
                if variable.endswith("_API_KEY"):
                    raise missing_key(target.name, variable)
        supports_schema = import_litellm().supports_response_schema
        self.takes_schema = target.provider not in ASKED_ONLINE and bool(supports_schema(model=target.name))
        # "the judge" is the name shown in error messages, after the provider's name.
        # The time limit is only a backstop, because each evaluation has one of its own.
        spec = ModelSpec("the judge", "litellm", target.name, target.base_url, target.api_key, request_timeout=3600.0)
        self.model: LiteLLMModel = LiteLLMModel(spec)
        self.limiter: AdaptiveLimiter = AdaptiveLimiter(CONCURRENCY)


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_clients: dict[tuple[str, str | None, str | None], JudgeClient] = {}
_cassettes: dict[tuple[CassetteSpec, str | None], Cassette] = {}


def client_of(target: Target) -> JudgeClient:
    """Return a judge's client, for use on the loop only."""
    key = (target.name, target.base_url, target.api_key)
    if key not in _clients:
        _clients[key] = JudgeClient(target)
    return _clients[key]


def cassette_of(target: Target) -> Cassette | None:
    """Return the recordings of judge calls, if this process records or replays them; for use on the loop only."""
    spec = current_cassette()
    if spec is None:
        return None
    from osmosis_ai.masking import Masker
    from osmosis_ai.models.cassette import Cassette

    # By key, because each one is masked in what is recorded.
    key = (spec, target.api_key)
    if key not in _cassettes:
        masker = Masker.from_environment(os.environ, [target.api_key] if target.api_key else [])
        _cassettes[key] = Cassette(spec, masker)
    return _cassettes[key]


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start work on the loop; cancelling the future cancels the work."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # A daemon, because a judge that never answers must not keep the process alive.
            threading.Thread(target=_loop.run_forever, name="judge calls", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


def wait(future: Future[T]) -> T:
    """Block the calling thread until the work is done; an interrupted wait cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _close() -> None:
    # The thread that waits for a running call would report its closed connection as an error.
    if asyncio.all_tasks() == {asyncio.current_task()}:
        while _clients:
            _, client = _clients.popitem()
            await client.model.aclose()


def _end() -> None:
    if _loop is not None:
        with suppress(FutureTimeoutError):
            asyncio.run_coroutine_threadsafe(_close(), _loop).result(CLOSING_SECONDS)


def _forget() -> None:
    """Reset in a forked child, which doesn't inherit the thread: it starts its own on demand."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()
    _clients.clear()
    _cassettes.clear()


atexit.register(_end)
# Windows has no forks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
