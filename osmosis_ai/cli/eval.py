"""`osmosis eval`: run the agent over a dataset and score it, with statistics. Also a group of subcommands."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from osmosis_ai.cli.eval_rubric import eval_rubric
from osmosis_ai.cli.not_offered import EVAL_COMMANDS, add_commands
from osmosis_ai.cli.options import SCORING, RunOptions, run_options, takes

__all__ = ["app"]

app = typer.Typer(invoke_without_command=True, rich_markup_mode="rich")
app.command("rubric")(eval_rubric)
add_commands(app, EVAL_COMMANDS, "osmosis eval")


@app.callback()
@takes(run_options)
def evaluate(
    context: typer.Context,
    options: RunOptions,
    eval_fn: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FN",
            help="Score with this function (repeatable). Default: every discovered reward function.",
            rich_help_panel=SCORING,
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, metavar="N", help="Attempts per row.", rich_help_panel=SCORING)] = 1,
    pass_threshold: Annotated[
        float, typer.Option(metavar="SCORE", help="A score of at least this passes.", rich_help_panel=SCORING)
    ] = 1.0,
    fail_under: Annotated[
        float | None,
        typer.Option(metavar="MEAN", help="Exit with 1 when a function's mean is lower.", rich_help_panel=SCORING),
    ] = None,
    baseline_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compare with this model on the same rows.", rich_help_panel=SCORING),
    ] = None,
    baseline_base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The baseline's endpoint.", rich_help_panel=SCORING)
    ] = None,
    baseline_api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The baseline's key.", rich_help_panel=SCORING)
    ] = None,
) -> None:
    """Run the agent over a dataset and score what comes out, with statistics."""
    if context.invoked_subcommand is not None:
        return
    from osmosis_ai.cli.start import start

    request = options.request("eval")
    request = msgspec.structs.replace(
        request,
        eval_fns=eval_fn or [],
        n=n,
        pass_threshold=pass_threshold,
        baseline_model=baseline_model,
        baseline_base_url=baseline_base_url,
        baseline_api_key=baseline_api_key,
    )
    raise typer.Exit(start(request, options, fail_under=fail_under))
