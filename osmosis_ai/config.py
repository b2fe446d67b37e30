"""`RunConfig`: everything a run needs, each option declared once, in nested groups.

To add an option, add one field here and use it. `options` derives the flag, variable, file key and documentation.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

import msgspec

from osmosis_ai.options import Option, config_of, once, option_values, read_size
from osmosis_ai.records import Record
from osmosis_ai.row_numbers import read_row_numbers
from osmosis_ai.shards import read_shard

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
    "StoreConfig",
    "StoredRunsConfig",
    "WorkersConfig",
    "WorkflowConfig",
]

Command = Literal["test", "eval"]
Sdk = Literal["declared", "own"]
Isolation = Literal["session", "rollout", "sandbox"]
EVAL = ("eval",)
RUN_NAME = re.compile(r"(?!\.+$|latest$)[A-Za-z0-9._-]{1,96}")
SECONDS = "SECONDS"
SHORTEST = 0.001


def read_run_name(text: str) -> str:
    """Return a run's name as given; raise ValueError if it can't be one."""
    if not RUN_NAME.fullmatch(text):
        raise ValueError("write up to 96 letters, digits, dots, dashes and underscores; `latest` isn't a name")
    return text


class AgentConfig(Record, frozen=True):
    """Agent: the repository's tools in the built-in loop, or an agent loop of its own."""

    mcp: Annotated[
        str | None,
        Option(
            "Use these tools: a folder with main.py, DIR/main.py:name, a URL or an mcp.json file.",
            metavar="DIR|URL|FILE",
            default="the repository's mcp folder",
            path=True,
        ),
    ] = None
    module: Annotated[
        str | None,
        Option(
            "Run your own agent loop instead of --mcp: a RolloutAgentLoop, as in server:agent_loop.",
            ("--module", "-m"),
            "MODULE:ATTR",
            identity="agent",
        ),
    ] = None
    allow_rewrites: Annotated[bool, Option("With -m: let the loop change messages already sent to the model.")] = False


class WorkflowConfig(Record, frozen=True):
    """Rollout server: a server of the repository's own, in place of an agent."""

    rollout: Annotated[
        str | None,
        Option(
            "Run your own rollout server instead of --mcp: a folder with main.py, as in rollouts/my-rollout.",
            metavar="DIR|FILE",
            identity="rollout server",
            path=True,
        ),
    ] = None
    sdk: Annotated[
        Sdk,
        Option(
            "With --rollout: the SDK that its pyproject.toml declares, in an environment of its own, or Osmosis's own.",
            metavar="declared|own",
            choices=get_args(Sdk),
            identity="rollout server",
        ),
    ] = "declared"
    rollout_env: Annotated[
        dict[str, str],
        Option(
            "With --rollout: set a variable of the server's environment, and of nothing else (repeatable): LANG=en.",
            metavar="NAME=TEXT",
            identity="rollout server",
        ),
    ] = {}


class DataConfig(Record, frozen=True):
    """Data: the dataset and the rows to run."""

    dataset: Annotated[
        str | None,
        Option(
            "Read the rows from this .jsonl, .json, .csv or .parquet file.",
            ("--dataset", "-d"),
            "FILE",
            "test_data.jsonl",
            identity="dataset",
            path=True,
        ),
    ] = None
    limit: Annotated[int | None, Option("Run at most N rows.", metavar="N", minimum=1, identity="rows")] = None
    offset: Annotated[int, Option("Skip the first N rows.", metavar="N", minimum=0, identity="rows")] = 0
    rows: Annotated[
        str | None,
        once(
            "Run these rows of the file, counted from 0, instead of --limit and --offset: 3,7,10-20.",
            metavar="ROWS",
            identity="rows",
            read=read_row_numbers,
        ),
    ] = None
    shard: Annotated[
        str | None,
        once(
            "Run only shard I of N, from 1/N to N/N, of these rows; `osmosis runs merge` makes one run of all shards.",
            metavar="I/N",
            identity="shard",
            read=read_shard,
        ),
    ] = None


