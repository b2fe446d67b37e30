"""Sends every judge call of a process elsewhere, whatever the rubrics name.

The redirect lives in environment variables, so that worker processes have it too: `OSMOSIS_JUDGE_MODEL`,
`OSMOSIS_JUDGE_BASE_URL` and, for the key, `OSMOSIS_JUDGE_API_KEY`. With `OSMOSIS_JUDGE_PRICED` only judges whose price
is known are asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from osmosis_ai.records import Record

__all__ = [
    "JUDGE_BASE_URL",
    "JUDGE_KEY",
    "JUDGE_MODEL",
    "JUDGE_PRICED",
    "Redirect",
    "current_redirect",
    "judge_variables",
]

JUDGE_MODEL = "OSMOSIS_JUDGE_MODEL"
JUDGE_BASE_URL = "OSMOSIS_JUDGE_BASE_URL"
JUDGE_KEY = "OSMOSIS_JUDGE_API_KEY"
JUDGE_PRICED = "OSMOSIS_JUDGE_PRICED"


class Redirect(Record, frozen=True):
    """Where judge calls go: to a model (`provider/model`), to an OpenAI-compatible endpoint, or to a model there."""

    model: str | None
    base_url: str | None
    api_key: str | None

    def __repr__(self) -> str:
        return f"Redirect(model={self.model!r}, base_url={self.base_url!r})"


def judge_variables(model: str | None = None, base_url: str | None = None, *, priced: bool = False) -> dict[str, str]:
    """The variables that send every judge call of a process elsewhere; what is None stays as its environment has it.

    Args:
        model: `provider/model` as LiteLLM knows it; a bare name is an OpenAI model. With a base URL it is the name as
            served there, and without one the name in `model_info` stays.
        base_url: An OpenAI-compatible endpoint; its key is that of `OSMOSIS_JUDGE_API_KEY`.
        priced: Ask only judges whose price is known.
    """
    given = {JUDGE_MODEL: model, JUDGE_BASE_URL: base_url, JUDGE_PRICED: "1" if priced else None}
    return {name: value for name, value in given.items() if value}


def current_redirect(environ: Mapping[str, str] = os.environ) -> Redirect | None:
    """Where judge calls of a process with these variables are sent instead, if anywhere."""
    model, base_url, api_key = (
        environ.get(name, "").strip() or None for name in (JUDGE_MODEL, JUDGE_BASE_URL, JUDGE_KEY)
    )
    return Redirect(model, base_url, api_key) if model or base_url else None
