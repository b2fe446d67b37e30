"""The kinds of failure: why a model request, a tool call, a rollout or a score can fail, in one table.

Code names a kind by a string (`Failure("model", text, kind="timeout")`), which the type checker compares with
`FailureKind`. To add a kind, add it there and to `FAILURE_KINDS`; docs/results.md lists them all.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = ["FAILURE_KINDS", "CallError", "FailureKind", "KindOfFailure", "Origin"]

Origin: TypeAlias = Literal["model", "tool", "setup", "agent", "reward", "rubric", "timeout", "worker", "dataset"]
"""The part at fault."""

_OfModels = Literal["auth", "bad_reply", "bad_request", "dropped", "not_found", "overloaded", "quota", "rate_limit"]
_OfTools = Literal["bad_json", "schema", "session", "unknown_tool"]
_OfCode = Literal["error", "exception", "exit", "load", "no_ground_truth", "no_report", "not_finite", "wrong_type"]
_OfWorkers = Literal["blocked", "died", "rollout", "start"]
FailureKind: TypeAlias = Literal[
    _OfModels, "refused", "solution", "timeout", "unknown_model", "unrecorded", _OfTools, _OfCode, _OfWorkers
]

CallError: TypeAlias = FailureKind | Origin
"""Why a tool call failed; for a call that its rollout's failure cut short, the origin of that failure."""


class KindOfFailure(NamedTuple):
    """One kind of failure: its possible origins, its cause, and True if a retry of the model request may succeed.

    A failure of origin `tool` goes back to the model as an error result; any other ends the rollout, or replaces the
    score.
    """

    origins: tuple[Origin, ...]
    cause: str
    retryable: bool = False


FAILURE_KINDS: dict[FailureKind, KindOfFailure] = {
    # A model request
    "refused": KindOfFailure(("model",), "nothing answers at the address, or its certificate isn't trusted"),
    "timeout": KindOfFailure(("model", "tool", "reward", "rubric"), "no answer within the time limit", retryable=True),
    "dropped": KindOfFailure(("model",), "the endpoint dropped the connection", retryable=True),
    "rate_limit": KindOfFailure(("model",), "the endpoint asks for fewer requests (429)", retryable=True),
    "overloaded": KindOfFailure(("model",), "the endpoint failed (5xx)", retryable=True),
    "auth": KindOfFailure(("model",), "the endpoint refuses the key"),
    "quota": KindOfFailure(("model",), "the account behind the key has no quota left"),
    "not_found": KindOfFailure(("model",), "there is nothing at this address (404, or a redirect)"),
    "unknown_model": KindOfFailure(("model",), "the provider doesn't know the model"),
    "bad_request": KindOfFailure(("model",), "the endpoint refuses the request"),
    "bad_reply": KindOfFailure(("model",), "the reply isn't a chat completion"),
    "solution": KindOfFailure(("model",), "a row's solution refers to a value that no earlier result holds"),
    "unrecorded": KindOfFailure(("model", "reward"), "the request isn't recorded, for `--replay` or `--regrade`"),
    # A tool call
    "unknown_tool": KindOfFailure(("tool",), "no tool has that name"),
    "bad_json": KindOfFailure(("tool",), "the arguments aren't a JSON object"),
    "schema": KindOfFailure(("tool",), "the arguments don't fit the tool's schema"),
    "session": KindOfFailure(("tool",), "the connection to the tool server was lost"),
    # Code of the repository
    "exception": KindOfFailure(("tool", "setup", "agent", "reward", "rubric", "worker"), "an exception was raised"),
    "exit": KindOfFailure(("reward", "rubric"), "the function called `sys.exit`"),
    "error": KindOfFailure(("agent",), "the agent loop ended the rollout with an error"),
    "wrong_type": KindOfFailure(("agent", "reward", "rubric"), "a value of the wrong type was returned"),
    "not_finite": KindOfFailure(("agent", "reward", "rubric"), "a score that isn't a finite number was returned"),
    "no_ground_truth": KindOfFailure(("reward", "rubric"), "the function needs a ground truth, and the row has none"),
    "no_report": KindOfFailure(("timeout", "reward"), "a rollout server reported nothing within the time limit"),
    "load": KindOfFailure(("reward", "rubric"), "the function can't be loaded"),
    # Workers
    "rollout": KindOfFailure(("timeout",), "the rollout took longer than `--timeout`"),
    "blocked": KindOfFailure(("timeout", "reward", "rubric"), "user code blocked its worker"),
    "died": KindOfFailure(("worker", "reward", "rubric"), "the worker process died"),
    "start": KindOfFailure(("worker",), "the worker process could not be started"),
}
"""Every kind, by name."""
