"""`RunConfig`: everything a run needs, each option declared once, in nested groups.

Adding an option is one field here and its use: see `options` for what is made from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec

from osmosis_ai.options import Option, config_of, option_values, read_size
from osmosis_ai.records import Record

__all__ = [
    "AgentConfig",
    "BaselineConfig",
    "Command",
    "DataConfig",
    "LimitsConfig",
    "ModelConfig",
    "ResumeConfig",
    "RunConfig",
    "ScoringConfig",
    "WorkersConfig",
]

Command = Literal["test", "eval"]
Isolation = Literal["session", "rollout"]
EVAL = ("eval",)
SECONDS = "SECONDS"
SHORTEST = 0.001


class AgentConfig(Record, frozen=True):
    """Agent: the repository's tools in the built-in loop, or an agent loop of its own."""

    mcp: Annotated[
        str | None,
        Option(
            "The tools: a folder with main.py, DIR/main.py:name, a URL or an mcp.json file.",
            metavar="DIR|URL|FILE",
            default="./mcp",
        ),
    ] = None
    module: Annotated[
        str | None,
        Option(
            "An agent loop of your own, instead of --mcp: a RolloutAgentLoop, as in server:agent_loop.",
            ("--module", "-m"),
            "MODULE:ATTR",
            identity="agent",
        ),
    ] = None
    allow_rewrites: Annotated[bool, Option("With -m: the loop may change messages that it has sent to the model.")] = (
        False
    )


class DataConfig(Record, frozen=True):
    """Data: which rows."""

    dataset: Annotated[
        str | None,
        Option(
            "The rows: a .jsonl, .json, .csv or .parquet file.",
            ("--dataset", "-d"),
            "FILE",
            "test_data.jsonl",
            identity="dataset",
        ),
    ] = None
    limit: Annotated[int | None, Option("Run at most N rows.", metavar="N", minimum=1, identity="rows")] = None
    offset: Annotated[int, Option("Skip the first N rows.", metavar="N", minimum=0, identity="rows")] = 0


