"""The OpenAI Agents SDK in workflow rollouts; needs the extra `openai-agents`."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from osmosis_ai.rollout.context import SampleSource, get_rollout_context
from osmosis_ai.rollout.integrations.extras import needs_extra
from osmosis_ai.rollout.types import RolloutSample

if TYPE_CHECKING:
    # The type checker's environment doesn't have the extra.
    Agent: Any
    Converter: Any
    LitellmModel: Any
    ModelResponse: Any
    SessionABC: Any
    Usage: Any
else:
    with needs_extra("openai-agents", "agents", "litellm"):
        from agents import Agent
        from agents.extensions.models.litellm_model import LitellmModel
        from agents.items import ModelResponse
        from agents.memory.session import SessionABC
        from agents.models.chatcmpl_converter import Converter
        from agents.usage import Usage

__all__ = [
    "OsmosisAgent",
    "OsmosisLitellmModel",
    "OsmosisMemorySession",
    "OsmosisRolloutModel",
    "SessionSampleSource",
]

logger = logging.getLogger(__name__)

MODEL = "openai/osmosis-rollout"
"""The endpoint chooses the model; LiteLLM only needs a name that selects OpenAI's protocol."""

current_sample_id: ContextVar[str | None] = ContextVar("osmosis_current_sample_id", default=None)
"""The name of the session that the runner used last."""


class OsmosisMemorySession(SessionABC):  # type: ignore[misc]
    """A session in memory whose items become the rollout's sample.

    Create it in the workflow's `run` and pass it to `Runner.run`. Outside a rollout it is a plain session. Each of a
    rollout's sessions is a sample.

    Args:
        name: The sample's name; default: a random one.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or uuid.uuid4().hex
        self.session_id = self.name
        self.items: list[Any] = []
        self._rollout = get_rollout_context()
        if self._rollout is not None:
            self._rollout.register_sample_source(self.name, SessionSampleSource(self))

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """Return the latest items, or all."""
        self._use()
        return list(self.items if limit is None else self.items[max(0, len(self.items) - limit) :])

    async def add_items(self, items: list[Any]) -> None:
        """Append items."""
        self._use()
        self.items.extend(items)

    async def pop_item(self) -> Any:
        """Remove the last item and return it, None if there are none."""
        return self.items.pop() if self.items else None

    async def clear_session(self) -> None:
        """Remove all items."""
        self.items.clear()

    def _use(self) -> None:
        rollout = get_rollout_context()
        if rollout is not None and rollout is not self._rollout:
            raise RuntimeError("this OsmosisMemorySession isn't the rollout's: create it in the workflow's run()")
        current_sample_id.set(self.name)


class SessionSampleSource(SampleSource):
    """The items of a session, as the SDK stores them: items of the Responses API."""

    def __init__(self, session: Any) -> None:
        self.session = session

    async def get_sample(self, name: str = "") -> RolloutSample:
        """Return the session's items."""
        items = await self.session.get_items()
        return RolloutSample(messages=items, trajectory_messages=_chat_messages(items))


def _chat_messages(items: list[Any]) -> Sequence[dict[str, Any]] | None:
    try:
        return [dict(message) for message in Converter.items_to_messages(items)]
    except Exception:  # noqa: BLE001  it can't convert all kinds of items; the trajectory's converter takes the rest
        return list(items)


class OsmosisRolloutModel(LitellmModel):  # type: ignore[misc]
    """The rollout's model, for a workflow's configuration; `OsmosisAgent` binds it to the rollout.

    Args:
        litellm_kwargs: Further arguments of LitellmModel.
    """

    def __init__(self, **litellm_kwargs: Any) -> None:
        # The base class would need a model's name.
        self.litellm_kwargs = litellm_kwargs

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        """Not available."""
        raise NotImplementedError(_PLACEHOLDER)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Not available."""
        raise NotImplementedError(_PLACEHOLDER)


_PLACEHOLDER = "OsmosisRolloutModel is a placeholder: pass it to an OsmosisAgent"


class OsmosisLitellmModel(LitellmModel):  # type: ignore[misc]
    """A model that calls the rollout's endpoint. It must be created in a workflow's `run`.

    Args:
        litellm_kwargs: Further arguments of LitellmModel.

    Raises:
        RuntimeError: There is no active rollout.
    """

    def __init__(self, **litellm_kwargs: Any) -> None:
        rollout = get_rollout_context()
        if rollout is None:
            raise RuntimeError("an OsmosisLitellmModel needs a rollout: create it in the workflow's run()")
        self.rollout_id = rollout.rollout_id
        super().__init__(model=MODEL, base_url=rollout.chat_completions_url, api_key=rollout.api_key, **litellm_kwargs)

    async def stream_response(
        self, system_instructions: Any, input: Any, model_settings: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Request a reply on behalf of the session that the runner uses."""
        rollout = get_rollout_context()
        sample_id = current_sample_id.get()
        if rollout is None or not rollout.has_samples or sample_id is None:
            raise RuntimeError("the rollout has no session: pass session=OsmosisMemorySession() to Runner.run()")
        # Controllers of SDK 0.2 read these headers.
        ids = {"x-rollout-id": self.rollout_id, "x-sample-id": sample_id}
        settings = dataclasses.replace(model_settings, extra_headers={**(model_settings.extra_headers or {}), **ids})
        async for event in super().stream_response(system_instructions, input, settings, *args, **kwargs):
            yield event

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        """Request a reply as a stream, because some endpoints only stream, and return it as a whole."""
        output: list[Any] = []
        usage = Usage()
        async for event in self.stream_response(*args, **kwargs):
            if event.type == "response.completed":
                output = list(event.response.output)
                if (used := event.response.usage) is not None:
                    usage = Usage(
                        requests=1,
                        input_tokens=used.input_tokens,
                        output_tokens=used.output_tokens,
                        total_tokens=used.total_tokens,
                        input_tokens_details=used.input_tokens_details,
                        output_tokens_details=used.output_tokens_details,
                    )
        return ModelResponse(output=output, usage=usage, response_id=None)


class OsmosisAgent(Agent):  # type: ignore[misc]
    """An agent of the OpenAI Agents SDK whose OsmosisRolloutModel is bound to the rollout.

    It takes the arguments of the SDK's Agent. With an OsmosisRolloutModel it must be created in a workflow's `run`.
    """

    def __init__(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        if isinstance(model, OsmosisRolloutModel):
            model = OsmosisLitellmModel(**model.litellm_kwargs)
        super().__init__(*args, model=model, **kwargs)
