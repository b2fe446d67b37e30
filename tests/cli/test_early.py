"""What the fork server imports ahead of the workers."""

from __future__ import annotations

import pytest

from osmosis_ai.cli.early import preloads

ENDPOINTS = "osmosis_ai.models.endpoint"
LITELLM = "osmosis_ai.models.preload_litellm"

SERVED = {"model": "served", "base_url": "http://localhost:8000/v1"}


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"model": "openai/gpt-5-mini"}, {}),
        ({"model": "anthropic/claude-sonnet-4-5", "watch": True}, {}),
        ({}, {"OPENAI_API_KEY": "a key"}),
        ({}, {"OSMOSIS_MODEL": "gpt-5-mini"}),
        ({**SERVED, "baseline_model": "openai/gpt-5-mini"}, {}),
        ({**SERVED, "rubric": ["all"]}, {}),
    ],
)
def test_litellm_is_imported_ahead(given: dict[str, object], environ: dict[str, str]) -> None:
    assert LITELLM in preloads(given, environ)


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({}, {}),
        ({"model": "offline/oracle"}, {"OPENAI_API_KEY": "a key"}),
        (SERVED, {"OPENAI_API_KEY": "a key"}),
        ({"model": "offline/smoke", "baseline_model": "offline/empty"}, {}),
        ({**SERVED, "baseline_model": "b", "baseline_base_url": SERVED["base_url"]}, {}),
        ({}, {"OSMOSIS_MODEL": "offline/smoke"}),
    ],
)
def test_litellm_is_left_alone(given: dict[str, object], environ: dict[str, str]) -> None:
    assert LITELLM not in preloads(given, environ)


def test_the_client_for_endpoints_is_imported_ahead() -> None:
    assert preloads(SERVED, {}) == [ENDPOINTS]
    assert preloads({"model": "offline/oracle", "baseline_base_url": "http://x"}, {}) == [ENDPOINTS]
    assert preloads({"model": "offline/smoke"}, {}) == []