class ModelConfig(Record, frozen=True):
    """Model: what is asked, and how."""

    model: Annotated[
        str | None,
        Option(
            "provider/model as LiteLLM knows it, a name served at --base-url, or an offline model: "
            "offline/oracle, offline/smoke, offline/empty.",
            metavar="NAME",
            default="openai/gpt-5-mini with an OpenAI key, else offline/oracle",
            identity="model",
        ),
    ] = None
    base_url: Annotated[
        str | None,
        Option(
            "An OpenAI-compatible endpoint, for example http://localhost:8000/v1.", metavar="URL", identity="endpoint"
        ),
    ] = None
    # $OSMOSIS_API_KEY is read where the endpoint is known: no other provider may get it.
    api_key: Annotated[
        str | None, Option("The model's key; prefer the environment.", metavar="KEY", lasting=False, secret=True)
    ] = None
    temperature: Annotated[
        float | None, Option("Sampling temperature.", metavar="T", minimum=0.0, identity="parameters")
    ] = None
    max_tokens: Annotated[
        int | None, Option("Completion tokens per turn.", metavar="N", minimum=1, identity="parameters")
    ] = None
    param: Annotated[
        dict[str, Any],
        Option("Any other request parameter (repeatable): top_p=0.9.", metavar="NAME=JSON", identity="parameters"),
    ] = {}
    cache: Annotated[
        bool | None,
        Option(
            "Answer a request that was made before from stored replies; see `osmosis cache`.",
            default="off; on with --watch",
        ),
    ] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The parameters that every request carries."""
        named = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {**self.param, **{name: value for name, value in named.items() if value is not None}}


class BaselineConfig(Record, frozen=True):
    """Baseline: a second model on the same rows."""

    model: Annotated[
        str | None,
        Option(
            "Compare with this model on the same rows.",
            ("--baseline-model",),
            "NAME",
            identity="baseline",
            commands=EVAL,
        ),
    ] = None
    base_url: Annotated[
        str | None,
        Option("The baseline's endpoint.", ("--baseline-base-url",), "URL", identity="baseline", commands=EVAL),
    ] = None
    api_key: Annotated[
        str | None,
        Option("The baseline's key.", ("--baseline-api-key",), "KEY", commands=EVAL, lasting=False, secret=True),
    ] = None


class LimitsConfig(Record, frozen=True):
    """Limits: bounds of one rollout and of a run. Times in seconds; None means unbounded."""

    max_turns: Annotated[int, Option("Model calls per rollout.", metavar="N", minimum=1, identity="parameters")] = 10
    max_tokens_total: Annotated[
        int | None, Option("Tokens per rollout, all turns.", metavar="N", minimum=1, identity="parameters")
    ] = None
    max_tool_output: Annotated[
        int, Option("Characters per tool result.", metavar="N", minimum=1, identity="parameters")
    ] = 100_000
    timeout: Annotated[float, Option("Time per rollout.", metavar=SECONDS, minimum=SHORTEST)] = 450.0
    tool_timeout: Annotated[float, Option("Time per tool call.", metavar=SECONDS, minimum=SHORTEST)] = 60.0
    request_timeout: Annotated[float, Option("Time per model request.", metavar=SECONDS, minimum=SHORTEST)] = 300.0
    reward_timeout: Annotated[float, Option("Time per score.", metavar=SECONDS, minimum=SHORTEST)] = 150.0
    max_cost: Annotated[
        float | None,
        Option(
            "Start no further rollouts once they and their judges have cost this (models with a known price).",
            metavar="USD",
            minimum=0.0,
        ),
    ] = None


class ScoringConfig(Record, frozen=True):
    """Scores: what scores a rollout, and what counts as good."""

    eval_fn: Annotated[
        list[str],
        Option(
            "Score with this function (repeatable).",
            metavar="MODULE:FN",
            default="every discovered reward function",
            commands=EVAL,
        ),
    ] = []
    rubric: Annotated[
        list[str],
        Option("Also score with this rubric (repeatable); its judge costs money.", metavar="NAME|FILE#ID|all"),
    ] = []
    judge_model: Annotated[str | None, Option("Send every judge call to this model.", metavar="NAME")] = None
    judge_base_url: Annotated[
        str | None, Option("Send every judge call to this endpoint; its key is $OSMOSIS_JUDGE_API_KEY.", metavar="URL")
    ] = None
    n: Annotated[int, Option("Attempts per row.", metavar="N", minimum=1, identity="n", commands=EVAL)] = 1
    pass_threshold: Annotated[float, Option("A score of at least this passes.", metavar="SCORE", commands=EVAL)] = 1.0
    fail_under: Annotated[
        float | None, Option("Exit with 1 when a function's mean is lower.", metavar="MEAN", commands=EVAL)
    ] = None
    score_partial: Annotated[bool, Option("Also score rollouts that ran out of time.")] = False


class WorkersConfig(Record, frozen=True):
    """Workers: where user code runs."""

    batch_size: Annotated[int, Option("Concurrent rollouts.", metavar="N", minimum=1)] = 8
    workers: Annotated[
        int | None,
        Option(
            "Worker processes; 0 runs everything in this process.",
            metavar="N",
            default="CPUs, at most --batch-size",
            minimum=0,
        ),
    ] = None
    worker_memory: Annotated[
        int | None,
        Option(
            "Memory per worker, for example 2GB.",
            metavar="SIZE",
            default="a fair share of what is free",
            read=read_size,
        ),
    ] = None
    isolation: Annotated[
        Isolation,
        Option(
            "session: rollouts share a worker, with an MCP session each. "
            "rollout: each has a process of its own, where module globals start fresh.",
            metavar="session|rollout",
            choices=get_args(Isolation),
        ),
    ] = "session"
    debug: Annotated[bool, Option("A debug log on stderr.", lasting=False)] = False


class ResumeConfig(Record, frozen=True):
    """Resume: going on with a stored run."""

    resume: Annotated[bool, Option("Continue the latest unfinished run of this command.", lasting=False)] = False
    resume_run: Annotated[
        str | None, Option("Continue this run; see `osmosis runs`.", metavar="RUN", lasting=False)
    ] = None
    retry_failed: Annotated[bool, Option("Run the failed rollouts of a run again.", lasting=False)] = False

    @property
    def wanted(self) -> bool:
        """True if a stored run is continued."""
        return self.resume or self.resume_run is not None or self.retry_failed


class RunConfig(Record, frozen=True):
    """Everything a run needs.

    `command` names the kind of run, `test` or `eval`: its results object, and which runs it may continue.

    Example:
        >>> config = RunConfig.of(mcp="./mcp", dataset="test_data.jsonl", model="offline/oracle", n=3)
        >>> config.scoring.n
        3
    """

    agent: AgentConfig = AgentConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    baseline: BaselineConfig = BaselineConfig()
    limits: LimitsConfig = LimitsConfig()
    scoring: ScoringConfig = ScoringConfig()
    workers: WorkersConfig = WorkersConfig()
    resume: ResumeConfig = ResumeConfig()
    command: Command = "eval"

    @classmethod
    def of(cls, command: Command = "eval", **options: Any) -> RunConfig:
        """A config from options by their names on the command line, `-` written as `_`; all others have their default.

        Args:
            command: The kind of run.
            options: `mcp="./mcp", model="openai/gpt-5-mini", n=5, baseline_model="…"`.

        Raises:
            UsageError: There is no such option, or a value can't be used.
        """
        return msgspec.structs.replace(config_of(cls, options), command=command)

    def __repr__(self) -> str:
        """The options that differ from their defaults, without keys."""
        given = {
            option.name: "…" if option.option.secret else value
            for option, value in option_values(self)
            if value != option.default
        }
        return (
            f"RunConfig.of({', '.join([repr(self.command), *(f'{name}={value!r}' for name, value in given.items())])})"
        )
