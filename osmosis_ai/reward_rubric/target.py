"""Which judge a call goes to, and with which key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from osmosis_ai.errors import MissingAPIKeyError
from osmosis_ai.records import Record
from osmosis_ai.reward_rubric.redirect import current_redirect
from osmosis_ai.urls import UrlError, http_url

__all__ = ["DEFAULT_MODEL", "DEFAULT_PROVIDER", "Target", "find_target", "key_variable", "missing_key"]

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


class Target(Record, frozen=True):
    """A judge: the provider, its name of the model, and the endpoint if it isn't the provider's own.

    With `api_key` None the provider finds its credentials itself.
    """

    provider: str
    model: str
    base_url: str | None = None
    api_key: str | None = None

    @property
    def name(self) -> str:
        """As LiteLLM writes it."""
        # At an endpoint of one's own a model is called what it is called there, slashes or not.
        if self.base_url is None and self.model.startswith(f"{self.provider}/"):
            return self.model
        return f"{self.provider}/{self.model}"

    def __repr__(self) -> str:
        return f"Target(name={self.name!r}, base_url={self.base_url!r})"


def find_target(model_info: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Target:
    """The judge that `model_info` names, or the one that all calls are redirected to.

    A key that the environment holds for a provider is sent to that provider only: for an `api_base` the key must be
    named (`api_key`, `api_key_env`), and without one the endpoint gets none.

    Args:
        model_info: Checked already.
        environ: Where keys and the redirect are looked up.

    Raises:
        MissingAPIKeyError: There is no key; the message says which variable to export.
    """
    redirect = current_redirect(environ)
    if redirect is None:
        provider, model = model_info["provider"].strip().lower(), model_info["model"].strip()
        base_url = _base_url(model_info.get("api_base"), "model_info['api_base']")
        return _with_key(Target(provider, model, base_url), model_info, environ)
    if redirect.base_url is not None:
        base_url = _base_url(redirect.base_url, "the judges' base URL")
        target = Target("openai", redirect.model or model_info["model"].strip(), base_url)
    else:
        provider, slash, model = (redirect.model or "").partition("/")
        target = Target(provider.lower(), model) if slash else Target(DEFAULT_PROVIDER, provider)
    return _with_key(target, {"api_key": redirect.api_key}, environ)


def key_variable(provider: str) -> str:
    """The environment variable that holds a provider's key."""
    return KEY_VARIABLES.get(provider, f"{provider.upper().replace('-', '_')}_API_KEY")


def missing_key(name: str, variable: str) -> MissingAPIKeyError:
    """The error for a judge without a key.

    Args:
        name: The judge.
        variable: What isn't set.
    """
    return MissingAPIKeyError(
        f"there is no API key for the judge {name}: the environment variable {variable} is not set. Set it with\n"
        f"    export {variable}='...'\n"
        "or in .env, name another variable with model_info['api_key_env'], or pass model_info['api_key']"
    )


def _with_key(target: Target, given: Mapping[str, Any], environ: Mapping[str, str]) -> Target:
    key = (given.get("api_key") or "").strip()
    if not key and (variable := (given.get("api_key_env") or "").strip()):
        key = environ.get(variable, "").strip()
        if not key:
            raise missing_key(target.name, variable)
    if not key and target.base_url is not None and http_url(target.base_url).host != OPENAI_HOST:
        # A key of some kind, or LiteLLM would send the provider's to this endpoint.
        key = NO_KEY
    if not key and target.provider in KEY_VARIABLES:
        variable = KEY_VARIABLES[target.provider]
        key = environ.get(variable, "").strip()
        if not key:
            raise missing_key(target.name, variable)
    return Target(target.provider, target.model, target.base_url, key or None)


def _base_url(text: str | None, where: str) -> str | None:
    if text is None:
        return None
    text = text.strip()
    try:
        http_url(text)
    except UrlError:
        # The address isn't shown: it may hold a password.
        raise ValueError(f"{where} is not an address like http://localhost:8000/v1") from None
    return text.rstrip("/").removesuffix("/chat/completions")
