"""Models that are asked over a network: probed once, retried, held back while overloaded, and their replies cached."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping

from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.failures import FailureKind
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.host import HostOptions
from osmosis_ai.models.retry import AdaptiveLimiter, RetryingModel
from osmosis_ai.records import ModelSpec, Row

__all__ = ["UNKNOWN_MODEL", "RemoteEngine", "RemoteHost"]

PROBE_TOKENS = 16

UNKNOWN_MODEL = re.compile(
    r"model\b.{0,120}(not found|not exist|n't exist)|(unknown|invalid|no such|not a valid) model", re.IGNORECASE
)
REFUSED_KEY = re.compile(
    r"(invalid|incorrect|missing|no) api.?key|api.?key.{0,40}(not valid|invalid|incorrect|missing|required)",
    re.IGNORECASE,
)


class RemoteEngine(ABC):
    """An engine whose models are asked over a network. A subclass says how to make a client and what to advise."""

    def create(self, spec: ModelSpec, options: HostOptions) -> RemoteHost:
        return RemoteHost(self, spec, options)

    def preload(self, spec: ModelSpec) -> None:
        return  # this module imports what a client needs

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
        """What to do about a first request that failed, a full sentence.

        Args:
            spec: The model.
            kind: Why it failed, as in `ModelError.kind`.
        """


class RemoteHost:
    """A remote model for the life of a worker: one client and one limiter, shared by every rollout.

    Args:
        engine: The engine that the model belongs to.
        spec: Which model.
        options: How its requests are treated.
    """

    def __init__(self, engine: RemoteEngine, spec: ModelSpec, options: HostOptions) -> None:
        self.spec = spec
        self.limiter = AdaptiveLimiter(options.concurrency)
        self._engine = engine
        self._cache = options.cache
        self._model = RetryingModel(engine.client(spec), options.policy, self.limiter, options.on_wait)

    def for_rollout(self, row: Row, run_index: int) -> ChatModel:
        if self._cache is None:
            return self._model
        from osmosis_ai.models.cache import CachedModel

        return CachedModel(self._model, self._cache, self.spec, run_index)

    def price_known(self) -> bool:
        return self._engine.price_known(self.spec)

    async def probe(self) -> None:
        """Check with one small request that the model answers.

        A 400 counts as an answer unless it is about the model or the key: the probe's own limit may be the reason.

        Raises:
            ModelStartError: It doesn't; the message says what to set.
        """
        # Whichever of the two the user sets is the one this model takes.
        limit = "max_completion_tokens" if "max_completion_tokens" in self.spec.params else "max_tokens"
        try:
            await self._model.complete([{"role": "user", "content": "ping"}], [], {limit: PROBE_TOKENS})
        except ModelError as error:
            text = str(error)
            kind = error.kind
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
