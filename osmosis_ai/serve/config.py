"""`ServeConfig`: everything `osmosis serve` needs, each option declared once."""

from __future__ import annotations

from typing import Annotated

from osmosis_ai.config import AgentConfig
from osmosis_ai.options import Option
from osmosis_ai.records import Record

__all__ = ["ServeConfig", "ServerConfig"]

LEVELS = ("debug", "info", "warning", "error")


class ServerConfig(Record, frozen=True):
    """Server: where it listens, whom it lets in, and how rollouts run. Times in seconds."""

    port: Annotated[
        int, Option("Where to listen; 0 for a free one.", ("--port", "-p"), "PORT", minimum=0, lasting=False)
    ] = 9000
    host: Annotated[
        str,
        Option("The address to listen at; 0.0.0.0 lets other machines in.", ("--host", "-H"), "HOST", lasting=False),
    ] = "127.0.0.1"
    api_key: Annotated[
        str | None,
        Option(
            "The key a trainer has to send; prefer $OSMOSIS_ROLLOUT_API_KEY.",
            metavar="KEY",
            default="one is made and printed",
            lasting=False,
            secret=True,
        ),
    ] = None
    local: Annotated[bool, Option("Ask for no key, and listen on this machine only.", lasting=False)] = False
    skip_register: Annotated[
        bool, Option("Don't register with the platform, which isn't offered yet.", lasting=False)
    ] = False
    no_validate: Annotated[bool, Option("Don't check the agent loop first.", lasting=False)] = False
    reload: Annotated[
        bool, Option("Reload on code changes; in-flight rollouts finish on the old code.", lasting=False)
    ] = False
    log_level: Annotated[
        str, Option("The least severity that goes to stderr.", metavar="|".join(LEVELS), choices=LEVELS, lasting=False)
    ] = "info"
    log: Annotated[
        str | None,
        Option(
            "A folder for what loops write with ctx.log_event.",
            metavar="DIR",
            default="$ROLLOUT_DEBUG_DIR",
            lasting=False,
        ),
    ] = None
    max_concurrent: Annotated[
        int | None, Option("Rollouts at a time; more wait.", metavar="N", default="100", minimum=1, lasting=False)
    ] = None
    workers: Annotated[
        int | None,
        Option("Worker processes.", metavar="N", default="CPUs, at most --max-concurrent", minimum=1, lasting=False),
    ] = None
    timeout: Annotated[
        float | None, Option("Time per rollout.", metavar="SECONDS", default="1800", minimum=0.001, lasting=False)
    ] = None
    tool_timeout: Annotated[
        float, Option("With --mcp: time per tool call.", metavar="SECONDS", minimum=0.001, lasting=False)
    ] = 60.0


class ServeConfig(Record, frozen=True):
    """Everything `osmosis serve` needs."""

    agent: AgentConfig = AgentConfig()
    server: ServerConfig = ServerConfig()
