"""The error tree. Everything this package raises on purpose is an OsmosisError.

A `StartError` means that the run can't start. The code that prepares a run raises it: the command line, `data`,
`discovery`, the loaders of tools and functions, the model probe. A worker process sends its message over the socket,
and the pool raises it again. The command prints it on one line and exits with 2; watch mode shows it and waits for the
next save. A `StoreError` after the start ends the run with exit code 1, because results that aren't stored don't count.

A failed rollout is data, not a crash. The worker catches a `ModelError`, and any other exception raised by a rollout or
a scorer, and records it as a `records.Failure` with an origin and a kind (see `failures`). The other rollouts continue,
and the command exits with 1 at the end. A `ToolError` doesn't end its rollout: the model receives it as the result of
the tool call. A `WorkerError` reports a lost process to the pool, which runs the lost jobs again or records the one to
blame.

The other errors reach the caller. `evaluate_rubric` raises `MissingAPIKeyError` and `ProviderRequestError`; the
trainer's client and an agent loop's `ctx.chat` raise an `OsmosisRolloutError`. If a rollout or a scorer doesn't catch
them, they become its failure. Errors between neighboring modules (`HttpError`, `JobFailedError`, `RefusedError`) are
defined where they are raised.

    OsmosisError
    ├── StartError                 the run can't start: exit code 2, one clear message
    │   ├── UsageError             an option, argument or file from the command line can't be used
    │   ├── DatasetError           the dataset is missing, empty or malformed
    │   ├── RepositoryError        mcp/ can't be loaded, or holds no server or two
    │   ├── FunctionError          a reward function is missing or has the wrong form
    │   ├── ModelStartError        the model can't be reached, is unknown, or refuses the key
    │   └── ShortageError          the system has no processes, threads or open files left
    ├── ModelError                 one model request failed (a rollout's failure, origin `model`)
    ├── ToolError                  a tool call failed (goes back to the model as a result)
    ├── ScoreError                 a score could not be computed (origin `reward` or `rubric`)
    ├── MissingAPIKeyError         a judge has no key; also a RuntimeError
    ├── ProviderRequestError       a request to a judge failed, or gave no usable reply; also a RuntimeError
    │   └── ModelNotFoundError     the provider has no such model
    ├── WorkerError                a worker process died, or could not be started
    ├── StoreError                 the run store can't be read or written
    ├── OutputError                stdout or the results file can't be written
    └── OsmosisRolloutError        an agent loop failed, or its connection to a trainer
        ├── OsmosisTransportError  the trainer can't be reached, or dropped the connection
        ├── OsmosisServerError     the trainer answered 5xx, or with an unusable reply
        ├── OsmosisValidationError the trainer answered 4xx
        ├── OsmosisTimeoutError    the trainer didn't answer in time
        ├── MessagesRewrittenError a loop changed messages it had already sent
        ├── AgentLoopNotFoundError no agent loop has this name
        ├── AgentLoopError         an agent loop doesn't pass validation
        └── ToolExecutionError     a loop's tool failed
            └── ToolArgumentError  the arguments of a tool call can't be read
"""

from __future__ import annotations

from collections.abc import Iterable

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
    "OutputError",
    "ProviderRequestError",
    "RepositoryError",
    "ScoreError",
    "ShortageError",
    "StartError",
    "StoreError",
    "ToolArgumentError",
    "ToolError",
    "ToolExecutionError",
    "UsageError",
    "WorkerError",
    "start_error",
]


class OsmosisError(Exception):
    """Root of every error this package raises on purpose."""


class StartError(OsmosisError):
    """The run can't start. The message says what is wrong, where, and what to do."""


def start_error(name: str, message: str) -> StartError:
    """Make a StartError of the class with this name, as another process reported it."""
    known = {kind.__name__: kind for kind in StartError.__subclasses__()}
    return known.get(name, StartError)(message)


class UsageError(StartError):
    """An option, an argument or a file named on the command line can't be used."""


class DatasetError(StartError):
    """The dataset is missing, empty or malformed."""


class RepositoryError(StartError):
    """The repository's `mcp/` can't be loaded, or holds no server, or two."""


class FunctionError(StartError):
    """A reward function doesn't exist, can't be loaded or has the wrong form."""

    @classmethod
    def of_all(cls, messages: Iterable[str], *, others: bool) -> FunctionError:
        """Make the error for functions that can't be loaded. `others` is True if some can be."""
        hint = ["Fix it, or score with the other functions by adding --keep-going."] if others else []
        return cls("\n".join([*messages, *hint]))


class ModelStartError(StartError):
    """The model can't be reached, is unknown, or refuses the key."""


class ShortageError(StartError):
    """The system starts no more processes or threads, or opens no more files. The message names the limit."""


class ModelError(OsmosisError):
    """One model request failed.

    Args:
        message: What happened, naming the endpoint or model, without any key.
        kind: Short cause, one of `failures.FAILURE_KINDS`.
        status: HTTP status, if there was a reply.
        retry_after: Seconds the endpoint asked to wait, if any.
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
    """The judge's provider has no key; the message names the variable to export."""


class ProviderRequestError(OsmosisError, RuntimeError):
    """A request to a judge failed, or gave no usable reply.

    Args:
        provider: As in `model_info`.
        model: The model's name at the provider.
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
    """The provider doesn't have this model, or no longer has it."""


class WorkerError(OsmosisError):
    """A worker process died, or could not be started."""


class StoreError(OsmosisError):
    """The run store can't be read or written."""


class OutputError(OsmosisError):
    """Stdout or the results file can't be written: the disk is full, or the terminal is gone."""


class OsmosisRolloutError(OsmosisError):
    """An agent loop's rollout failed, or its connection to the trainer.

    Attributes:
        retryable: True if the same request may succeed later.
        retry_after: Seconds to wait before a retry; None, because the trainer's protocol has no field for it.
    """

    retryable = False
    retry_after: float | None = None


class OsmosisTransportError(OsmosisRolloutError):
    """The trainer can't be reached, or dropped the connection."""

    retryable = True


class OsmosisServerError(OsmosisRolloutError):
    """The trainer answered 5xx, or with an unusable reply.

    Args:
        message: What happened, without any key.
        status_code: The HTTP status.
    """

    retryable = True

    def __init__(self, message: str, status_code: int = 500) -> None:
        super().__init__(message)
        self.status_code = status_code


class OsmosisValidationError(OsmosisRolloutError):
    """The trainer refused a request with 4xx; a retry won't help.

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
    """A loop changed or dropped messages it had already sent; `index` is the first that differs."""

    def __init__(self, message: str, *, index: int) -> None:
        super().__init__(message)
        self.index = index


class AgentLoopNotFoundError(OsmosisRolloutError):
    """No agent loop has this name.

    Args:
        name: The name asked for.
        available: The existing names.
    """

    def __init__(self, name: str, available: list[str] | None = None) -> None:
        self.name = name
        self.available = list(available or ())
        super().__init__(f"no agent loop is named {name!r}; the known ones are: {', '.join(self.available) or 'none'}")


class AgentLoopError(OsmosisRolloutError):
    """An agent loop doesn't pass validation; the message lists the problems."""


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
