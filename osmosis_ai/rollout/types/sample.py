"""The results of rollouts, and the requests and outcomes of backends."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, Field, model_validator

from osmosis_ai.rollout.vocabulary import RolloutErrorCategory, RolloutStatus

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "ExecutionOutcome",
    "ExecutionRequest",
    "ExecutionResult",
    "MessageDict",
    "RolloutId",
    "RolloutSample",
    "Timeout",
]

logger = logging.getLogger(__name__)

MessageDict: TypeAlias = dict[str, Any]
"""One message, in OpenAI's form."""


def _path_segment(text: str) -> str:
    # Ids become folder names, so they must be safe with any system's path separators.
    names = {PurePosixPath(text).name, PureWindowsPath(text).name}
    if names != {text} or text in ("", ".", "..") or "\0" in text:
        raise ValueError("a rollout id must be one path segment: no separators, and not '.' or '..'")
    return text


RolloutId: TypeAlias = Annotated[str, AfterValidator(_path_segment)]
"""An id that is safe as the name of a folder."""

Timeout: TypeAlias = Annotated[float, AllowInfNan(False)]
"""A finite number of seconds; zero or less has already expired."""


class RolloutSample(BaseModel):
    """One conversation and its reward. Assignments are validated: NaN and infinities are refused.

    Attributes:
        id: The sample's name, among several of one rollout.
        messages: The conversation, in the form of the framework that held it.
        trajectory_messages: The conversation in OpenAI's form, for the trajectory file. Default: a copy of `messages`.
            None for no trajectory.
        label: The row's ground truth.
        reward: The grader's reward.
        remove_sample: True to exclude the sample from all statistics.
        metrics: Measurements.
        extra_fields: Anything else.
    """

    model_config = ConfigDict(allow_inf_nan=False, validate_assignment=True)

    id: str | None = None
    messages: Sequence[Mapping[str, Any]] = Field(default_factory=list)
    trajectory_messages: Sequence[Mapping[str, Any]] | None = None
    label: str | None = None
    reward: float | None = None
    remove_sample: bool = False
    metrics: dict[str, Any] = Field(default_factory=dict)
    extra_fields: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _copy_messages(self) -> Self:
        # Assignments run it too; by then the field is set.
        if "trajectory_messages" not in self.model_fields_set:
            try:
                self.trajectory_messages = copy.deepcopy(list(self.messages))
            except Exception as error:  # noqa: BLE001  a framework's message may refuse to be copied
                logger.warning("there will be no trajectory, because the messages can't be copied: %s", error)
                self.trajectory_messages = None
        return self

    def json_safe_copy(self) -> Self:
        """Return a copy whose `metrics` and `extra_fields` JSON can hold.

        Numbers of other libraries become int or float, and numeric keys become text. What JSON can't hold is left out,
        with one warning.
        """
        dropped: set[str] = set()
        fields = {name: _fitted(getattr(self, name), dropped) for name in ("metrics", "extra_fields")}
        if dropped:
            logger.warning("left out of the sample, because JSON can't hold it: %s", ", ".join(sorted(dropped)))
        return self.model_copy(update=fields)


_UNFIT = object()
"""Marks a value that JSON can't represent."""


def _fitted(value: object, dropped: set[str]) -> Any:
    """Return a value as JSON can hold it, or `_UNFIT`."""
    if value is None or isinstance(value, (bool, str)):
        # Without the subclass: an enum's member becomes its text.
        return str.__str__(value) if isinstance(value, str) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
        dropped.add(f"a {type(value).__name__} that isn't finite")
        return _UNFIT
    if isinstance(value, Mapping):
        return dict(_fitted_items(value, dropped))
    if isinstance(value, (list, tuple)):
        return [item for each in value if (item := _fitted(each, dropped)) is not _UNFIT]
    dropped.add(f"a {type(value).__name__}")
    return _UNFIT


def _fitted_items(value: Mapping[Any, object], dropped: set[str]) -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        key = _UNFIT
        if isinstance(name, (str, Real)):
            key = _fitted(name, dropped)
        else:
            dropped.add(f"a key of type {type(name).__name__}")
        if key is not _UNFIT and (item := _fitted(each, dropped)) is not _UNFIT:
            yield str(key), item


class ExecutionRequest(BaseModel):
    """One rollout to run.

    Attributes:
        id: The rollout's id, one path segment.
        prompt: The row's messages.
        label: The row's ground truth.
        metadata: The row's metadata.
        agent_timeout_sec: Seconds for the workflow, with the wait for its turn; None for no limit.
        grader_timeout_sec: Seconds for the grader; None for no limit.
        grade: False to run only the workflow.
    """

    id: RolloutId
    prompt: list[MessageDict]
    label: str | None = None
    metadata: dict[str, Any] | None = None
    agent_timeout_sec: Timeout | None = None
    grader_timeout_sec: Timeout | None = None
    grade: bool = True


class ExecutionResult(BaseModel):
    """The result of a workflow, or of a grader.

    Attributes:
        status: SUCCESS, FAILURE or CANCELLED.
        sample: The sample, if there is exactly one.
        samples: All samples by id, if there are several.
        err_message: The reason for a failure.
        err_category: Its category.
        extra_fields: Diagnostics, which stay on this machine.
    """

    status: RolloutStatus
    sample: RolloutSample | None = None
    samples: dict[str, RolloutSample] = Field(default_factory=dict)
    err_message: str | None = None
    err_category: RolloutErrorCategory | None = None
    extra_fields: dict[str, Any] | None = None


class ExecutionOutcome(BaseModel):
    """The result of a rollout's workflow, and of its grader if it ran."""

    workflow: ExecutionResult
    grader: ExecutionResult | None = None

    @property
    def result(self) -> ExecutionResult:
        """The rollout's result: the workflow's if that failed, else the grader's if there is one."""
        if self.workflow.status is not RolloutStatus.SUCCESS or self.grader is None:
            return self.workflow
        return self.grader
