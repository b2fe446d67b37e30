"""Which model a run asks: from the options and the environment, without importing anything heavy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from osmosis_ai.errors import UsageError
from osmosis_ai.records import ModelSpec, Record
from osmosis_ai.urls import UrlError, http_url

__all__ = ["OFFLINE_MODELS", "ModelChoice", "choose_model"]

DEFAULT_MODEL = "openai/gpt-5-mini"
CHAT_PATH = "/chat/completions"
OWN_PARAMS = frozenset({"messages", "model", "n", "stream", "tools"})
LOCAL_ADDRESS = re.compile(r"[\w.-]+(:\d+)?(/[\w./-]*)?$")
OPENAI_HOST = "api.openai.com"

OFFLINE_MODELS = {
    "offline/planner": (
        "offline/planner is a rule-based stand-in, not a language model: its scores say nothing about a model. "
        "Pass --model, or set OSMOSIS_MODEL or OPENAI_API_KEY, to run a real one."
    ),
    "offline/oracle": "offline/oracle answers with the ground truth: a control that must score best, not a model.",
    "offline/empty": "offline/empty answers with nothing: a control that must score worst, not a model.",
}


class ModelChoice(Record, frozen=True):
    """The model of a run, and what every report must say about it (None for a real model)."""

    spec: ModelSpec
    banner: str | None = None


def choose_model(
    *,
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    params: dict[str, Any],
    request_timeout: float,
    environ: Mapping[str, str],
) -> ModelChoice:
    """The model to run: `--model`, else `OSMOSIS_MODEL`, else `openai/gpt-5-mini` with an OpenAI key, else a stand-in.

    A name without a slash is an OpenAI model. With a base URL the name is sent exactly as given, slashes or not, and
    the key is `--api-key`, else `OSMOSIS_API_KEY`. `OPENAI_API_KEY` is sent to OpenAI only: any other endpoint that a
    user names is a third party to that key.

    Args:
        model: `--model`.
        base_url: `--base-url`, with or without a slash at its end; `…/chat/completions` is accepted too.
        api_key: `--api-key`.
        params: Sampling parameters of every request.
        request_timeout: Seconds per request.
        environ: The environment.

    Raises:
        UsageError: A name, address, key or parameter that can't be used.
    """
    for option, given in (("--model", model), ("--base-url", base_url)):
        if given is not None and not given.strip():
            raise UsageError(f"{option} is empty. Leave it out for the default, or name one.")
    for name in sorted(OWN_PARAMS & params.keys()):
        raise UsageError(f"The parameter {name!r} is set by the run itself. Remove it from --param or the config.")
    name = (model or environ.get("OSMOSIS_MODEL") or "").strip()

    def spec(engine: Literal["litellm", "openai_compatible", "offline"], sent: str, key: str | None) -> ModelSpec:
        return ModelSpec(
            name=sent,
            engine=engine,
            model=sent,
            base_url=None if base_url is None else _check_base_url(base_url),
            api_key=_check_key(key),
            params=params,
            request_timeout=request_timeout,
        )

    if base_url is not None:
        if not name:
            raise UsageError("--base-url needs the name of a model to ask for: pass --model, or set OSMOSIS_MODEL.")
        key = api_key or environ.get("OSMOSIS_API_KEY")
        if not key and _is_openai(base_url):
            key = environ.get("OPENAI_API_KEY")
        return ModelChoice(spec("openai_compatible", name, key))
    if not name:
        name = DEFAULT_MODEL if environ.get("OPENAI_API_KEY") else "offline/planner"
    if name.partition("/")[0] == "offline":
        if name not in OFFLINE_MODELS:
            raise UsageError(f"There is no model {name!r}. The offline ones are {', '.join(OFFLINE_MODELS)}.")
        return ModelChoice(spec("offline", name, None), OFFLINE_MODELS[name])
    return ModelChoice(spec("litellm", name if "/" in name else f"openai/{name}", api_key))


def _check_base_url(text: str) -> str:
    text = text.strip()
    shape = "It takes an address like http://localhost:8000/v1."
    try:
        http_url(text, bare=True)
    except UrlError as error:
        if error.problem in ("credentials", "query"):
            # Not shown: a password, or a query, which may hold a key.
            raise UsageError(f"--base-url {error}. {shape} Pass a key with --api-key or OSMOSIS_API_KEY.") from error
        if LOCAL_ADDRESS.match(text):
            shape = f"Write --base-url http://{text}"
        raise UsageError(f"--base-url {text!r} is not an http or https address. {shape}") from error
    return text.rstrip("/").removesuffix(CHAT_PATH).rstrip("/")


def _check_key(key: str | None) -> str | None:
    if key is None or not key.strip():
        return None
    key = key.strip()
    if not all("!" <= character <= "~" for character in key):
        raise UsageError("The API key holds a space or another character that no key has. Check how it was set.")
    return key


def _is_openai(base_url: str) -> bool:
    url = http_url(_check_base_url(base_url))
    return url.scheme == "https" and url.host == OPENAI_HOST
