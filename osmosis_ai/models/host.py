"""Models for the life of a worker: `create_model` makes a `ModelHost` of a spec, and that has a model per rollout."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from osmosis_ai.models.base import ChatModel
from osmosis_ai.models.engines import ENGINES
from osmosis_ai.models.retry import OnWait
from osmosis_ai.records import ModelSpec, Row
from osmosis_ai.retry import RetryPolicy

if TYPE_CHECKING:
    from osmosis_ai.models.cache import ReplyCache

__all__ = ["Engine", "HostOptions", "ModelHost", "create_model", "import_model", "load_engine"]


class ModelHost(Protocol):
    """A model for the life of a worker: its connections, and one `ChatModel` per rollout."""

    spec: ModelSpec

    def for_rollout(self, row: Row, run_index: int) -> ChatModel:
        """The model of one rollout. It belongs to the host: don't close it.

        Args:
            row: The row.
            run_index: Which of the row's runs, from 0.
        """
        ...

    def price_known(self) -> bool:
        """True if a run on this model can be held to a budget."""
        ...

    async def probe(self) -> None:
        """Check with one small request that the model answers.

        Raises:
            ModelStartError: It doesn't; the message says what to set.
        """
        ...

    async def aclose(self) -> None:
        """Close the model's connections."""
        ...


class HostOptions(NamedTuple):
    """How a host treats its model's requests.

    Attributes:
        concurrency: Requests at a time at most; the number that is lowered while the endpoint is overloaded.
        policy: How failed requests are tried again.
        on_wait: Told about each wait before a retry.
        cache: Where replies are stored and looked up first, None for nowhere. It belongs to the caller.
    """

    concurrency: int = 1000
    policy: RetryPolicy = RetryPolicy()
    on_wait: OnWait | None = None
    cache: ReplyCache | None = None


class Engine(Protocol):
    """One way to ask models: what a module of `engines` has under the name `ENGINE`."""

    def create(self, spec: ModelSpec, options: HostOptions) -> ModelHost:
        """The model, ready for its first request. No connection is opened yet.

        Raises:
            ModelStartError: There is no such model.
        """
        ...

    def preload(self, spec: ModelSpec) -> None:
        """Import what the model needs, for processes that are forked from this one. No connection and no thread begins.

        Raises:
            ModelStartError: There is no such model.
        """
        ...

    def destination(self, spec: ModelSpec, environ: Mapping[str, str]) -> object:
        """Where requests go, as far as spec and environment say: JSON-able, and part of a cached reply's key."""
        ...


def load_engine(spec: ModelSpec) -> Engine:
    """Import the engine of a model."""
    engine: Engine = import_module(ENGINES[spec.engine].module).ENGINE
    return engine


def create_model(spec: ModelSpec, options: HostOptions = HostOptions()) -> ModelHost:  # noqa: B008 - it is immutable
    """The model a spec describes, ready for its first request; see `Engine.create`."""
    return load_engine(spec).create(spec, options)


def import_model(spec: ModelSpec) -> None:
    """Import what a model needs, for processes that are forked from this one; see `Engine.preload`."""
    load_engine(spec).preload(spec)
