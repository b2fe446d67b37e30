"""Choose the judge and key of a call, and the `extra_info` that tells a rubric function about them.

A redirect sends every judge call of a process elsewhere, whatever the rubrics name. Environment variables carry it to
worker processes: `OSMOSIS_JUDGE_MODEL`, `OSMOSIS_JUDGE_BASE_URL` and, for the key, `OSMOSIS_JUDGE_API_KEY`. With
`OSMOSIS_JUDGE_PRICED` only judges with a known price are called. `OSMOSIS_JUDGE_RECORDINGS` records or replays them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from osmosis_ai.errors import MissingAPIKeyError
from osmosis_ai.records import CassetteSpec, Record
from osmosis_ai.reward_rubric.reply import finite_number
from osmosis_ai.urls import UrlError, http_url

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_PROVIDER",
    "JUDGE_PRICED",
    "JUDGE_RECORDINGS",
    "KEY_VARIABLES",
    "Target",
    "cassette_variables",
    "current_cassette",
    "current_redirect",
    "find_target",
    "has_price",
    "judge_variables",
    "key_variable",
    "missing_key",
    "rubric_extra_info",
]

DEFAULT_PROVIDER, DEFAULT_MODEL = "openai", "gpt-5-mini"

KEY_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "gemini": "GEMINI_API_KEY",
    "xai": "XAI_API_KEY",
    "openrouter": "OPENROUTER_API_KEY",
    "cerebras": "CEREBRAS_API_KEY",
}
NO_KEY = "no-key"
OPENAI_HOST = "api.openai.com"

JUDGE_MODEL = "OSMOSIS_JUDGE_MODEL"
JUDGE_BASE_URL = "OSMOSIS_JUDGE_BASE_URL"
JUDGE_KEY = "OSMOSIS_JUDGE_API_KEY"
JUDGE_PRICED = "OSMOSIS_JUDGE_PRICED"
JUDGE_RECORDINGS = "OSMOSIS_JUDGE_RECORDINGS"

DEFAULT_RUBRIC = (
    "Judge how well the solution does what the original input asks for. The best score is for a solution that is "
    "correct, complete and to the point, and agrees with the reference answer if there is one; the worst is for one "
    "that is wrong, empty or doesn't answer."
)


class Redirect(Record, frozen=True):
    """The destination of judge calls: a model (`provider/model`), an OpenAI-compatible endpoint, or a model there."""

    model: str | None
    base_url: str | None
    api_key: str | None

    def __repr__(self) -> str:
        return f"Redirect(model={self.model!r}, base_url={self.base_url!r})"

    def judge(self, model: str) -> tuple[str, str]:
        """Return provider and model for a call that names this model."""
        if self.base_url is not None:
            return "openai", self.model or model
        before, slash, after = (self.model or "").partition("/")
        return (before, after) if slash else (DEFAULT_PROVIDER, before)


def judge_variables(model: str | None = None, base_url: str | None = None, *, priced: bool = False) -> dict[str, str]:
    """Return the variables that redirect every judge call of a process; None leaves the environment's value.

    The model is `provider/model` as LiteLLM knows it; a bare name is an OpenAI model. With the base URL of an
    OpenAI-compatible endpoint, it is the name served there; without a model, the name in `model_info` stays.
    """
    given = {JUDGE_MODEL: model, JUDGE_BASE_URL: base_url, JUDGE_PRICED: "1" if priced else None}
    return {name: value for name, value in given.items() if value}


def cassette_variables(cassette: CassetteSpec) -> dict[str, str]:
    """Return the variables that record or replay every judge call of a process."""
    return {JUDGE_RECORDINGS: msgspec.json.encode(cassette).decode()}


def current_cassette(environ: Mapping[str, str] = os.environ) -> CassetteSpec | None:
    """Return the cassette that these variables set, None if they set none."""
    given = environ.get(JUDGE_RECORDINGS)
    return msgspec.json.decode(given, type=CassetteSpec) if given else None


def current_redirect(environ: Mapping[str, str] = os.environ) -> Redirect | None:
    """Return the redirect that these variables set, None if they set none."""
    model, base_url, api_key = (
        environ.get(name, "").strip() or None for name in (JUDGE_MODEL, JUDGE_BASE_URL, JUDGE_KEY)
    )
    return Redirect(model, base_url, api_key) if model or base_url else None


class Target(Record, frozen=True):
    """A judge: the provider, its name for the model, and the endpoint unless it is the provider's own.

    If `api_key` is None, LiteLLM finds the provider's credentials.
    """

    provider: str
    model: str
    base_url: str | None = None
    api_key: str | None = None

    @property
    def name(self) -> str:
        """The judge's name for LiteLLM."""
        # At a user's own endpoint the model's name is used as it is, slashes included.
        if self.base_url is None and self.model.startswith(f"{self.provider}/"):
            return self.model
        return f"{self.provider}/{self.model}"

    def __repr__(self) -> str:
        # Without the key, because tracebacks and logs show it.
        return f"Target(name={self.name!r}, base_url={self.base_url!r})"


