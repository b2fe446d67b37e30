"""Check that an agent loop (`validate_agent_loop`) or a workflow and its grader (`validate_backend`) can be served.

Each problem has a stable code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from osmosis_ai.errors import AgentLoopError
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.core.base import RolloutAgentLoop
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.tracebacks import describe

if TYPE_CHECKING:
    from osmosis_ai.rollout.types import AgentWorkflowConfig, GraderConfig

__all__ = [
    "ValidationError",
    "ValidationIssue",
    "ValidationResult",
    "resolved_agent_name",
    "validate_agent_loop",
    "validate_backend",
]

MAX_NAME = 256
"""Characters of a workflow's name."""

# The function names that OpenAI accepts; a model call with any other fails.
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ValidationIssue(Record, frozen=True):
    """One problem of an agent loop, a workflow or a grader.

    `code` is stable across versions; `subject` is the tool, attribute or argument concerned.
    """

    code: str
    message: str
    subject: str | None = None

    @property
    def field(self) -> str | None:
        """`subject` under its name in SDK 0.2."""
        return self.subject

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


ValidationError = ValidationIssue
"""The name in SDK 0.2."""


class ValidationResult(Record, frozen=True):
    """The problems of an agent loop or a workflow, which is valid if there are no errors."""

    errors: list[ValidationIssue] = []
    warnings: list[ValidationIssue] = []
    agent_name: str | None = None
    tool_count: int = 0

    @property
    def valid(self) -> bool:
        """True if it can be served."""
        return not self.errors

    def raise_if_invalid(self) -> None:
        """Raise if there are errors.

        Raises:
            AgentLoopError: The message lists all errors.
        """
        if self.errors:
            listed = "\n".join(f"  {error}" for error in self.errors)
            # Without a name, the sentence would have two spaces.
            raise AgentLoopError(
                f"the agent loop {self.agent_name or ''} can't be served:\n{listed}".replace("  can", " can")
            )


def validate_agent_loop(agent_loop: RolloutAgentLoop | type[RolloutAgentLoop]) -> ValidationResult:
    """Check an agent loop's name, its `run`, and its default tools. Only `get_default_tools` is run.

    Args:
        agent_loop: The agent loop, or its class.
    """
    errors: list[ValidationIssue] = []
    warnings: list[ValidationIssue] = []
    if isinstance(agent_loop, type):
        kind = agent_loop
        try:
            agent_loop = kind()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
            shown = kind.__name__
            message = f"{shown}() raised {describe(error)}; a loop's class must need no arguments"
            return ValidationResult([ValidationIssue("CANNOT_BE_CREATED", message, shown)])
    errors.extend(_check_name(agent_loop))
    errors.extend(_check_run(agent_loop))
    tools, problems = _tools(agent_loop)
    errors.extend(problems)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        for issue in _check_tool(tool, index, names):
            (warnings if issue.code == "MISSING_DESCRIPTION" else errors).append(issue)
    name = getattr(agent_loop, "name", None)
    return ValidationResult(errors, warnings, name if isinstance(name, str) and name.strip() else None, len(tools))


def _check_name(loop: RolloutAgentLoop) -> Iterator[ValidationIssue]:
    name: object = getattr(loop, "name", None)
    if name is None:
        yield ValidationIssue("MISSING_NAME", 'the loop has no name: add `name = "…"` to its class', "name")
    elif not isinstance(name, str):
        message = f"the loop's name must be a str, not {type(name).__name__}"
        yield ValidationIssue("INVALID_NAME_TYPE", message, "name")
    elif not name.strip():
        yield ValidationIssue("EMPTY_NAME", "the loop's name is empty", "name")


def _check_run(loop: RolloutAgentLoop) -> Iterator[ValidationIssue]:
    run = getattr(loop, "run", None)
    if not inspect.iscoroutinefunction(run):
        kind = "an async generator" if inspect.isasyncgenfunction(run) else "missing" if run is None else "not async"
        yield ValidationIssue("RUN_NOT_ASYNC", f"run is {kind}: write `async def run(self, ctx)`", "run")


def _tools(loop: RolloutAgentLoop) -> tuple[list[object], list[ValidationIssue]]:
    try:
        tools: object = loop.get_default_tools()
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        return [], [ValidationIssue("GET_TOOLS_EXCEPTION", f"get_tools raised {describe(error)}", "get_tools")]
    if tools is None:
        message = "get_tools returned None; a loop without tools returns []"
        return [], [ValidationIssue("GET_TOOLS_RETURNS_NONE", message, "get_tools")]
    if inspect.iscoroutine(tools):
        # Otherwise Python would warn that the coroutine was never awaited.
        tools.close()
        message = "get_tools is async; it must be a plain function that returns a list"
        return [], [ValidationIssue("GET_TOOLS_INVALID_TYPE", message, "get_tools")]
    if not isinstance(tools, (list, tuple)):
        message = f"get_tools must return a list of tools, not {type(tools).__name__}"
        return [], [ValidationIssue("GET_TOOLS_INVALID_TYPE", message, "get_tools")]
    return list(tools), []


