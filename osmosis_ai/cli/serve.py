"""`osmosis serve`: offer an agent to a trainer, over the remote rollout protocol."""

from __future__ import annotations

from typing import Annotated

import typer

from osmosis_ai.errors import UsageError

__all__ = ["serve"]

LEVELS = ("debug", "info", "warning", "error")


def serve(
    agent: Annotated[
        str | None,
        typer.Option(
            "-m", "--module", "--agent", metavar="MODULE:ATTR", help="The agent loop: a RolloutAgentLoop or its class."
        ),
    ] = None,
    mcp: Annotated[
        str | None,
        typer.Option(
            "--mcp", metavar="DIR|URL|FILE", help="Or a repository's tools, in the built-in loop. Default: ./mcp."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("-p", "--port", min=0, max=65535, metavar="PORT", help="Where to listen; 0 for a free one.")
    ] = 9000,
    host: Annotated[
        str,
        typer.Option("-H", "--host", metavar="HOST", help="The address to listen at; 0.0.0.0 lets other machines in."),
    ] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The key a trainer has to send; $OSMOSIS_ROLLOUT_API_KEY is the better place. "
            "Default: one is made and printed.",
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Ask for no key, and listen on this machine only.")] = False,
    skip_register: Annotated[
        bool, typer.Option("--skip-register", help="Don't register with the platform, which isn't offered yet.")
    ] = False,
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Don't check the agent loop first.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Load the agent anew when its code changes; what runs ends as it began.")
    ] = False,
    log_level: Annotated[str, typer.Option(metavar="|".join(LEVELS), help="What goes to stderr.")] = "info",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="A folder for what loops write with ctx.log_event. Default: $ROLLOUT_DEBUG_DIR."
        ),
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rollouts at a time; more wait. Default: 100.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Worker processes. Default: CPUs, at most --max-concurrent.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="Time per rollout. Default: 1800.")
    ] = None,
    tool_timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="With --mcp: time per tool call.")
    ] = 60.0,
    allow_rewrites: Annotated[
        bool, typer.Option("--allow-rewrites", help="A loop may change messages that it has sent to the model.")
    ] = False,
) -> None:
    """Offer an agent to a trainer: each rollout it asks for runs in a worker process, against the trainer's model.

    A loop that raises, hangs or takes its process down costs its own rollout, which is reported to the trainer as
    failed.
    """
    from osmosis_ai.cli.serving import ServeOptions, serve_agent

    if log_level not in LEVELS:
        raise UsageError(f"--log-level {log_level}: one of {', '.join(LEVELS)}")
    options = ServeOptions(
        agent=agent,
        mcp=mcp,
        port=port,
        host=host,
        api_key=api_key,
        local=local,
        skip_register=skip_register,
        validate=not no_validate,
        reload=reload,
        log_level=log_level,
        log=log,
        max_concurrent=max_concurrent,
        workers=workers,
        timeout=timeout,
        tool_timeout=tool_timeout,
        allow_rewrites=allow_rewrites,
    )
    raise typer.Exit(serve_agent(options))