class ModelConfig(Record, frozen=True):
    """Model: the policy and its request parameters."""

    model: Annotated[
        str | None,
        Option(
            "Call this model: provider/model as in LiteLLM, a name served at --base-url, or an offline model: "
            "offline/oracle, offline/smoke, offline/empty.",
            metavar="NAME",
            default="openai/gpt-5-mini with an OpenAI key, else offline/oracle",
            identity="model",
        ),
    ] = None
    base_url: Annotated[
        str | None,
        Option(
            "Send requests to this OpenAI-compatible endpoint, for example http://localhost:8000/v1.",
            metavar="URL",
            identity="endpoint",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "With --base-url: call the model with tokens instead of messages, so that the run holds exactly those that "
            "it read and sampled. The folder of the model, with its tokenizer and chat template.",
            metavar="DIR",
            identity="tokenizer",
            path=True,
        ),
    ] = None
    # $OSMOSIS_API_KEY is read later, once the endpoint is known, so that it never reaches another provider.
    api_key: Annotated[
        str | None,
        Option("Authenticate with this key; prefer the environment.", metavar="KEY", lasting=False, secret=True),
    ] = None
    temperature: Annotated[
        float | None, Option("Sample at this temperature.", metavar="T", minimum=0.0, identity="parameters")
    ] = None
    max_tokens: Annotated[
        int | None, Option("Limit the completion tokens per turn.", metavar="N", minimum=1, identity="parameters")
    ] = None
    param: Annotated[
        dict[str, Any],
        Option("Send another request parameter (repeatable): top_p=0.9.", metavar="NAME=JSON", identity="parameters"),
    ] = {}
    cache: Annotated[
        bool | None,
        Option(
            "Answer repeated requests from stored replies; see `osmosis cache`.",
            default="off; on with --watch",
        ),
    ] = None

    record: Annotated[
        str | None,
        Option(
            "Record the model's replies in this folder for --replay, and reuse those already recorded.",
            metavar="DIR",
            lasting=False,
            path=True,
        ),
    ] = None
    replay: Annotated[
        str | None,
        Option(
            "Answer every request from the recordings in this folder; a request without one fails.",
            metavar="DIR",
            lasting=False,
            path=True,
        ),
    ] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Parameters sent with every request."""
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
        Option(
            "Send the baseline's requests to this endpoint.",
            ("--baseline-base-url",),
            "URL",
            identity="baseline",
            commands=EVAL,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            "Authenticate the baseline's requests with this key.",
            ("--baseline-api-key",),
            "KEY",
            commands=EVAL,
            lasting=False,
            secret=True,
        ),
    ] = None


class LimitsConfig(Record, frozen=True):
    """Limits: bounds of one rollout and of a run. Times are in seconds; None means unbounded."""

    max_turns: Annotated[
        int, Option("Limit the model calls per rollout.", metavar="N", minimum=1, identity="parameters")
    ] = 10
    max_tokens_total: Annotated[
        int | None,
        Option("Limit the tokens per rollout, over all turns.", metavar="N", minimum=1, identity="parameters"),
    ] = None
    max_tool_output: Annotated[
        int, Option("Limit the characters per tool result.", metavar="N", minimum=1, identity="parameters")
    ] = 100_000
    timeout: Annotated[float, Option("Limit the time per rollout.", metavar=SECONDS, minimum=SHORTEST)] = 450.0
    tool_timeout: Annotated[float, Option("Limit the time per tool call.", metavar=SECONDS, minimum=SHORTEST)] = 60.0
    request_timeout: Annotated[
        float, Option("Limit the time per model request.", metavar=SECONDS, minimum=SHORTEST)
    ] = 300.0
    reward_timeout: Annotated[float, Option("Limit the time per score.", metavar=SECONDS, minimum=SHORTEST)] = 150.0
    max_cost: Annotated[
        float | None,
        Option(
            "Start no more rollouts once model and judge calls have cost this much (models with a known price).",
            metavar="USD",
            minimum=0.0,
        ),
    ] = None


class ScoringConfig(Record, frozen=True):
    """Scores: reward functions, judges and thresholds."""

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
    n: Annotated[int, Option("Run every row N times.", metavar="N", minimum=1, identity="n", commands=EVAL)] = 1
    pass_threshold: Annotated[
        float, Option("Count a score of at least this as a pass.", metavar="SCORE", commands=EVAL)
    ] = 1.0
    fail_under: Annotated[
        float | None, Option("Exit with 1 if a function's mean score is lower.", metavar="MEAN", commands=EVAL)
    ] = None
    score_partial: Annotated[bool, Option("Also score rollouts that ran out of time.")] = False
    keep_going: Annotated[
        bool, Option("Leave out reward and rubric files that can't be loaded, instead of refusing to run; exit with 1.")
    ] = False


class WorkersConfig(Record, frozen=True):
    """Workers: the processes that run user code."""

    batch_size: Annotated[int, Option("Run up to N rollouts at a time.", metavar="N", minimum=1)] = 8
    workers: Annotated[
        int | None,
        Option(
            "Start N worker processes; 0 runs everything in this process.",
            metavar="N",
            default="CPUs, at most --batch-size",
            minimum=0,
        ),
    ] = None
    worker_memory: Annotated[
        int | None,
        Option(
            "Limit the memory per worker, for example to 2GB.",
            metavar="SIZE",
            default="a fair share of free memory",
            read=read_size,
        ),
    ] = None
    isolation: Annotated[
        Isolation,
        Option(
            "session: rollouts share a worker, each with its own MCP session. "
            "rollout: each rollout has its own process, with fresh module globals. "
            "sandbox: each rollout's tools and each score have their own sandbox, for code that a model wrote.",
            metavar="session|rollout|sandbox",
            choices=get_args(Isolation),
        ),
    ] = "session"
    cluster: Annotated[
        str | None,
        Option(
            "Run on the nodes of a Ray cluster: auto (this machine's), ray://HOST:PORT, or local (one for this run "
            "alone). Needs osmosis-ai[ray].",
            metavar="auto|ray://HOST:PORT|local",
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Option("With --cluster: use at most N nodes.", metavar="N", default="all", minimum=1),
    ] = None
    workers_per_node: Annotated[
        int | None,
        Option("With --cluster: start N worker processes on each node.", metavar="N", default="its CPUs", minimum=1),
    ] = None
    sandbox_network: Annotated[
        bool, Option("With --isolation sandbox: let tools and functions use the network of this machine.")
    ] = False
    debug: Annotated[bool, Option("Write a debug log to stderr.", lasting=False)] = False


class StoreConfig(Record, frozen=True):
    """Store: the runs and what belongs to them."""

    folder: Annotated[
        str | None,
        Option(
            "Keep runs, logs and stored replies in this folder.",
            ("--store",),
            "DIR",
            ".osmosis in the repository; if that is read-only, a folder in the user's state directory",
            path=True,
        ),
    ] = None


class StoredRunsConfig(Record, frozen=True):
    """Everything that a command needs to find stored runs."""

    store: StoreConfig = StoreConfig()


class ResumeConfig(Record, frozen=True):
    """Resume: continue a stored run."""

    resume: Annotated[bool, Option("Continue the latest unfinished run of this command.", lasting=False)] = False
    resume_run: Annotated[
        str | None, Option("Continue this run; see `osmosis runs`.", metavar="RUN", lasting=False)
    ] = None
    name: Annotated[
        str | None, once("Name the run; if there is one of this name, continue it.", metavar="NAME", read=read_run_name)
    ] = None
    fresh: Annotated[bool, once("With --name: start a new run, even if there is one with this name.")] = False
    retry_failed: Annotated[bool, Option("Run the failed rollouts of a run again.", lasting=False)] = False
    regrade: Annotated[
        bool, once("With --rollout: grade a run's rollouts again, playing the stored replies instead of the model.")
    ] = False

    @property
    def wanted(self) -> bool:
        """True if this run must continue a stored one."""
        return self.resume or self.resume_run is not None or self.retry_failed or self.regrade


class RunConfig(Record, frozen=True):
    """Everything a run needs.

    `command` is `test` or `eval`. It decides the form of the results and which stored runs can be resumed.

    Example:
        >>> config = RunConfig.of(mcp="./mcp", dataset="test_data.jsonl", model="offline/oracle", n=3)
        >>> config.scoring.n
        3
    """

    agent: AgentConfig = AgentConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    baseline: BaselineConfig = BaselineConfig()
    limits: LimitsConfig = LimitsConfig()
    scoring: ScoringConfig = ScoringConfig()
    workers: WorkersConfig = WorkersConfig()
    store: StoreConfig = StoreConfig()
    resume: ResumeConfig = ResumeConfig()
    command: Command = "eval"

    @classmethod
    def of(cls, command: Command = "eval", **options: Any) -> RunConfig:
        """Build a config from options named as on the command line, with `_` for `-`; the rest keep their defaults.

        Args:
            command: The kind of run.
            options: `mcp="./mcp", model="openai/gpt-5-mini", n=5, baseline_model="…"`.

        Raises:
            UsageError: An option doesn't exist, or its value can't be used.
        """
        return msgspec.structs.replace(config_of(cls, options), command=command)

    def __repr__(self) -> str:
        """Show the options that differ from their defaults, with keys hidden."""
        given = {
            option.name: "…" if option.option.secret else value
            for option, value in option_values(self)
            if value != option.default
        }
        return (
            f"RunConfig.of({', '.join([repr(self.command), *(f'{name}={value!r}' for name, value in given.items())])})"
        )
