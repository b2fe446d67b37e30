"""Import LiteLLM; the fork server imports this module once before `preload`, if a run calls models through LiteLLM."""

from __future__ import annotations

from osmosis_ai.models.litellm import import_litellm

import_litellm()
