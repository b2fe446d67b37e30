"""The messages between a controller, which requests rollouts, and a rollout server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, Field, model_validator

from osmosis_ai.rollout.types.sample import MessageDict, RolloutId, RolloutSample, Timeout
from osmosis_ai.rollout.vocabulary import POLLING_LEASE_HEADER, GraderStatus, RolloutErrorCategory, RolloutStatus

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "POLLING_LEASE_HEADER",
    "CancelRolloutsRequest",
    "CancelRolloutsResponse",
    "GraderCompleteRequest",
    "GraderInitRequest",
    "GraderInitResponse",
    "RolloutCompleteRequest",
    "RolloutInitRequest",
    "RolloutInitResponse",
    "RolloutLifecycle",
    "RolloutResultResponse",
    "RolloutStatusResponse",
]


class RolloutInitRequest(BaseModel):
    """The body of `POST /rollout`, as every released controller sends it.

    A controller that polls for the result sends a rollout id and no callback URLs. A controller that wants callbacks
    sends `completion_callback_url`, and `grader_callback_url` if it wants the rollout graded.

    Attributes:
        initial_messages: The row's messages.
        label: The row's ground truth.
        metadata: The row's metadata.
        rollout_id: The rollout's id, one path segment. Optional beside a callback URL.
        chat_completions_url: The model endpoint; clients append `/chat/completions`.
        controller_api_key: The bearer key of callbacks.
        llm_api_key: The bearer key of the model endpoint. Default: `controller_api_key`.
        completion_callback_url: Receives the workflow's result.
        grader_callback_url: Receives the grader's result.
        grade: False to run only the workflow.
        agent_timeout_sec: Seconds for the workflow.
        grader_timeout_sec: Seconds for the grader.
        tools: The repository's tools in OpenAI's form, for `ctx.tools`.
        tools_url: The URL for calling the tools, with the model endpoint's bearer key; clients append `/call`.
        extra_fields: Anything else; it is written to the trajectory file.
    """

    initial_messages: list[MessageDict]
    label: str | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: RolloutId | None = None
    chat_completions_url: str
    controller_api_key: str | None = None
    llm_api_key: Annotated[str, Field(min_length=1)] | None = None
    completion_callback_url: str | None = None
    grader_callback_url: str | None = None
    grade: bool = True
    agent_timeout_sec: Timeout | None = None
    grader_timeout_sec: Timeout | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tools_url: str | None = None
    extra_fields: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_id(self) -> Self:
        if self.rollout_id is None and self.completion_callback_url is None:
            raise ValueError("rollout_id is missing, and there is no completion_callback_url")
        return self

    @property
    def wants_grade(self) -> bool:
        """True if the rollout is to be graded."""
        return self.grade and (self.completion_callback_url is None or bool(self.grader_callback_url))

    @property
    def is_routed_by_body(self) -> bool:
        """True for controllers of SDK 0.2, which read the id from a callback's body instead of its URL."""
        path = urlsplit(self.completion_callback_url or "").path
        return self.rollout_id is not None and self.rollout_id not in map(unquote, path.split("/"))


class RolloutInitResponse(BaseModel):
    """The answer to `POST /rollout`, with the lease that a polling controller renews by each poll."""

    rollout_id: str
    status: RolloutStatus
    polling_lease_token: str
    result_wait_timeout_sec: float
    polling_lease_timeout_sec: float


class RolloutResultResponse(BaseModel):
    """The answer to `GET /rollout/{id}/result`: the status, and the result once it is terminal.

    `samples` holds all samples of a rollout that has several; `sample` is then the first, with their mean reward.
    `err_location` is the line of the user's code that failed.
    """

    rollout_id: str
    status: RolloutStatus
    sample: RolloutSample | None = None
    samples: dict[str, RolloutSample] | None = None
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    err_location: str | None = None


class RolloutStatusResponse(BaseModel):
    """The answer to `GET /rollout/{id}/status`; `unknown` for ids that the server doesn't know."""

    rollout_id: str
    status: RolloutStatus
    reward: float | None = None
    err_message: str | None = None


class CancelRolloutsRequest(BaseModel):
    """The body of `POST /rollout/cancel`, with exactly one selector."""

    ids: list[str] | None = None
    prefix: str | None = None
    all: bool = False

    @model_validator(mode="after")
    def _check_selector(self) -> Self:
        if (self.ids is not None) + (self.prefix is not None) + self.all != 1:
            raise ValueError("pass exactly one of ids, prefix and all")
        return self


class CancelRolloutsResponse(BaseModel):
    """The disposition of each rollout: `cancelled_queued`, `cancelled_running` or `not_found`."""

    dispositions: dict[str, str]


class RolloutLifecycle(BaseModel):
    """A server's state: if it accepts rollouts, and how many are running."""

    accepting_rollouts: bool
    active_rollouts: int = Field(ge=0)


class RolloutCompleteRequest(BaseModel):
    """The body of the completion callback. `err_location` as in RolloutResultResponse."""

    status: RolloutStatus
    rollout_id: str | None = None
    extra_fields: dict[str, Any] | None = None
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    err_location: str | None = None


class GraderCompleteRequest(BaseModel):
    """The body of the grader callback. Controllers of SDK 0.2 read `samples`, later ones `sample`."""

    status: GraderStatus
    rollout_id: str | None = None
    sample: RolloutSample | None = None
    samples: dict[str, RolloutSample] | None = None
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    err_location: str | None = None


class GraderInitRequest(BaseModel):
    """A request for grading alone, as SDK 0.2 declares it; no server answers it."""

    rollout_id: str
    samples: dict[str, RolloutSample]
    completion_callback_url: str
    extra_fields: dict[str, Any] | None = None
    controller_api_key: str | None = None


class GraderInitResponse(BaseModel):
    """The empty answer to a GraderInitRequest."""
