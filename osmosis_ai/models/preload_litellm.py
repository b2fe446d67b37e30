"""Imported once by the fork server, before `preload`, when models of a run are asked through LiteLLM."""

from __future__ import annotations

from osmosis_ai.models.litellm import import_litellm

import_litellm()
