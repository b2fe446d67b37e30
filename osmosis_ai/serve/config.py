"""`ServeConfig`: everything `osmosis serve` needs, each option declared once."""

from __future__ import annotations

from typing import Annotated

from osmosis_ai.config import AgentConfig
from osmosis_ai.options import once
from osmosis_ai.records import Record

__all__ = ["ServeConfig", "ServerConfig"]

LEVELS = ("debug", "info", "warning", "error")


class ServerConfig(Record, frozen=True):
    """Server: where it listens, whom it lets in, and how rollouts run. Times in seconds."""

    port: Annotated[int, once("Where to listen; 0 for a free one.", ("--port", "-p"), "PORT", minimum=0)] = 9000
    host: Annotated[
        str, once("The address to listen at; 0.0.0.0 lets other machines in.", ("--host", "-H"), "HOST")
    ] = "127.0.0.1"
    api_key: Annotated[
        str | None,
        once(
            "The key a trainer has to send; prefer $OSMOSIS_ROLLOUT_API_KEY.",
            metavar="KEY",
            default="one is made and printed",
            secret=True,
        ),
    ] = None
    local: Annotated[bool, once("Ask for no key, and listen on this machine only.")] = False
    skip_register: Annotated[bool, once("Don't register with the platform, which isn't offered yet.")] = False
    no_validate: Annotated[bool, once("Don't check the agent loop first.")] = False
    reload: Annotated[bool, once("Reload on code changes; in-flight rollouts finish on the old code.")] = False
    log_level: Annotated[
        str, once("The least severity that goes to stderr.", metavar="|".join(LEVELS), choices=LEVELS)
    ] = "info"
    log: Annotated[
        str | None,
        once("A folder for what loops write with ctx.log_event.", metavar="DIR", default="$ROLLOUT_DEBUG_DIR"),
    ] = None
    max_concurrent: Annotated[
        int | None, once("Rollouts at a time; more wait.", metavar="N", default="100", minimum=1)
    ] = None
    workers: Annotated[
        int | None, once("Worker processes.", metavar="N", default="CPUs, at most --max-concurrent", minimum=1)
    ] = None
    timeout: Annotated[float | None, once("Time per rollout.", metavar="SECONDS", default="1800", minimum=0.001)] = None
    tool_timeout: Annotated[float, once("With --mcp: time per tool call.", metavar="SECONDS", minimum=0.001)] = 60.0


class ServeConfig(Record, frozen=True):
    """Everything `osmosis serve` needs."""

    agent: AgentConfig = AgentConfig()
    server: ServerConfig = ServerConfig()
