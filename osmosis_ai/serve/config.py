"""`ServeConfig`: everything `osmosis serve` needs, each option declared once."""

from __future__ import annotations

from typing import Annotated

from osmosis_ai.config import AgentConfig, StoreConfig
from osmosis_ai.options import once
from osmosis_ai.records import Record

__all__ = ["ServeConfig", "ServerConfig"]

LEVELS = ("debug", "info", "warning", "error")


class ServerConfig(Record, frozen=True):
    """Server: its address, access and rollouts. Times are in seconds."""

    port: Annotated[int, once("Listen on this port; 0 picks a free one.", ("--port", "-p"), "PORT", minimum=0)] = 9000
    host: Annotated[
        str, once("Listen on this address; 0.0.0.0 lets other machines connect.", ("--host", "-H"), "HOST")
    ] = "127.0.0.1"
    api_key: Annotated[
        str | None,
        once(
            "Require this key from trainers; prefer $OSMOSIS_ROLLOUT_API_KEY.",
            metavar="KEY",
            default="generated and printed",
            secret=True,
        ),
    ] = None
    local: Annotated[bool, once("Require no key, and listen on this machine only.")] = False
    skip_register: Annotated[bool, once("Don't register with the platform, which isn't offered yet.")] = False
    no_validate: Annotated[bool, once("Don't check the agent loop first.")] = False
    reload: Annotated[bool, once("Reload on code changes; in-flight rollouts finish on the old code.")] = False
    log_level: Annotated[
        str, once("Log messages of at least this severity to stderr.", metavar="|".join(LEVELS), choices=LEVELS)
    ] = "info"
    log: Annotated[
        str | None,
        once("Write the loops' ctx.log_event entries to this folder.", metavar="DIR", default="$ROLLOUT_DEBUG_DIR"),
    ] = None
    max_concurrent: Annotated[
        int | None, once("Run up to N rollouts at a time; others wait.", metavar="N", default="100", minimum=1)
    ] = None
    workers: Annotated[
        int | None, once("Start N worker processes.", metavar="N", default="CPUs, at most --max-concurrent", minimum=1)
    ] = None
    timeout: Annotated[
        float | None, once("Limit the time per rollout.", metavar="SECONDS", default="1800", minimum=0.001)
    ] = None
    tool_timeout: Annotated[
        float, once("With --mcp: limit the time per tool call.", metavar="SECONDS", minimum=0.001)
    ] = 60.0


class ServeConfig(Record, frozen=True):
    """Everything `osmosis serve` needs."""

    agent: AgentConfig = AgentConfig()
    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()
