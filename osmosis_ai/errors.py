"""How things go wrong, and the whole tree of errors. Everything this package raises on purpose is an OsmosisError.

A run that can't start is a `StartError`. Whoever prepares it raises one: the command line, `data`, `discovery`, the
loading of tools and functions, the probe of the model. From a worker process its message crosses the socket, and the
pool raises it again. The command prints it as one line and exits with 2; watch mode shows it and waits for the next
save. A `StoreError` after the start ends the run with 1, for what isn't stored doesn't count.

A rollout that goes wrong is data. The worker catches a `ModelError`, and whatever else is raised while a rollout or a
scorer runs, where it happens, and records it as a `records.Failure` with its origin and its kind (`failures`). The
others go on, and the command exits with 1 at the end. A `ToolError` doesn't get so far: the model is given it as the
result of its call. A `WorkerError` is how a lost process shows itself to the pool, which runs its jobs again or records
who was to blame.

The rest is for the caller's own code: `evaluate_rubric` raises `MissingAPIKeyError` and `ProviderRequestError`, the
trainer's client and an agent loop's `ctx.chat` an `OsmosisRolloutError`. Raised inside a rollout and not caught there,
they become that rollout's, or that score's, failure.

    OsmosisError
    ├── StartError                 the run can't start: exit code 2, one clear message
    │   ├── UsageError             an option, an argument or a file named on the command line
    │   ├── DatasetError           rows that are missing or malformed
    │   ├── RepositoryError        mcp/ can't be loaded, or holds no server or two
    │   ├── FunctionError          a reward function that isn't there or has the wrong form
    │   └── ModelStartError        the model can't be reached, is unknown, or refuses the key
    ├── ModelError                 one model request failed (a rollout's failure, origin `model`)
    ├── ToolError                  a tool call failed (goes back to the model as a result)
    ├── ScoreError                 a score could not be computed (origin `reward` or `rubric`)
    ├── MissingAPIKeyError         no key for a judge; also a RuntimeError
    ├── ProviderRequestError       a judge could not be asked, or gave no usable reply; also a RuntimeError
    │   └── ModelNotFoundError     the provider has no such model
    ├── WorkerError                a worker process died, or could not be started
    ├── StoreError                 the run store can't be read or written
    └── OsmosisRolloutError        an agent loop, or its talk with a trainer
        ├── OsmosisTransportError  the trainer can't be reached, or dropped the connection
        ├── OsmosisServerError     the trainer answered 5xx, or with something that can't be used
        ├── OsmosisValidationError the trainer answered 4xx
        ├── OsmosisTimeoutError    the trainer didn't answer in time
        ├── MessagesRewrittenError a loop changed messages it had sent
        ├── AgentLoopNotFoundError there is no such agent loop
        ├── AgentLoopError         an agent loop that doesn't pass validation
        └── ToolExecutionError     a loop's tool failed
            └── ToolArgumentError  the model's arguments of a tool call can't be read
"""

from __future__ import annotations

from osmosis_ai.failures import FAILURE_KINDS, FailureKind

__all__ = [
    "AgentLoopError",
    "AgentLoopNotFoundError",
    "DatasetError",
    "FunctionError",
    "MessagesRewrittenError",
    "MissingAPIKeyError",
    "ModelError",
    "ModelNotFoundError",
    "ModelStartError",
    "OsmosisError",
    "OsmosisRolloutError",
    "OsmosisServerError",
    "OsmosisTimeoutError",
    "OsmosisTransportError",
    "OsmosisValidationError",
    "ProviderRequestError",
    "RepositoryError",
    "ScoreError",
    "StartError",
    "StoreError",
    "ToolArgumentError",
    "ToolError",
    "ToolExecutionError",
    "UsageError",
    "WorkerError",
]


class OsmosisError(Exception):
    """Root of every error this package raises on purpose."""


class StartError(OsmosisError):
    """The run can't start. The message says what is wrong, where, and what to do."""


class UsageError(StartError):
    """An option, an argument or a file named on the command line can't be used."""


class DatasetError(StartError):
    """The dataset is missing, empty or malformed."""


