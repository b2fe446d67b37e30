"""The policies a run can ask: `create_model` makes a `ModelHost` of a spec, and that has a `ChatModel` per rollout.

Importing this package loads neither LiteLLM nor aiohttp; that happens when a model of that kind is created.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.retry import AdaptiveLimiter, OnWait, RetryingModel
from osmosis_ai.records import ModelSpec, Row
from osmosis_ai.retry import RetryPolicy

if TYPE_CHECKING:
    from osmosis_ai.models.cache import ReplyCache

__all__ = ["ChatModel", "ModelHost", "create_model", "import_model"]

DEFAULT_CONCURRENCY = 1000
PROBE_TOKENS = 16
LISTED_MODELS = 10

UNKNOWN_MODEL = re.compile(
    r"model\b.{0,120}(not found|not exist|n't exist)|(unknown|invalid|no such|not a valid) model", re.IGNORECASE
)
REFUSED_KEY = re.compile(
    r"(invalid|incorrect|missing|no) api.?key|api.?key.{0,40}(not valid|invalid|incorrect|missing|required)",
    re.IGNORECASE,
)


class ModelHost:
    """A model for the life of a worker: its connections, its limiter, and one `ChatModel` per rollout.

    Args:
        spec: Which model.
        model: The one every rollout shares, or None when it depends on the row (`offline/oracle`).
        limiter: What holds requests back while the endpoint is overloaded; None for offline models.
        cache: Stored replies to the rollouts' requests, if there are to be any. It belongs to the caller.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: ChatModel | None,
        limiter: AdaptiveLimiter | None = None,
        cache: ReplyCache | None = None,
    ) -> None:
        self.spec = spec
        self.limiter = limiter
        self._model = model
        self._cache = cache

    def for_rollout(self, row: Row, run_index: int) -> ChatModel:
        """The model of one rollout. It belongs to the host: don't close it.

        Args:
            row: The row.
            run_index: Which of the row's runs, from 0.
        """
        if self._model is not None and self._cache is not None:
            from osmosis_ai.models.cache import CachedModel

            return CachedModel(self._model, self._cache, self.spec, run_index)
        if self._model is not None:
            return self._model
        from osmosis_ai.models.controls import OracleModel

        return OracleModel(row.ground_truth)

    def price_known(self) -> bool:
        """Whether a run on this model can be held to a budget. Offline models cost nothing."""
        if self.spec.engine == "litellm":
            from osmosis_ai.models.litellm import price_known

            return price_known(self.spec.model)
        return self.spec.engine == "offline"

    async def probe(self) -> None:
        """Check with one small request that the model answers.

        A 400 counts as an answer unless it is about the model or the key: the probe's own limit may be the reason.

        Raises:
            ModelStartError: It doesn't; the message says what to set.
        """
        if self._model is None or self.spec.engine == "offline":
            return
        # Whichever of the two the user sets is the one this model takes.
        limit = "max_completion_tokens" if "max_completion_tokens" in self.spec.params else "max_tokens"
        params: dict[str, Any] = {limit: PROBE_TOKENS}
        try:
            await self._model.complete([{"role": "user", "content": "ping"}], [], params)
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
            hint = await self._hint(kind)
            raise ModelStartError(f"{text.rstrip('.')}. {hint}") from error

    async def aclose(self) -> None:
        """Close the model's connections."""
        if self._model is not None:
            await self._model.aclose()

    async def _hint(self, kind: str) -> str:
        if self.spec.engine == "litellm":
            return self._hint_for_provider(kind)
        name = self.spec.model
        if kind == "auth":
            if self.spec.api_key:
                return "Pass another key with --api-key or OSMOSIS_API_KEY."
            return "Pass a key with --api-key or OSMOSIS_API_KEY (OPENAI_API_KEY is sent to OpenAI only)."
        if kind in ("not_found", "unknown_model"):
            names = await self._served_models()
            if name in names:
                return f"Check --base-url: {name!r} is listed at {self.spec.base_url}/models."
            if names:
                more = ", …" if len(names) > LISTED_MODELS else ""
                return f"Pass one of its models with --model: {', '.join(names[:LISTED_MODELS])}{more}."
            return f"Check --base-url (usually it ends in /v1) and --model {name}."
        return {
            "refused": "Start the endpoint, or check --base-url.",
            "timeout": "Check that the endpoint is up, or raise --request-timeout.",
            "bad_reply": "Check --base-url (usually it ends in /v1).",
            "quota": "Check the account behind the key.",
        }.get(kind, "Check the endpoint's own log, or try again later.")

    def _hint_for_provider(self, kind: str) -> str:
        from osmosis_ai.models.litellm import missing_keys

        missing = [] if self.spec.api_key else missing_keys(self.spec.model)
        if missing:
            return f"No key is set: set {' and '.join(missing)}, or pass --api-key."
        return {
            "auth": "Pass another key with --api-key, or set the provider's variable.",
            "not_found": "Check --model.",
            "unknown_model": (
                "Write it as provider/model, such as openai/gpt-5-mini, or pass --base-url for an endpoint of your own."
            ),
            "refused": "Check the network and the provider's address.",
            "timeout": "Check the network, or raise --request-timeout.",
            "quota": "Check the account behind the key.",
        }.get(kind, "Try again later, or check the provider's status.")

    async def _served_models(self) -> list[str]:
        from osmosis_ai.models.endpoint import OpenAICompatibleModel

        # A client of its own: the host's is wrapped in retries, and this answer is only for an error message.
        client = OpenAICompatibleModel(self.spec)
        try:
            return await client.served_models()
        finally:
            await client.aclose()


def create_model(
    spec: ModelSpec,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    policy: RetryPolicy | None = None,
    on_wait: OnWait | None = None,
    cache: ReplyCache | None = None,
) -> ModelHost:
    """The model a spec describes, ready for its first request. No connection is opened yet.

    Args:
        spec: Which model.
        concurrency: Requests at a time at most; the number that is lowered while the endpoint is overloaded.
        policy: How failed requests are tried again.
        on_wait: Told about each wait before a retry.
        cache: Where replies are stored and looked up first. Offline models, which cost nothing, don't use it.

    Raises:
        ModelStartError: There is no such offline model.
    """
    if spec.engine == "offline":
        return ModelHost(spec, _offline_model(spec.model))
    inner: ChatModel
    if spec.engine == "openai_compatible":
        from osmosis_ai.models.endpoint import OpenAICompatibleModel

        inner = OpenAICompatibleModel(spec)
    else:
        from osmosis_ai.models.litellm import LiteLLMModel

        inner = LiteLLMModel(spec)
    limiter = AdaptiveLimiter(concurrency)
    return ModelHost(spec, RetryingModel(inner, policy or RetryPolicy(), limiter, on_wait), limiter, cache)


def import_model(spec: ModelSpec) -> None:
    """Import what a model needs, for processes that are forked from this one. No connection and no thread is begun.

    Args:
        spec: Which model.

    Raises:
        ModelStartError: There is no such offline model.
    """
    if spec.engine == "offline":
        _offline_model(spec.model)
    elif spec.engine == "openai_compatible":
        from osmosis_ai.models import endpoint as endpoint
    else:
        from osmosis_ai.models.litellm import price_known

        price_known(spec.model)


def _offline_model(name: str) -> ChatModel | None:
    if name == "offline/oracle":
        return None
    if name == "offline/empty":
        from osmosis_ai.models.controls import EmptyModel

        return EmptyModel()
    if name == "offline/planner":
        from osmosis_ai.models.planner import PlannerModel

        return PlannerModel()
    raise ModelStartError(f"There is no offline model {name!r}.")
