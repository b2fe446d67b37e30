"""Sends every judge call of a process elsewhere, whatever the rubrics name.

The redirect lives in environment variables, so that worker processes have it too: `OSMOSIS_JUDGE_MODEL`,
`OSMOSIS_JUDGE_BASE_URL` and, for the key, `OSMOSIS_JUDGE_API_KEY`.
"""

from __future__ import annotations

import os

from osmosis_ai.records import Record

__all__ = [
    "JUDGE_BASE_URL",
    "JUDGE_KEY",
    "JUDGE_MODEL",
    "Redirect",
    "current_redirect",
    "redirect_environment",
    "redirect_judges",
]

JUDGE_MODEL = "OSMOSIS_JUDGE_MODEL"
JUDGE_BASE_URL = "OSMOSIS_JUDGE_BASE_URL"
JUDGE_KEY = "OSMOSIS_JUDGE_API_KEY"


class Redirect(Record, frozen=True):
    """Where judge calls go: to a model (`provider/model`), to an OpenAI-compatible endpoint, or to a model there."""

    model: str | None
    base_url: str | None
    api_key: str | None

    def __repr__(self) -> str:
        return f"Redirect(model={self.model!r}, base_url={self.base_url!r})"


def redirect_environment(
    model: str | None = None, base_url: str | None = None, api_key: str | None = None
) -> dict[str, str]:
    """The environment variables of a redirect, for processes that are still to be started.

    Args:
        model: `provider/model` as LiteLLM knows it; a bare name is an OpenAI model. With a base URL the name as served.
        base_url: An OpenAI-compatible endpoint.
        api_key: Its key; otherwise `OSMOSIS_JUDGE_API_KEY` is used.
    """
    given = {JUDGE_MODEL: model, JUDGE_BASE_URL: base_url, JUDGE_KEY: api_key}
    return {name: value for name, value in given.items() if value}


def redirect_judges(model: str | None = None, base_url: str | None = None, api_key: str | None = None) -> None:
    """Send every judge call of this process, and of those it starts, elsewhere; without a model and URL, no longer.

    Args:
        model: `provider/model` as LiteLLM knows it; a bare name is an OpenAI model. With a base URL it is the name as
            served there, and None keeps the name in `model_info`.
        base_url: An OpenAI-compatible endpoint; None is the provider's own.
        api_key: The key for it; None leaves `OSMOSIS_JUDGE_API_KEY` as it is.
    """
    os.environ.pop(JUDGE_MODEL, None)
    os.environ.pop(JUDGE_BASE_URL, None)
    os.environ.update(redirect_environment(model, base_url, api_key))


def current_redirect() -> Redirect | None:
    """Where judge calls are sent instead, if anywhere."""
    model, base_url, api_key = (
        os.environ.get(name, "").strip() or None for name in (JUDGE_MODEL, JUDGE_BASE_URL, JUDGE_KEY)
    )
    return Redirect(model, base_url, api_key) if model or base_url else None