class RepositoryError(StartError):
    """The repository's `mcp/` can't be loaded, or holds no server, or two."""


class FunctionError(StartError):
    """A reward function that doesn't exist, can't be loaded or has the wrong form."""


class ModelStartError(StartError):
    """The model can't be reached, is unknown, or refuses the key."""


class ModelError(OsmosisError):
    """One model request failed.

    Args:
        message: What happened, naming the endpoint or model, without any key.
        kind: Its short cause, one of `failures.FAILURE_KINDS`.
        status: The HTTP status, if there was a reply.
        retry_after: Seconds the endpoint asked to wait, if it said so.
    """

    def __init__(
        self, message: str, *, kind: FailureKind, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after = retry_after

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed later."""
        return FAILURE_KINDS[self.kind].retryable


class ToolError(OsmosisError):
    """A tool call failed. `kind` is its short cause, one of `failures.FAILURE_KINDS`."""

    def __init__(self, message: str, *, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind


class ScoreError(OsmosisError):
    """A score could not be computed; the message names file and line in the user's code when they are known."""


class MissingAPIKeyError(OsmosisError, RuntimeError):
    """There is no key for a judge's provider; the message says which variable to export."""


class ProviderRequestError(OsmosisError, RuntimeError):
    """A judge could not be asked, or gave no usable reply.

    Args:
        provider: As in `model_info`.
        model: The provider's name of the model.
        detail: What happened, without any key.
    """

    def __init__(self, provider: str, model: str, detail: str) -> None:
        super().__init__(provider, model, detail)
        self.provider = provider
        self.model = model
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.provider}/{self.model}: {self.detail}"


class ModelNotFoundError(ProviderRequestError):
    """The provider has no such model, or has it no longer."""


class WorkerError(OsmosisError):
    """A worker process died, or could not be started."""


class StoreError(OsmosisError):
    """The run store can't be read or written."""


class OsmosisRolloutError(OsmosisError):
    """Something went wrong in an agent loop's rollout, or between it and the trainer.

    Attributes:
        retryable: True if the same request may succeed later.
        retry_after: Seconds the trainer asked to wait; the protocol has no such answer.
    """

    retryable = False
    retry_after: float | None = None


class OsmosisTransportError(OsmosisRolloutError):
    """The trainer can't be reached, or dropped the connection."""

    retryable = True


class OsmosisServerError(OsmosisRolloutError):
    """The trainer answered 5xx, or with something that can't be used.

    Args:
        message: What happened, without any key.
        status_code: The HTTP status.
    """

    retryable = True

    def __init__(self, message: str, status_code: int = 500) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisValidationError(OsmosisRolloutError):
    """The trainer refused a request with 4xx: sending it again doesn't help.

    Args:
        message: What happened, without any key.
        status_code: The HTTP status.
    """

    def __init__(self, message: str, status_code: int = 400) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisTimeoutError(OsmosisRolloutError):
    """The trainer didn't answer in time."""

    retryable = True


class MessagesRewrittenError(OsmosisRolloutError):
    """A loop changed or left out messages it had already sent; `index` is the first one that differs."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class AgentLoopNotFoundError(OsmosisRolloutError):
    """There is no agent loop of this name.

    Args:
        name: What was asked for.
        available: The names there are.
    """

    def __init__(self, name: str, available: list[str] | None = None) -> None:
        self.name = name
        self.available = list(available or ())
        super().__init__(f"there is no agent loop {name!r}; there is {', '.join(self.available) or 'none'}")


class AgentLoopError(OsmosisRolloutError):
    """An agent loop doesn't pass validation; the message lists what is wrong."""


class ToolExecutionError(OsmosisRolloutError):
    """A loop's tool failed.

    Args:
        message: What happened.
        tool_call_id: The id of the tool call, when known.
        tool_name: The tool, when known.
    """

    def __init__(self, message: str, tool_call_id: str | None = None, tool_name: str | None = None) -> None:
        super().__init__(message)
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name


class ToolArgumentError(ToolExecutionError):
    """The arguments of a tool call can't be read."""
