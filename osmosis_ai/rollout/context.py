"""The contexts of workflows and graders: the row, the model's address, the repository's tools, the samples."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from osmosis_ai.errors import OsmosisRolloutError
from osmosis_ai.rollout.vocabulary import RolloutStatus

if TYPE_CHECKING:
    from typing_extensions import Self

    from osmosis_ai.records import JsonObject, Message, Tool
    from osmosis_ai.rollout.types import AgentWorkflowConfig, RolloutSample

    ConfigT = TypeVar("ConfigT", bound=AgentWorkflowConfig)
else:
    # Unbound, so that a workflow can be defined before pydantic is loaded.
    ConfigT = TypeVar("ConfigT")

__all__ = [
    "API_KEY_ENV",
    "CHAT_COMPLETIONS_URL_ENV",
    "ROLLOUT_ID_ENV",
    "AgentWorkflowContext",
    "GraderContext",
    "HarborAgentWorkflowContext",
    "RolloutContext",
    "RolloutTools",
    "SampleSource",
    "get_rollout_context",
    "rollout_contextvar",
]

CHAT_COMPLETIONS_URL_ENV = "OSMOSIS_CHAT_COMPLETIONS_URL"
API_KEY_ENV = "OSMOSIS_API_KEY"
ROLLOUT_ID_ENV = "OSMOSIS_ROLLOUT_ID"


class RolloutTools(Protocol):
    """The repository's MCP tools in the rollout's own session, provided by the rollout's driver."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools, in OpenAI's form."""
        ...

    async def call_tool(self, name: str, arguments: JsonObject) -> str:
        """Call a tool and return its output as text for the model, even if the tool fails."""
        ...


class SampleSource(ABC):
    """An integration's agent or session, which holds a rollout's conversation."""

    @abstractmethod
    async def get_sample(self, name: str = "") -> RolloutSample:
        """Return the current sample.

        Args:
            name: The name under which the source was registered. Sources may omit the parameter.
        """


@dataclass
class RolloutContext:
    """The active rollout. `get_rollout_context()` returns it inside a `with` block.

    Attributes:
        chat_completions_url: The model endpoint; clients append `/chat/completions`. Default:
            `OSMOSIS_CHAT_COMPLETIONS_URL`.
        api_key: The endpoint's bearer key. Default: `OSMOSIS_API_KEY`.
        rollout_id: The rollout's id. Default: `OSMOSIS_ROLLOUT_ID`.
        sample_source: The source of the rollout's only sample.
        sample_sources: Sources by name, for rollouts with several samples.
        tools: The repository's tools, if the rollout has them.
        on_status: Called with each new status.
    """

    chat_completions_url: str = ""
    api_key: str | None = field(default=None, repr=False)
    rollout_id: str = ""
    sample_source: SampleSource | None = None
    sample_sources: dict[str, SampleSource] = field(default_factory=dict)
    tools: RolloutTools | None = field(default=None, repr=False)
    on_status: Callable[[RolloutStatus], None] | None = field(default=None, repr=False)
    _outer: list[RolloutContext | None] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.chat_completions_url = self.chat_completions_url or os.environ.get(CHAT_COMPLETIONS_URL_ENV, "")
        self.api_key = self.api_key or os.environ.get(API_KEY_ENV)
        self.rollout_id = self.rollout_id or os.environ.get(ROLLOUT_ID_ENV, "")

    def __enter__(self) -> Self:
        # A stack, because a server and its backend both enter the same context.
        self._outer.append(rollout_contextvar.get())
        rollout_contextvar.set(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        rollout_contextvar.set(self._outer.pop())

    @property
    def has_samples(self) -> bool:
        """True if a sample source is registered."""
        return self.sample_source is not None or bool(self.sample_sources)

    def set_sample_source(self, source: SampleSource) -> None:
        """Register the source of the rollout's only sample; raises ValueError if there is one already."""
        if self.sample_source is not None:
            raise ValueError(
                "this rollout has a sample source already: create one agent or session per rollout, or give each a name"
            )
        self.sample_source = source

    def register_sample_source(self, name: str, source: SampleSource) -> None:
        """Register the source of a named sample; raises ValueError if the name is taken."""
        if name in self.sample_sources:
            raise ValueError(
                f"this rollout has a sample source named {name!r} already: give each agent or session a name of its own"
            )
        self.sample_sources[name] = source

    async def get_sample(self) -> RolloutSample | None:
        """Return the rollout's only sample, or None if there is none; raises ValueError if there are several."""
        samples = await self.get_samples()
        if len(samples) > 1:
            raise ValueError(f"this rollout has {len(samples)} samples: use get_samples()")
        return next(iter(samples.values()), None)

    async def get_samples(self) -> dict[str, RolloutSample]:
        """Return the samples by name. The sample of `set_sample_source` is named after the rollout's id."""
        samples = {name: await _sample_of(source, name) for name, source in self.sample_sources.items()}
        for name, sample in samples.items():
            sample.id = sample.id or name
        if self.sample_source is not None:
            name = self.rollout_id or "sample"
            samples[name] = await _sample_of(self.sample_source, name)
        return samples

    async def set_status(self, status: RolloutStatus) -> None:
        """Report the rollout's status to the server, for backends that track it."""
        if self.on_status is not None:
            self.on_status(status)


