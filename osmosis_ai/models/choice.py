"""Choose the model of a run from the options and the environment, without heavy imports."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from osmosis_ai.errors import UsageError
from osmosis_ai.models.engines import ENGINES, engine_for
from osmosis_ai.models.offline import offline_names
from osmosis_ai.records import JsonObject, ModelSpec
from osmosis_ai.urls import UrlError, http_url

__all__ = ["choose_model", "named_by_rows"]

DEFAULT_MODEL = "openai/gpt-5-mini"
STAND_IN, SMOKE = offline_names()[:2]
CHAT_PATH = "/chat/completions"
# With `n` above 1 the endpoint would charge for replies that nobody reads.
OWN_PARAMS = frozenset({"messages", "model", "n", "stream", "tools"})
# An address without its scheme, such as `localhost:8000/v1`, which people copy from a server's log.
LOCAL_ADDRESS = re.compile(r"[\w.-]+(:\d+)?(/[\w./-]*)?$")
OPENAI_HOST = "api.openai.com"


def choose_model(
    *,
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    params: JsonObject,
    request_timeout: float,
    tokenizer: str | None = None,
    environ: Mapping[str, str],
) -> ModelSpec:
    """Choose `--model`, else `OSMOSIS_MODEL`, else `openai/gpt-5-mini` if an OpenAI key is set, else a stand-in.

    A name without a slash is an OpenAI model. With a base URL the name is sent exactly as given, and the key is
    `--api-key`, else `OSMOSIS_API_KEY`. `OPENAI_API_KEY` is sent to OpenAI only: for that key, any other endpoint is a
    third party. A base URL may end in a slash or `/chat/completions`. With a `tokenizer`, the path of a model's folder,
    the endpoint is called with tokens.

    Raises:
        UsageError: A name, address, key or parameter can't be used.
    """
    for option, given in (("--model", model), ("--base-url", base_url)):
        if given is not None and not given.strip():
            raise UsageError(f"{option} is empty. Leave it out for the default, or name one.")
    for name in sorted(OWN_PARAMS & params.keys()):
        raise UsageError(f"The run sets the parameter {name!r} itself. Remove it from --param or the config.")
    name = (model or environ.get("OSMOSIS_MODEL") or "").strip()
    if base_url is not None:
        base_url = _check_base_url(base_url)
        if not name:
            raise UsageError("--base-url needs a model name: pass --model, or set OSMOSIS_MODEL.")
        api_key = api_key or environ.get("OSMOSIS_API_KEY")
        url = http_url(base_url)
        if not api_key and url.scheme == "https" and url.host == OPENAI_HOST:
            api_key = environ.get("OPENAI_API_KEY")
    elif not name:
        name = DEFAULT_MODEL if environ.get("OPENAI_API_KEY") else STAND_IN
    if tokenizer is not None and base_url is None:
        raise UsageError("--tokenizer needs --base-url: only an endpoint of your own can be called with tokens.")
    engine = ENGINES["policy"] if tokenizer is not None else engine_for(name, base_url=base_url is not None)
    # Only offline models have a fixed list.
    if engine.models and name not in engine.models:
        raise UsageError(f"There is no model {name!r}. The {engine.prefix} ones are {', '.join(engine.models)}.")
    if engine.prefix == "" and "/" not in name:
        name = f"openai/{name}"
    # A stand-in needs no key, so its workers don't get one.
    key = None if engine.stand_in else _check_key(api_key)
    return ModelSpec(name, engine.name, name, base_url, key, params, request_timeout, engine.stand_in, tokenizer)


def reads_references(spec: ModelSpec) -> bool:
    """Return True for the model that plays a row's solution, or answers with its ground truth."""
    return spec.model == STAND_IN


def named_by_rows(spec: ModelSpec, *, references: bool) -> ModelSpec:
    """Return the model as reports name it: an oracle is `offline/smoke` unless a row has a solution or ground truth."""
    return msgspec.structs.replace(spec, name=SMOKE, model=SMOKE) if spec.name == STAND_IN and not references else spec


def _check_base_url(text: str) -> str:
    text = text.strip()
    shape = "It takes an address like http://localhost:8000/v1."
    try:
        http_url(text, bare=True)
    except UrlError as error:
        if error.problem in ("credentials", "query"):
            # The URL isn't shown: its password or query may be a key.
            raise UsageError(f"--base-url {error}. {shape} Pass a key with --api-key or OSMOSIS_API_KEY.") from error
        if LOCAL_ADDRESS.match(text):
            shape = f"Write --base-url http://{text}"
        raise UsageError(f"--base-url {text!r} is not an http or https address. {shape}") from error
    return text.rstrip("/").removesuffix(CHAT_PATH).rstrip("/")


def _check_key(key: str | None) -> str | None:
    # A key read from a file often ends with a line break. One inside can't be sent in a header.
    key = (key or "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise UsageError("The API key contains a space or another character that no key has. Check how it was set.")
    return key or None