def _check_tool(tool: object, index: int, names: set[str]) -> Iterator[ValidationIssue]:
    place = f"tools[{index}]"
    if isinstance(tool, BaseModel):
        tool = tool.model_dump()
    if not isinstance(tool, dict):
        message = f"{place} must be an OpenAIFunctionToolSchema or a dict, not {type(tool).__name__}"
        yield ValidationIssue("GET_TOOLS_INVALID_TYPE", message, place)
        return
    kind = tool.get("type")
    if kind is None:
        yield ValidationIssue("MISSING_TOOL_TYPE", f'{place} has no type: it is "function"', place)
    elif kind != "function":
        yield ValidationIssue("UNKNOWN_TOOL_TYPE", f'{place} has the type {kind!r}; there is only "function"', place)
    function = tool.get("function")
    if not isinstance(function, dict):
        yield ValidationIssue("MISSING_FUNCTION", f"{place} has no function", place)
        return
    yield from _check_function(function, place, names)


def _check_function(function: JsonObject, place: str, names: set[str]) -> Iterator[ValidationIssue]:
    name = function.get("name")
    if name is None:
        yield ValidationIssue("MISSING_FUNCTION_NAME", f"the function of {place} has no name", place)
    elif not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"the function of {place} has the name {name!r}; models accept at most 64 letters, digits, _ and -"
        yield ValidationIssue("INVALID_FUNCTION_NAME", message, place)
    else:
        place = name
        if name in names:
            yield ValidationIssue("DUPLICATE_FUNCTION_NAME", f"there are two tools with the name {name}", name)
        names.add(name)
    description = function.get("description")
    if not isinstance(description, str) or not description.strip():
        message = f"{place} has no description: the model can only guess what it is for"
        yield ValidationIssue("MISSING_DESCRIPTION", message, place)
    parameters = function.get("parameters")
    if parameters and (not isinstance(parameters, dict) or parameters.get("type") != "object"):
        found = parameters.get("type") if isinstance(parameters, dict) else type(parameters).__name__
        message = f'the parameters of {place} have the type {found!r}; it must be "object"'
        yield ValidationIssue("PARAMETERS_TYPE_NOT_OBJECT", message, place)


def validate_backend(
    workflow_cls: object,
    workflow_config: AgentWorkflowConfig | None,
    grader_cls: object = None,
    grader_config: GraderConfig | None = None,
) -> ValidationResult:
    """Check a workflow, its grader and its name, and that both can be created. Neither is run.

    Args:
        workflow_cls: The AgentWorkflow class.
        workflow_config: Its configuration.
        grader_cls: The Grader class.
        grader_config: Its configuration.
    """
    errors = list(_check_class(workflow_cls, workflow_config, AgentWorkflow, "workflow", "run"))
    name = resolved_agent_name(workflow_cls, workflow_config) if isinstance(workflow_cls, type) else None
    if name is not None and not 1 <= len(name) <= MAX_NAME:
        message = f"the workflow's name has {len(name)} characters; at most {MAX_NAME} are allowed"
        errors.append(ValidationIssue("INVALID_AGENT_NAME", message, "name"))
    if grader_cls is None:
        errors.append(
            ValidationIssue("MISSING_GRADER", "there is no grader, so nothing rewards the workflow", "grader_cls")
        )
    else:
        errors.extend(_check_class(grader_cls, grader_config, Grader, "grader", "grade"))
    return ValidationResult(errors, agent_name=name)


def resolved_agent_name(workflow_cls: type, workflow_config: AgentWorkflowConfig | None) -> str:
    """Return a workflow's name: the configuration's, else that of its class."""
    return (workflow_config.name.strip() if workflow_config else "") or workflow_cls.__name__


def _check_class(kind: Any, config: object, base: type, what: str, method: str) -> Iterator[ValidationIssue]:
    subject = f"{what}_cls"
    create = kind
    if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
        message = f"the {what} must be a subclass of {base.__name__}, not {kind!r}"
        yield ValidationIssue(f"INVALID_{what.upper()}_CLASS", message, subject)
        return
    if not inspect.iscoroutinefunction(getattr(kind, method)):
        message = f"{kind.__name__}.{method} isn't async: write `async def {method}(self, ctx)`"
        yield ValidationIssue(f"{what.upper()}_{method.upper()}_NOT_ASYNC", message, f"{subject}.{method}")
    try:
        create(config)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        message = f"{kind.__name__}(config) raised {describe(error)}"
        yield ValidationIssue(f"{what.upper()}_INIT_FAILED", message, subject)
