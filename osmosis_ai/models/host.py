"""Models for the life of a worker: `create_model` makes a `ModelHost` of a spec, and that has a model per rollout."""

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

__all__ = ["UNKNOWN_MODEL", "HostOptions", "ModelHost", "RemoteEngine", "create_model", "import_model"]

PROBE_TOKENS = 16

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

    def for_rollout(self, row: Row, run_index: int) -> ChatModel:
        """The model of one of a row's rollouts, counted from 0. It belongs to the host: don't close it."""
        ...

    def price_known(self) -> bool:
        """True if a run on this model can be held to a budget."""
        ...

    async def probe(self) -> None:
        """Check with one small request that the model answers.

        Raises:
            ModelStartError: It doesn't; the message says what to set.
        """
        ...

    async def aclose(self) -> None: ...


class HostOptions(NamedTuple):
    """How a host treats its model's requests.

    Attributes:
        concurrency: Requests at a time at most; the number that is lowered while the endpoint is overloaded.
        policy: How failed requests are tried again.
        on_wait: Told about each wait before a retry.
        cache: Where replies are stored and looked up first, None for nowhere. It belongs to the caller.
    """

    concurrency: int = 1000
    policy: RetryPolicy = RetryPolicy()
    on_wait: OnWait | None = None
    cache: ReplyCache | None = None


class Engine(Protocol):
    """One way to ask models: what a module of `engines` has under the name `ENGINE`. For a model that doesn't exist,
    `create` and `preload` raise ModelStartError."""

    def create(self, spec: ModelSpec, options: HostOptions) -> ModelHost:
        """The model, ready for its first request. No connection is opened yet."""
        ...

    def preload(self, spec: ModelSpec) -> None:
        """Import what the model needs, for processes that are forked from this one; no connection or thread begins."""
        ...

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        """Where requests go, as far as spec and environment say: JSON-able, and part of a cached reply's key."""
        ...


def create_model(spec: ModelSpec, options: HostOptions = HostOptions()) -> ModelHost:  # noqa: B008 - it is immutable
    """The model a spec describes, ready for its first request; see `Engine.create`."""
    return load_engine(spec).create(spec, options)


def import_model(spec: ModelSpec) -> None:
    """Import what a model needs, for processes that are forked from this one; see `Engine.preload`."""
    load_engine(spec).preload(spec)


class RemoteEngine(ABC):
    """An engine whose models are asked over a network: probed once, retried, held back while overloaded, and their
    replies cached. A subclass says how to make a client and what to advise."""

    def create(self, spec: ModelSpec, options: HostOptions) -> ModelHost:
        return _RemoteHost(self, spec, options)

    def preload(self, spec: ModelSpec) -> None:
        return  # the engine's module imports what a client needs

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        return spec.base_url

    @abstractmethod
    def client(self, spec: ModelSpec) -> ChatModel:
        """The model's bare client; no connection is opened yet."""

    @abstractmethod
    def price_known(self, spec: ModelSpec) -> bool:
        """True if it is known what the model's tokens cost."""

    @abstractmethod
    async def hint(self, spec: ModelSpec, kind: FailureKind) -> str:
        """What to do about a first request that failed in this way, a full sentence."""


class _RemoteHost:
    """One client and one limiter, shared by every rollout of a worker."""

    def __init__(self, engine: RemoteEngine, spec: ModelSpec, options: HostOptions) -> None:
        self.spec = spec
        self._engine = engine
        self._cache = options.cache
        self.limiter = AdaptiveLimiter(options.concurrency)
        self._model = RetryingModel(engine.client(spec), options.policy, self.limiter, options.on_wait)

    def for_rollout(self, row: Row, run_index: int) -> ChatModel:
        if self._cache is None:
            return self._model
        from osmosis_ai.models.cache import CachedModel

        return CachedModel(self._model, self._cache, self.spec, run_index)

    def price_known(self) -> bool:
        return self._engine.price_known(self.spec)

    async def probe(self) -> None:
        # A 400 counts as an answer unless it is about the model or the key: the probe's own limit may be the reason.
        # Whichever limit the user sets is the one this model takes.
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
