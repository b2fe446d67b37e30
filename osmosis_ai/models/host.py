"""Models for the life of a worker: `create_model` makes a `ModelHost`, which gives each rollout its model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.failures import FailureKind
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.engines import load_engine
from osmosis_ai.models.retry import AdaptiveLimiter, OnWait, RetryingModel
from osmosis_ai.records import ModelSpec, Row
from osmosis_ai.retry import RetryPolicy

if TYPE_CHECKING:
    from osmosis_ai.models.cache import ReplyCache
    from osmosis_ai.models.cassette import Cassette

__all__ = ["UNKNOWN_MODEL", "HostOptions", "ModelHost", "RemoteEngine", "create_model", "import_model"]

PROBE_TOKENS = 16
"""Maximum tokens of the probe's reply; its content doesn't matter."""

# Some endpoints answer 400 for an unknown model or a wrong key, and only the text tells which.
UNKNOWN_MODEL = re.compile(
    r"model\b.{0,120}(not found|not exist|n't exist)|(unknown|invalid|no such|not a valid) model", re.IGNORECASE
)
REFUSED_KEY = re.compile(
    r"(invalid|incorrect|missing|no) api.?key|api.?key.{0,40}(not valid|invalid|incorrect|missing|required)",
    re.IGNORECASE,
)


class ModelHost(Protocol):
    """A model for the life of a worker: its connections, and one `ChatModel` per rollout."""

    spec: ModelSpec

    def for_rollout(self, row: Row, run_index: int, draw: str = "") -> ChatModel:
        """Return the model for a row's rollout number `run_index`, from 0. The host owns it: don't close it.

        The reply cache answers only requests of the same `draw`.
        """
        ...

    def price_known(self) -> bool:
        """Return True if the model's price is known, so that `--max-cost` can be kept."""
        ...

    async def probe(self) -> None:
        """Check with one small request that the model answers.

        Raises:
            ModelStartError: It doesn't answer; the message says what to set.
        """
        ...

    async def aclose(self) -> None: ...


class HostOptions(NamedTuple):
    """Options for a host's requests.

    Attributes:
        concurrency: Maximum number of concurrent requests, lowered while the endpoint is overloaded.
        policy: How failed requests are retried.
        on_wait: Called for each wait before a retry.
        cache: Stores replies and is asked first, None for no cache. The caller owns it.
        cassette: Records replies, or holds those to replay, None for neither. The caller owns it.
    """

    concurrency: int = 1000
    policy: RetryPolicy = RetryPolicy()
    on_wait: OnWait | None = None
    cache: ReplyCache | None = None
    cassette: Cassette | None = None


class Engine(Protocol):
    """One way to call models: the `ENGINE` of a module in `engines`. For a model that doesn't exist, `create` and
    `preload` raise ModelStartError."""

    def create(self, spec: ModelSpec, options: HostOptions) -> ModelHost:
        """Create the model, ready for its first request, without opening a connection."""
        ...

    def preload(self, spec: ModelSpec) -> None:
        """Import what the model needs, for processes forked from this one; start no connection or thread."""
        ...

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        """Return where requests go, as far as spec and environment tell, as JSON: part of a cached reply's key."""
        ...


def create_model(spec: ModelSpec, options: HostOptions = HostOptions()) -> ModelHost:  # noqa: B008 - it is immutable
    """Create the model that a spec describes, ready for its first request; see `Engine.create`."""
    return load_engine(spec).create(spec, options)


def import_model(spec: ModelSpec) -> None:
    """Import what a model needs, for processes forked from this one; see `Engine.preload`."""
    load_engine(spec).preload(spec)


class RemoteEngine(ABC):
    """An engine that calls models over a network: it probes once, retries, throttles on overload and caches replies. A
    subclass makes the client and phrases the hints."""

    def create(self, spec: ModelSpec, options: HostOptions) -> ModelHost:
        return _RemoteHost(self, spec, options)

    def preload(self, spec: ModelSpec) -> None:
        return  # the engine's module imports what a client needs

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        return spec.base_url

    @abstractmethod
    def client(self, spec: ModelSpec) -> ChatModel:
        """Create the model's bare client without opening a connection."""

    @abstractmethod
    def price_known(self, spec: ModelSpec) -> bool:
        """Return True if the price of the model's tokens is known."""

    @abstractmethod
    async def hint(self, spec: ModelSpec, kind: FailureKind) -> str:
        """Return advice for a first request that failed in this way, as a full sentence."""


class _RemoteHost:
    """One client and one limiter, shared by every rollout of a worker."""

    def __init__(self, engine: RemoteEngine, spec: ModelSpec, options: HostOptions) -> None:
        self.spec = spec
        self._engine = engine
        self._cache = options.cache
        self._cassette = options.cassette
        self.limiter = AdaptiveLimiter(options.concurrency)
        # Below cache and recordings, so that a stored reply needs neither a slot nor a retry.
        self._model = RetryingModel(engine.client(spec), options.policy, self.limiter, options.on_wait)

    def for_rollout(self, row: Row, run_index: int, draw: str = "") -> ChatModel:
        if self._cassette is not None:
            from osmosis_ai.models.cassette import CassetteModel

            return CassetteModel(self._model, self._cassette, self.spec.model, self.spec.params, run_index, draw)
        if self._cache is None:
            return self._model
        from osmosis_ai.models.cache import CachedModel

        return CachedModel(self._model, self._cache, self.spec, run_index, draw)

    def price_known(self) -> bool:
        return self._engine.price_known(self.spec)

    async def probe(self) -> None:
        # A 400 counts as an answer unless it is about the model or the key: the probe's token limit may be too low.
        # A model accepts one of the two limits; if the user sets one, it is that one.
        limit = "max_completion_tokens" if "max_completion_tokens" in self.spec.params else "max_tokens"
        try:
            await self._model.complete([{"role": "user", "content": "ping"}], [], {limit: PROBE_TOKENS})
        except ModelError as error:
            text, kind = str(error), error.kind
            if kind == "bad_request":
                if REFUSED_KEY.search(text):
                    kind = "auth"
                elif UNKNOWN_MODEL.search(text):
                    kind = "unknown_model"
                else:
                    return
            hint = await self._engine.hint(self.spec, kind)
            raise ModelStartError(f"{text.rstrip('.')}. {hint}") from error

    async def aclose(self) -> None:
        await self._model.aclose()
