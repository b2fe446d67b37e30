"""What a rubric function finds in its `extra_info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osmosis_ai.reward_rubric.numbers import finite_number
from osmosis_ai.reward_rubric.redirect import JUDGE_KEY, current_redirect
from osmosis_ai.reward_rubric.target import DEFAULT_MODEL, DEFAULT_PROVIDER, key_variable

__all__ = ["DEFAULT_RUBRIC", "rubric_extra_info"]

DEFAULT_RUBRIC = (
    "Judge how well the solution does what the original input asks for. The best score is for a solution that is "
    "correct, complete and to the point, and agrees with the reference answer if there is one; the worst is for one "
    "that is wrong, empty or doesn't answer."
)


def rubric_extra_info(columns: Mapping[str, Any], original_input: str | None) -> dict[str, Any]:
    """A row's columns, and beside them everything that rubric functions read.

    `provider`, `model`, `rubric`, `api_key_env`, `score_min`, `score_max`, `system_prompt`, `original_input` and
    `metadata` are always there. They are the row's own where it has them in the right type (`provider` and `model` only
    together), else: the judge that calls are redirected to, or openai/gpt-5-mini; the provider's key variable; a
    general rubric; 0.0 and 1.0; None; the row's user prompt; and all of the row's columns.

    Args:
        columns: The row's columns.
        original_input: What the solution answers.
    """
    redirect = current_redirect()
    provider, model = _text(columns, "provider"), _text(columns, "model")
    if provider is None or model is None:
        provider, model = DEFAULT_PROVIDER, DEFAULT_MODEL
    variable = _text(columns, "api_key_env") or key_variable(provider)
    if redirect is not None:
        variable = JUDGE_KEY
        if redirect.base_url is not None:
            provider, model = "openai", redirect.model or model
        elif redirect.model is not None:
            before, slash, after = redirect.model.partition("/")
            provider, model = (before, after) if slash else (DEFAULT_PROVIDER, before)
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
