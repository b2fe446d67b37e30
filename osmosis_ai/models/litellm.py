"""Call any `provider/model` that LiteLLM knows.

Importing LiteLLM takes seconds and some 170 MB, so this module is imported only when such a model is used. LiteLLM is
configured by its public settings only: no remote price map, telemetry, callbacks, retries or cache of its own, no
redirects (`litellm_http`).
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import ssl
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import ModuleType

import anyio
import msgspec

from osmosis_ai.errors import ModelError
from osmosis_ai.failures import FailureKind
from osmosis_ai.http import HttpError, describe_error, retry_after
from osmosis_ai.models.base import Listen, error_kind, parse_reply
from osmosis_ai.models.host import RemoteEngine
from osmosis_ai.models.streaming import StreamedReply
from osmosis_ai.records import Completion, JsonObject, Message, ModelSpec, Tool

__all__ = ["ENGINE", "LiteLLMModel", "import_litellm", "missing_keys", "price_known"]

SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")
PREFIX = re.compile(r"^(?:litellm\.)?\w+(?:Error|Exception)(?:: | - )|^litellm\.Timeout: ")
KEY_TROUBLE = re.compile(r"missing credentials|api.?key", re.IGNORECASE)
MIN_SECRET_LENGTH = 8
"""Shorter values of secret-looking variables aren't masked: they would turn up within ordinary words."""
SINCE_WHOLE_REPLIES = (1, 106)
"""The first LiteLLM version whose own handler refuses a truncated reply."""
OPENAI_PACKAGE_VARIABLES = ("OPENAI_ORGANIZATION", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")
# Variables by which LiteLLM chooses the endpoint. A match too many costs only cache hits.
ENDPOINT_VARIABLE = re.compile(r"_(API_BASE|BASE_URL|API_URL|ENDPOINT|API_VERSION|REGION(_NAME)?|LOCATION|PROJECT)$")

# LiteLLM's clients belong to its module, so they can be closed only with the last model of the process.
_open_models = 0


@functools.cache
def import_litellm() -> ModuleType:
    """Import LiteLLM with everything switched off that connects anywhere or prints."""
    # Without this, importing it downloads a price map, and can hang without a network.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    # Its own HTTP handler for OpenAI's format takes half the CPU of the openai package. Older versions of it accept a
    # truncated reply as complete, and it ignores the variables that only the package reads.
    recent = tuple(int(part) for part in version("litellm").split(".")[:2]) >= SINCE_WHOLE_REPLIES
    if recent and not any(os.environ.get(name) for name in OPENAI_PACKAGE_VARIABLES):
        os.environ.setdefault("EXPERIMENTAL_OPENAI_BASE_LLM_HTTP_HANDLER", "True")
    # LiteLLM's own logging serializes replies in a way that makes pydantic warn.
    warnings.filterwarnings("ignore", message="Pydantic serializer warnings", category=UserWarning)
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    from osmosis_ai.models.litellm_http import bound_clients

    bound_clients()
    return litellm


@functools.cache
def price_known(model: str) -> bool:
    """Return True if LiteLLM's table has the token price of a model, named with its provider."""
    litellm = import_litellm()
    try:
        bare, provider, _, _ = litellm.get_llm_provider(model)
    except litellm.exceptions.BadRequestError:
        return False
    # Look in the table itself: for some providers, LiteLLM's own lookup calls a local server.
    for name in (model, f"{provider}/{bare}", bare):
        entry = litellm.model_cost.get(name)
        # The same bare name may belong to another provider, at another price.
        if entry and str(entry.get("litellm_provider", "")).startswith(provider):
            return entry.get("input_cost_per_token") is not None
    return False


def missing_keys(model: str) -> list[str]:
    """Return the environment variables that the model's provider needs and that aren't set, as far as LiteLLM knows."""
    found = import_litellm().validate_environment(model=model)
    return [str(name) for name in found.get("missing_keys", [])]


class LiteLLMModel:
    """A model called through LiteLLM.

    Parameters that the provider doesn't support raise an error instead of being dropped, because they are part of a
    run's identity. Without an `api_key` or `base_url` LiteLLM reads the provider's own variables.
    """

    def __init__(self, spec: ModelSpec) -> None:
        global _open_models
        self._litellm = import_litellm()
        self._spec = spec
        self._priced = price_known(spec.model)
        self._closed = False
        _open_models += 1

    async def complete(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> Completion:
        """Make one request.

        Raises:
            ModelError: It failed. The message gives the model and the provider's error, without any key.
        """
        spec = self._spec
        request = self._request(messages, tools, params)
        try:
            # For some providers, LiteLLM's timeout applies to each read; this one bounds the whole request.
            with anyio.fail_after(spec.request_timeout):
                reply = await self._litellm.acompletion(**request)
        except TimeoutError as error:
            raise self._timeout() from error
        except Exception as error:
            # LiteLLM doesn't wrap every exception; any of them means that this request failed.
            raise self._failure(error) from error
        plain = _without_empty_extras(reply.model_dump(warnings=False))
        completion = parse_reply(plain, source=spec.name, position=len(messages), key=spec.api_key)
        return self._with_cost(completion, getattr(reply, "usage", None))

    async def stream(
        self, messages: list[Message], tools: list[Tool], params: JsonObject, listen: Listen
    ) -> Completion:
        """Make one request as `complete` does, and pass on the reply's parts as LiteLLM gives them."""
        spec = self._spec
        asked = {**params, "stream": True, "stream_options": {"include_usage": True}}
        parts = StreamedReply()
        usage = None
        try:
            with anyio.fail_after(spec.request_timeout):
                async for chunk in await self._litellm.acompletion(**self._request(messages, tools, asked)):
                    usage = getattr(chunk, "usage", None) or usage
                    for choice in parts.add(chunk.model_dump(warnings=False, exclude_none=True)):
                        await listen(choice)
        except TimeoutError as error:
            raise self._timeout() from error
        except Exception as error:
            raise self._failure(error) from error
        if not parts.finished:
            raise ModelError(f"{spec.name} failed: the stream has no end", kind="dropped")
        plain = _without_empty_extras(parts.reply())
        completion = parse_reply(plain, source=spec.name, position=len(messages), key=spec.api_key)
        return self._with_cost(completion, usage)

    async def aclose(self) -> None:
        """Close LiteLLM's connections, once no other model in this process uses them."""
        global _open_models
        if self._closed:
            return
        self._closed = True
        _open_models -= 1
        if not _open_models:
            await self._litellm.close_litellm_async_clients()
            # Otherwise the next model would get closed clients from there.
            self._litellm.in_memory_llm_clients_cache.flush_cache()

    def _request(self, messages: list[Message], tools: list[Tool], params: JsonObject) -> JsonObject:
        spec = self._spec
        request = {
            **{name: value for name, value in {**spec.params, **params}.items() if value is not None},
            "model": spec.model,
            "messages": messages,
            "api_key": spec.api_key,
            "timeout": spec.request_timeout,
            # LiteLLM's own retries, then those of the openai package: `RetryingModel` counts and delays every request.
            "num_retries": 0,
            "max_retries": 0,
            # No logging callbacks of LiteLLM, which could send the conversation elsewhere.
            "no-log": True,
        }
        if spec.base_url is not None:
            request["base_url"] = spec.base_url
        if tools:
            request["tools"] = tools
        return request

    def _with_cost(self, completion: Completion, usage: object) -> Completion:
        if not self._priced or usage is None:
            return completion
        prompt, answer = self._litellm.cost_per_token(model=self._spec.model, usage_object=usage)
        return msgspec.structs.replace(completion, cost_usd=float(prompt + answer))

    def _timeout(self) -> ModelError:
        return ModelError(f"{self._spec.name} gave no answer within {self._spec.request_timeout:g} s", kind="timeout")

    def _failure(self, error: Exception) -> ModelError:
        exceptions = self._litellm.exceptions
        if isinstance(error, exceptions.Timeout):
            return self._timeout()
        causes = list(_causes(error))
        if bounds := next((cause for cause in causes if isinstance(cause, HttpError)), None):
            kind = error_kind(bounds.status) if bounds.problem == "redirect" and bounds.status else "bad_reply"
            return ModelError(f"{self._spec.name} failed: {self._said(bounds)[0]}", kind=kind, status=bounds.status)
        status, wait = _http_facts(causes)
        said, code = self._said(error)
        unreachable = (ConnectionRefusedError, socket.gaierror, ssl.SSLError)
        if status is None and any(isinstance(cause, unreachable) for cause in causes):
            reason = next(str(cause) for cause in reversed(causes) if isinstance(cause, OSError))
            where = f" at {url}" if (url := self._base_url()) else ""
            return ModelError(f"{self._spec.name} can't be reached{where}: {reason}", kind="refused")
        if "LLM Provider NOT provided" in str(error):
            return ModelError(f"LiteLLM knows no provider for the model {self._spec.name!r}", kind="unknown_model")
        if status is None and any(isinstance(cause, json.JSONDecodeError) for cause in causes):
            return ModelError(f"{self._spec.name} answered with broken JSON: {said}", kind="bad_reply")
        claimed = getattr(error, "status_code", None)
        # LiteLLM invents a status of 500 for its own errors, so only a lower one is believed.
        if status is None and isinstance(claimed, int) and claimed < 500:
            status = claimed
        # LiteLLM reports a broken connection as an internal server error.
        lost: FailureKind = "auth" if KEY_TROUBLE.search(said) else "dropped"
        kind = lost if status is None else error_kind(status)
        if status == 429 and "insufficient_quota" in (code, *(getattr(cause, "code", None) for cause in causes)):
            kind = "quota"
        return ModelError(f"{self._spec.name} failed: {said}", kind=kind, status=status, retry_after=wait)

    def _said(self, error: Exception) -> tuple[str, str | None]:
        """Return the provider's error text, shortened, and its error code if it was JSON with one."""
        text = " ".join(str(error).partition("\nTraceback")[0].split())
        # LiteLLM wraps its exceptions in each other, and each adds its name in front.
        while (shorter := PREFIX.sub("", text)) != text:
            text = shorter
        # LiteLLM may have used a key from the environment, and providers repeat the key that they refuse.
        secret = (value for name, value in os.environ.items() if any(word in name.upper() for word in SECRET_NAMES))
        keys = (self._spec.api_key, *(value for value in secret if len(value) >= MIN_SECRET_LENGTH))
        return describe_error(text.encode("utf-8", "replace"), *keys)

    def _base_url(self) -> str | None:
        if self._spec.base_url is not None or not self._spec.model.startswith("openai/"):
            return self._spec.base_url
        return os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")


def _causes(error: BaseException) -> Iterator[BaseException]:
    # A library may raise an error from itself, which makes the chain a circle.
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _http_facts(causes: list[BaseException]) -> tuple[int | None, float | None]:
    """Return status and wait of the HTTP reply behind an error. LiteLLM's own exceptions invent replies, but without
    headers."""
    for cause in causes:
        response = getattr(cause, "response", None)
        headers = getattr(response, "headers", None)
        status = getattr(response, "status_code", None)
        if headers and isinstance(status, int):
            return status, retry_after(headers)
    return None, None


def _without_empty_extras(reply: JsonObject) -> JsonObject:
    for choice in reply.get("choices") or []:
        message = choice.get("message") or {}
        extras = message.get("provider_specific_fields")
        if isinstance(extras, dict):
            # LiteLLM adds `{"refusal": None}` to every message, and repeats some of the message's own fields here.
            kept = {name: value for name, value in extras.items() if value is not None and message.get(name) != value}
            message["provider_specific_fields"] = kept or None
    return reply


class _Engine(RemoteEngine):
    def client(self, spec: ModelSpec) -> LiteLLMModel:
        return LiteLLMModel(spec)

    def preload(self, spec: ModelSpec) -> None:
        # Imports LiteLLM and fills the function's cache, both of which forked workers inherit.
        price_known(spec.model)

    def price_known(self, spec: ModelSpec) -> bool:
        return price_known(spec.model)

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        chosen = {name: value for name, value in environ.items() if ENDPOINT_VARIABLE.search(name)}
        return [spec.base_url, sorted(chosen.items())]

    async def hint(self, spec: ModelSpec, kind: FailureKind) -> str:
        missing = [] if spec.api_key else missing_keys(spec.model)
        if missing:
            return f"No key is set: set {' and '.join(missing)}, or pass --api-key."
        return {
            "auth": "Pass another key with --api-key, or set the provider's variable.",
            "not_found": "Check --model.",
            "unknown_model": (
                "Write it as provider/model, such as openai/gpt-5-mini, or pass --base-url for your own endpoint."
            ),
            "refused": "Check the network and the provider's address.",
            "timeout": "Check the network, or raise --request-timeout.",
            "quota": "Check the account behind the key.",
        }.get(kind, "Try again later, or check the provider's status.")


ENGINE = _Engine()