async def _sample_of(source: SampleSource, name: str) -> RolloutSample:
    takes_name = bool(inspect.signature(source.get_sample).parameters)
    return await (source.get_sample(name) if takes_name else source.get_sample())


rollout_contextvar: ContextVar[RolloutContext | None] = ContextVar("rollout_contextvar", default=None)


def get_rollout_context() -> RolloutContext | None:
    """Return the active rollout, None outside one. It is active in a workflow's `run` and in a grader's `grade`."""
    return rollout_contextvar.get()


@dataclass
class AgentWorkflowContext(Generic[ConfigT]):
    """One row, as its workflow sees it.

    Attributes:
        prompt: The row's messages.
        config: The rollout's own copy of the configuration.
        metadata: The row's metadata.
        artifacts_dir: An existing folder for the workflow's files; None if it can't be created.
    """

    prompt: list[Message]
    config: ConfigT | None = None
    metadata: dict[str, Any] | None = None
    artifacts_dir: Path | None = None

    @property
    def tools(self) -> list[Tool]:
        """The repository's MCP tools in OpenAI's form; empty if the rollout has none.

        Code that must also run on other SDKs can use `getattr(ctx, "tools", None)`.
        """
        found = _tools()
        return [] if found is None else list(found.tools)

    async def call_tool(self, name: str, arguments: JsonObject | None = None) -> str:
        """Call one of `tools` and return its output as text for the model.

        Args:
            name: The tool's name.
            arguments: The tool's arguments by name.

        Raises:
            OsmosisRolloutError: The rollout has no tools.
        """
        found = _tools()
        if found is None:
            raise OsmosisRolloutError(f"{name} can't be called: this rollout has no MCP tools (ctx.tools is empty)")
        return await found.call_tool(name, arguments or {})


def _tools() -> RolloutTools | None:
    rollout = get_rollout_context()
    return None if rollout is None else rollout.tools


class HarborAgentWorkflowContext(AgentWorkflowContext[ConfigT]):
    """The context of a Harbor workflow of SDK 0.2, for code that imports the name; nothing here runs one."""

    def __init__(self, prompt: list[Message], config: ConfigT | None = None, environment: Any = None) -> None:
        super().__init__(prompt, config)
        self.environment = environment


class GraderContext:
    """One rollout, as its grader sees it.

    Args:
        label: The row's ground truth.
        sample: The sample, if there is exactly one.
        project_path: Always None; kept for SDK 0.2.
        metadata: The row's metadata.
        artifacts_dir: The folder of the rollout's files.
        samples: All samples by id, instead of `sample`.
    """

    def __init__(
        self,
        label: str | None = None,
        sample: RolloutSample | None = None,
        project_path: str | None = None,
        metadata: dict[str, Any] | None = None,
        artifacts_dir: Path | None = None,
        *,
        samples: Mapping[str, RolloutSample] | None = None,
    ) -> None:
        self.label = label
        self.project_path = project_path
        self.metadata = metadata
        self.artifacts_dir = artifacts_dir
        self.samples: dict[str, RolloutSample] = dict(samples or {})
        if sample is not None:
            self.sample = sample

    @property
    def sample(self) -> RolloutSample | None:
        """The sample; None if there are none or several."""
        return next(iter(self.samples.values())) if len(self.samples) == 1 else None

    @sample.setter
    def sample(self, sample: RolloutSample | None) -> None:
        name = next(iter(self.samples), None) or (sample and sample.id) or "sample"
        self.samples = {} if sample is None else {name: sample}

    def get_samples(self) -> dict[str, RolloutSample]:
        """Return all samples by id."""
        return self.samples

    def set_reward(self, reward: float) -> None:
        """Set the reward of the only sample.

        Raises:
            ValueError: There are no samples or several, or the reward isn't a finite number.
        """
        if len(self.samples) > 1:
            raise ValueError(f"this rollout has {len(self.samples)} samples: use set_sample_reward(id, reward)")
        if self.sample is None:
            raise ValueError("this rollout has no sample to reward")
        self.sample.reward = reward

    def set_sample_reward(self, sample_id: str, reward: float) -> None:
        """Set the reward of one of several samples.

        Raises:
            ValueError: There is no such sample, or the reward isn't a finite number.
        """
        if sample_id not in self.samples:
            raise ValueError(f"there is no sample {sample_id!r}; the samples: {', '.join(self.samples) or 'none'}")
        self.samples[sample_id].reward = reward
