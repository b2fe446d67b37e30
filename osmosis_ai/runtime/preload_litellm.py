"""Imported once by the fork server when the models of a run are asked through LiteLLM, after `preload`."""

from __future__ import annotations

import gc

from osmosis_ai.runtime.models.litellm_model import import_litellm

import_litellm()
# See preload.
gc.freeze()
