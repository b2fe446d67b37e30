"""The options that `test` and `eval` share, and how a command takes them as one object."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from osmosis_ai.errors import UsageError
from osmosis_ai.records import Record

if TYPE_CHECKING:
    from osmosis_ai.runtime.run.prepare import RunRequest

__all__ = ["SCORING", "RunOptions", "run_options", "takes"]

_AGENT = "Agent and data"
_MODEL = "Model"
_LIMITS = "Limits"
_RESUME = "Resume"
_OUTPUT = "Output"
SCORING = "Scores"

_ISOLATIONS = ("session", "rollout")


class RunOptions(Record, frozen=True):
    """The shared options as given. Times in seconds."""

    mcp: str | None
    agent: str | None
    allow_rewrites: bool
    dataset: str | None
    limit: int | None
    offset: int
    model: str | None
    base_url: str | None
    api_key: str | None
    params: dict[str, Any]
    cache: bool | None
    batch_size: int
    workers: int | None
    worker_memory: int | None
    isolation: str
    max_turns: int
    max_tokens_total: int | None
    max_tool_output: int
    timeout: float
    tool_timeout: float
    request_timeout: float
    reward_timeout: float
    max_cost: float | None
    score_partial: bool
    resume: bool
    resume_run: str | None
    retry_failed: bool
    rubrics: list[str]
    judge_model: str | None
    judge_base_url: str | None
    watch: bool
    output: str | None
    quiet: bool
    debug: bool
    json: bool

    def request(self, command: str) -> RunRequest:
        """What a command is asked to run."""
        from osmosis_ai.runtime.protocol import Limits
        from osmosis_ai.runtime.run.prepare import RunRequest

        return RunRequest(
            command=command,
            mcp=self.mcp,
            agent=self.agent,
            allow_rewrites=self.allow_rewrites,
            dataset=self.dataset,
            model=self.model,
            base_url=self.base_url,
            api_key=self.api_key,
            params=self.params,
            cache=bool(self.cache),
            limit=self.limit,
            offset=self.offset,
            batch_size=self.batch_size,
            max_cost=self.max_cost,
            score_partial=self.score_partial,
            rubrics=self.rubrics,
            limits=Limits(
                max_turns=self.max_turns,
                max_tokens_total=self.max_tokens_total,
                max_tool_output=self.max_tool_output,
                timeout=self.timeout,
                tool_timeout=self.tool_timeout,
                request_timeout=self.request_timeout,
                reward_timeout=self.reward_timeout,
            ),
        )


def run_options(
    mcp: Annotated[
        str | None,
        typer.Option(
            "--mcp",
            metavar="DIR|URL|FILE",
            help="The tools: a folder with main.py, DIR/main.py:name, a URL or an mcp.json file. Default: ./mcp.",
            rich_help_panel=_AGENT,
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--module",
            "--agent",
            metavar="MODULE:ATTR",
            help="An agent loop of your own, instead of --mcp: a RolloutAgentLoop, as in server:agent_loop.",
            rich_help_panel=_AGENT,
        ),
    ] = None,
    allow_rewrites: Annotated[
        bool,
        typer.Option(
            "--allow-rewrites",
            help="With -m: the loop may change messages that it has sent to the model.",
            rich_help_panel=_AGENT,
        ),
    ] = False,
    dataset: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--dataset",
            "--data",
            metavar="FILE",
            help="The rows: .jsonl, .json, .csv or .parquet. Default: test_data.jsonl.",
            rich_help_panel=_AGENT,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run at most N rows.", rich_help_panel=_AGENT)
    ] = None,
    offset: Annotated[int, typer.Option(min=0, metavar="N", help="Skip the first N rows.", rich_help_panel=_AGENT)] = 0,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="provider/model as LiteLLM knows it, a name served at --base-url, or offline/planner, "
            "offline/oracle, offline/empty. Default: $OSMOSIS_MODEL, else openai/gpt-5-mini with a key, "
            "else offline/planner.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="An OpenAI-compatible endpoint, for example http://localhost:8000/v1.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The model's key; the environment is the better place.", rich_help_panel=_MODEL
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, metavar="T", help="Sampling temperature.", rich_help_panel=_MODEL)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Completion tokens per turn.", rich_help_panel=_MODEL)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=JSON", help="Any other request parameter (repeatable): top_p=0.9.", rich_help_panel=_MODEL
        ),
    ] = None,
    cache: Annotated[
        bool | None,
        typer.Option(
            "--cache/--no-cache",
            help="Answer a request that was made before from stored replies; see `osmosis cache`. Default: off.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Concurrent rollouts.", rich_help_panel=_LIMITS)
    ] = 8,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Worker processes; 0 runs everything in this process. Default: CPUs, at most --batch-size.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    worker_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory per worker, for example 2GB. Default: a fair share of what is free.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    isolation: Annotated[
        str,
        typer.Option(
            metavar="session|rollout",
            help="session: rollouts share a worker, with an MCP session each. "
            "rollout: each has a process of its own, where module globals start fresh.",
            rich_help_panel=_LIMITS,
        ),
    ] = "session",
    max_turns: Annotated[
        int, typer.Option(min=1, metavar="N", help="Model calls per rollout.", rich_help_panel=_LIMITS)
    ] = 10,
    max_tokens_total: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens per rollout, all turns.", rich_help_panel=_LIMITS)
    ] = None,
    max_tool_output: Annotated[
        int, typer.Option(min=1, metavar="N", help="Characters per tool result.", rich_help_panel=_LIMITS)
    ] = 100_000,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time per rollout.", rich_help_panel=_LIMITS)
    ] = 450.0,
    tool_timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time per tool call.", rich_help_panel=_LIMITS)
    ] = 60.0,
    request_timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time per model request.", rich_help_panel=_LIMITS)
    ] = 300.0,
    reward_timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="Time per score.", rich_help_panel=_LIMITS)
    ] = 150.0,
    max_cost: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="USD",
            help="Start no further rollouts once they and their judges have cost this (models with a known price).",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    score_partial: Annotated[
        bool, typer.Option("--score-partial", help="Also score rollouts that ran out of time.", rich_help_panel=_LIMITS)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the latest unfinished run of this command.", rich_help_panel=_RESUME),
    ] = False,
    resume_run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Continue this run; see `osmosis runs`.", rich_help_panel=_RESUME),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Run the failed rollouts of a run again.", rich_help_panel=_RESUME),
    ] = False,
    rubric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE#ID|all",
            help="Also score with this rubric (repeatable); its judge costs money.",
            rich_help_panel=SCORING,
        ),
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Send every judge call to this model.", rich_help_panel=SCORING),
    ] = None,
    judge_base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send every judge call to this endpoint; its key is $OSMOSIS_JUDGE_API_KEY.",
            rich_help_panel=SCORING,
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Run again what a save makes stale, until q.", rich_help_panel=_OUTPUT),
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the results here.", rich_help_panel=_OUTPUT),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="No progress and no banner, only results.", rich_help_panel=_OUTPUT)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="A debug log on stderr.", rich_help_panel=_OUTPUT)] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="The object -o writes, on one line of stdout, and nothing else there.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> RunOptions:
    """Gather the shared options; its parameters become those of every command that `takes` it."""
    for option, number in (
        ("--temperature", temperature),
        ("--timeout", timeout),
        ("--tool-timeout", tool_timeout),
        ("--request-timeout", request_timeout),
        ("--reward-timeout", reward_timeout),
        ("--max-cost", max_cost),
    ):
        if number is not None and not math.isfinite(number):
            raise UsageError(f"{option} {number}: write a finite number")
    params = _parse_params(param or [])
    for name, value in (("temperature", temperature), ("max_tokens", max_tokens)):
        if value is not None:
            params[name] = value
    return RunOptions(
        mcp=mcp,
        agent=agent,
        allow_rewrites=allow_rewrites,
        dataset=dataset,
        limit=limit,
        offset=offset,
        model=model,
        base_url=base_url,
        api_key=api_key,
        params=params,
        cache=cache,
        batch_size=batch_size,
        workers=workers,
        worker_memory=None if worker_memory is None else _parse_size(worker_memory),
        isolation=_isolation(isolation),
        max_turns=max_turns,
        max_tokens_total=max_tokens_total,
        max_tool_output=max_tool_output,
        timeout=timeout,
        tool_timeout=tool_timeout,
        request_timeout=request_timeout,
        reward_timeout=reward_timeout,
        max_cost=max_cost,
        score_partial=score_partial,
        resume=resume,
        resume_run=resume_run,
        retry_failed=retry_failed,
        rubrics=rubric or [],
        judge_model=judge_model,
        judge_base_url=judge_base_url,
        watch=watch,
        output=output,
        quiet=quiet,
        debug=debug,
        json=json,
    )


def takes(gather: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command that takes `gather`'s parameters as its own and receives what it returns as `options`.

    Args:
        gather: Has the shared parameters, with their typer annotations.
    """
    shared = _parameters(gather)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [parameter for parameter in _parameters(command) if parameter.name != "options"]

        def wrapper(**arguments: Any) -> None:
            options = gather(**{parameter.name: arguments.pop(parameter.name) for parameter in shared})
            command(options=options, **arguments)

        merged = [*shared, *own]
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
        return wrapper

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """A function's parameters with their annotations evaluated, all as keywords."""
    # Not typing.get_type_hints: for a default of None it wraps the annotation in an Optional before Python 3.11.
    hints = inspect.get_annotations(function, eval_str=True)
    return [
        parameter.replace(annotation=hints.get(name, Any), kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def _isolation(text: str) -> str:
    # Not an enum: typer and click don't agree on an enum's default in every pair of their versions.
    if text not in _ISOLATIONS:
        raise UsageError(f"--isolation {text}: it is {' or '.join(_ISOLATIONS)}")
    return text


def _parse_size(text: str) -> int:
    """Bytes of a size such as 500MB or 2GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--worker-memory {text}: write a size such as 500MB or 2GB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _parse_params(given: list[str]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise UsageError(f"--param {text}: write NAME=JSON, for example --param top_p=0.9")
        try:
            params[name.strip()] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise UsageError(
                f"--param {text}: {value!r} is not JSON; a text needs quotes: --param '{name}=\"{value}\"'"
            ) from None
    return params