def find_target(model_info: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Target:
    """Return the judge that `model_info` names, or the one to which all calls are redirected.

    A provider's key from the environment is sent to that provider only. An `api_base` gets only a key named for it
    (`api_key`, `api_key_env`). `model_info` must be checked already.

    Raises:
        MissingAPIKeyError: There is no key; the message names the variable to export.
    """
    redirect = current_redirect(environ)
    provider, model = model_info["provider"].strip(), model_info["model"].strip()
    if redirect is None:
        base_url, given = _base_url(model_info.get("api_base"), "model_info['api_base']"), model_info
    else:
        # The rubric's own key and address stay behind: they belong to the provider that it names.
        provider, model = redirect.judge(model)
        base_url, given = _base_url(redirect.base_url, "the judges' base URL"), {"api_key": redirect.api_key}
    target = Target(provider.lower(), model, base_url)
    return Target(target.provider, model, base_url, _key(target, given, environ))


def key_variable(provider: str) -> str:
    """Return the environment variable of a provider's key."""
    return KEY_VARIABLES.get(provider, f"{provider.upper().replace('-', '_')}_API_KEY")


def missing_key(name: str, variable: str) -> MissingAPIKeyError:
    """Return the error for a judge whose key variable isn't set."""
    return MissingAPIKeyError(
        f"there is no API key for the judge {name}: the environment variable {variable} is not set. Set it with\n"
        f"    export {variable}='...'\n"
        "or in .env, name another variable with model_info['api_key_env'], or pass model_info['api_key']"
    )


def _key(target: Target, given: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    if key := (given.get("api_key") or "").strip():
        return str(key)
    variable = (given.get("api_key_env") or "").strip()
    if not variable and target.base_url is not None and http_url(target.base_url).host != OPENAI_HOST:
        # A dummy key: without one, LiteLLM would send the provider's key to this endpoint.
        return NO_KEY
    variable = variable or KEY_VARIABLES.get(target.provider)
    if variable and not (key := environ.get(variable, "").strip()):
        cassette = current_cassette(environ)
        # A replay calls nobody.
        if cassette is not None and cassette.mode == "replay":
            return None
        raise missing_key(target.name, variable)
    return key or None


def _base_url(text: str | None, where: str) -> str | None:
    if text is None:
        return None
    text = text.strip()
    try:
        http_url(text)
    except UrlError:
        # The address isn't shown, because it may contain a password.
        raise ValueError(f"{where} is not an address like http://localhost:8000/v1") from None
    # LiteLLM appends the path itself.
    return text.rstrip("/").removesuffix("/chat/completions")


def rubric_extra_info(columns: Mapping[str, Any], original_input: str | None) -> dict[str, Any]:
    """Return a row's columns together with everything else that rubric functions read.

    `provider`, `model`, `rubric`, `api_key_env`, `score_min`, `score_max`, `system_prompt`, `original_input` and
    `metadata` are always present. They come from the row if it has them in the right type (`provider` and `model` only
    together). The defaults are, in this order: the redirected judge or openai/gpt-5-mini; a general rubric; the
    provider's key variable; 0.0 and 1.0; None; the row's user prompt; and all of the row's columns.
    """
    redirect = current_redirect()
    provider, model = _text(columns, "provider"), _text(columns, "model")
    if provider is None or model is None:
        provider, model = DEFAULT_PROVIDER, DEFAULT_MODEL
    variable = _text(columns, "api_key_env") or key_variable(provider)
    if redirect is not None:
        variable = JUDGE_KEY
        provider, model = redirect.judge(model)
    metadata = columns.get("metadata")
    return {
        **columns,
        "provider": provider,
        "model": model,
        "rubric": _text(columns, "rubric") or DEFAULT_RUBRIC,
        "api_key_env": variable,
        "score_min": _number(columns, "score_min", 0.0),
        "score_max": _number(columns, "score_max", 1.0),
        "system_prompt": _text(columns, "system_prompt"),
        "original_input": _text(columns, "original_input") or original_input,
        "metadata": metadata if isinstance(metadata, dict) else dict(columns),
    }


def _text(columns: Mapping[str, Any], name: str) -> str | None:
    value = columns.get(name)
    return value if isinstance(value, str) and value.strip() else None


def _number(columns: Mapping[str, Any], name: str, default: float) -> float:
    number = finite_number(columns.get(name))
    return default if number is None else number


def has_price(target: Target) -> bool:
    """Return True if a judge's price is known. It never is for a user's own endpoint, whatever the model's name."""
    from osmosis_ai.models.litellm import price_known

    return target.base_url is None and price_known(target.name)
