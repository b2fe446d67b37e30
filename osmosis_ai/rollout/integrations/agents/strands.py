"""Strands agents in workflow rollouts; needs the extra `strands`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from osmosis_ai.rollout.context import RolloutContext, SampleSource, get_rollout_context
from osmosis_ai.rollout.integrations.extras import needs_extra
from osmosis_ai.rollout.types import RolloutSample
from osmosis_ai.rollout.utils.messages import map_initial_messages_to_content_blocks

if TYPE_CHECKING:
    # The type checker's environment doesn't have the extra.
    LiteLLMModel: Any
    StrandsAgent: Any
else:
    with needs_extra("strands", "strands", "litellm"):
        from strands import Agent as StrandsAgent
        from strands.models.litellm import LiteLLMModel

__all__ = ["OsmosisRolloutModel", "OsmosisStrandsAgent", "StrandsAgentSampleSource"]

logger = logging.getLogger(__name__)

MODEL_ID = "openai/osmosis-rollout"
"""The endpoint chooses the model; LiteLLM only needs a name that selects OpenAI's protocol."""


class StrandsAgentSampleSource(SampleSource):
    """The conversation of a Strands agent, in Strands' own form."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def get_sample(self, name: str = "") -> RolloutSample:
        """Return the agent's messages."""
        messages = list(self.agent.messages)
        return RolloutSample(messages=messages, trajectory_messages=_chat_messages(messages))


def _chat_messages(messages: list[Any]) -> Sequence[dict[str, Any]] | None:
    try:
        formatted: Sequence[dict[str, Any]] = LiteLLMModel.format_request_messages(messages)
    except Exception as error:  # noqa: BLE001  the framework decides what it can convert
        logger.warning("there will be no trajectory, because Strands can't convert its messages: %s", error)
        return None
    return formatted


class OsmosisRolloutModel(LiteLLMModel):  # type: ignore[misc]
    """The rollout's model, for a workflow's configuration; `OsmosisStrandsAgent` binds it to the rollout.

    Example:
        model = OsmosisRolloutModel(params={"temperature": 1.0})

    Args:
        litellm_model_config: Settings of Strands' LiteLLMModel.
    """

    def __init__(self, **litellm_model_config: Any) -> None:
        # The base class would connect to a model.
        self.litellm_kwargs = litellm_model_config

    def bound_to(self, rollout: RolloutContext, sample_id: str) -> Any:
        """Return a model that calls the rollout's endpoint."""
        client_args = {
            "api_base": rollout.chat_completions_url,
            "api_key": rollout.api_key,
            # Controllers of SDK 0.2 read these headers.
            "extra_headers": {"x-rollout-id": rollout.rollout_id, "x-sample-id": sample_id},
        }
        return LiteLLMModel(client_args=client_args, model_id=MODEL_ID, **self.litellm_kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Not available."""
        _refuse()

    def structured_output(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Not available."""
        _refuse()

    def get_config(self) -> Any:
        """Not available."""
        _refuse()

    def update_config(self, **model_config: Any) -> None:
        """Not available."""
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError("OsmosisRolloutModel is a placeholder: pass it to an OsmosisStrandsAgent")


class OsmosisStrandsAgent(StrandsAgent):  # type: ignore[misc]
    """A Strands agent whose conversation becomes the rollout's sample. It takes the arguments of Strands' Agent.

    With an OsmosisRolloutModel it must be created in a workflow's `run`. A rollout may have several, each with a `name`
    or `agent_id` of its own; then each is a sample.

    Args:
        messages: The conversation so far, in OpenAI's form or in Strands'.
        model: An OsmosisRolloutModel for the rollout's model. Any other model is used as it is, without a sample.

    Raises:
        RuntimeError: There is no active rollout.
    """

    def __init__(self, *args: Any, messages: list[Any] | None = None, model: Any = None, **kwargs: Any) -> None:
        if messages:
            messages = map_initial_messages_to_content_blocks(messages)
        if isinstance(model, OsmosisRolloutModel):
            rollout = get_rollout_context()
            if rollout is None:
                raise RuntimeError(
                    "an OsmosisStrandsAgent for the rollout's model needs a rollout: create it in a workflow's run()"
                )
            name = kwargs.get("name") or kwargs.get("agent_id") or uuid.uuid4().hex
            model = model.bound_to(rollout, name)
            rollout.register_sample_source(name, StrandsAgentSampleSource(self))
        super().__init__(*args, model=model, messages=messages, **kwargs)
