"""The engine of the offline models: nothing to connect to, to pay, to retry or to cache."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from osmosis_ai.errors import ModelStartError
from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.host import HostOptions
from osmosis_ai.models.offline import OFFLINE_MODELS
from osmosis_ai.records import ModelSpec, Row

__all__ = ["ENGINE"]


class _Host:
    """An offline model; each rollout gets one of its own, made for its row."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._create = _creator(spec)

    def for_rollout(self, row: Row, run_index: int) -> ChatModel:
        return self._create(row)

    def price_known(self) -> bool:
        return True  # it costs nothing

    async def probe(self) -> None:
        """Nothing to ask."""

    async def aclose(self) -> None:
        """Nothing to close."""


class _Engine:
    def create(self, spec: ModelSpec, options: HostOptions) -> _Host:
        return _Host(spec)

    def preload(self, spec: ModelSpec) -> None:
        _creator(spec)

    def destination(self, spec: ModelSpec, environ: object) -> None:
        """Nowhere."""


def _creator(spec: ModelSpec) -> Callable[[Row], ChatModel]:
    if spec.model not in OFFLINE_MODELS:
        raise ModelStartError(f"There is no offline model {spec.model!r}.")
    create: Callable[[Row], ChatModel] = import_module(OFFLINE_MODELS[spec.model].module).create
    return create


ENGINE = _Engine()
