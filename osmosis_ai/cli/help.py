"""Write the help of every command: usage, options, examples and exit codes, the same with every version of typer."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from osmosis_ai.compat import COMMANDS

__all__ = ["CONTEXT", "PAGES", "HelpCommand", "HelpGroup", "Page"]

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The settings of the root command, which its subcommands inherit."""


class Page(NamedTuple):
    """The end of a command's help.

    Attributes:
        see: The page of the documentation.
        examples: Command lines, each after the purpose it serves.
        failed: The meaning of exit code 1; empty if the command never ends with it.
    """

    see: str
    examples: Sequence[tuple[str, str]]
    failed: str = ""


FLAGS_WIDTH = 34
"""Columns for the names of options; the text of a longer one begins on the next line."""

_RUN_FAILED = "a rollout failed or could not be scored"
_REFUSED = "the platform refused it, or doesn't answer"

PAGES = {
    "": Page(
        "README.md, docs/README.md",
        [
            ("Create a repository to start from", "osmosis init my-agent"),
            ("Check its tools and rewards, offline and free", "osmosis test --model offline/oracle"),
            ("Measure a model", "osmosis eval --model openai/gpt-5-mini --limit 20 --n 3"),
        ],
        "something failed",
    ),
    "init": Page(
        "README.md",
        [
            ("Create my-agent/ and try it", "osmosis init my-agent && cd my-agent && osmosis test"),
            ("Fill the current folder", "osmosis init ."),
        ],
    ),
    "test": Page(
        "docs/cli.md",
        [
            ("Try three rows without a model or a key", "osmosis test --limit 3 --model offline/oracle"),
            ("Step through row 2 at a prompt", "osmosis test --interactive --row 2"),
        ],
        _RUN_FAILED,
    ),
    "eval": Page(
        "docs/cli.md",
        [
            ("Score a local model, three attempts per row", "osmosis eval --base-url http://localhost:8000/v1 --n 3"),
            ("Re-score whenever a file is saved", "osmosis eval --limit 20 --watch"),
        ],
        f"{_RUN_FAILED}, or a mean is below --fail-under",
    ),
    "eval run": Page(
        "docs/workflows.md",
        [
            ("Evaluate what a config names", "osmosis eval run configs/eval/my-rollout.toml"),
            ("Try its first rows offline", "osmosis eval run configs/eval/my-rollout.toml --model offline/oracle"),
        ],
        "a rollout is missing, or a mean is below --fail-under",
    ),
    "eval-rubric": Page(
        "docs/rubrics.md",
        [
            ("Judge recorded solutions", "osmosis eval-rubric --rubric explained_steps -d rubric_data.jsonl"),
            (
                "Run it three times per record",
                "osmosis eval-rubric --rubric explained_steps -d rubric_data.jsonl --n 3",
            ),
        ],
        "a run of the judge failed",
    ),
    "validate": Page(
        "docs/checks.md",
        [
            ("Check the repository in the current folder", "osmosis validate"),
            ("Annotate a pull request, without running code", "osmosis validate --static --format github"),
        ],
        "an error was found (with --strict: or a warning)",
    ),
    "runs": Page(
        "docs/runs.md",
        [
            ("List the latest runs", "osmosis runs --limit 5"),
            ("Show what failed in the last run", "osmosis runs show latest --failed"),
        ],
    ),
    "view": Page(
        "docs/viewer.md",
        [
            ("Open the last run", "osmosis view latest"),
            ("Look at the runs of two repositories", "osmosis view --root agents/search --root agents/code"),
            ("Write what failed as one page", "osmosis view latest --html failed.html --failed"),
        ],
    ),
    "runs view": Page(
        "docs/viewer.md",
        [
            ("Open the last run", "osmosis runs view latest"),
            ("Print the address, for a tunnel from another machine", "osmosis runs view --no-open --port 8500"),
        ],
    ),
    "runs list": Page(
        "docs/runs.md",
        [
            ("List the latest runs", "osmosis runs list --limit 5"),
            ("Read them from a script", "osmosis runs list --json"),
        ],
    ),
    "runs show": Page(
        "docs/runs.md",
        [
            ("Read the transcript of a row", "osmosis runs show latest --row 0"),
            ("Show only what failed", "osmosis runs show latest --failed"),
        ],
    ),
    "runs compare": Page(
        "docs/runs.md",
        [
            ("Compare the last run with an earlier one", "osmosis runs compare 20260301-0941 latest"),
            ("Count a row as passed from 0.5", "osmosis runs compare 20260301-0941 latest --pass-threshold 0.5"),
            ("Gate a merge", "osmosis runs compare 20260301-0941 latest --fail-on worse --format markdown"),
        ],
        "there is nothing to compare, or --fail-on holds",
    ),
    "runs diff": Page(
        "docs/runs.md",
        [
            ("See which rows flipped", "osmosis runs diff 20260301-0941 latest"),
            ("See where the two conversations of row 3 part", "osmosis runs diff 20260301-0941 latest --row 3"),
        ],
    ),
    "runs export": Page(
        "docs/runs.md",
        [
            ("Write the rollouts that passed", "osmosis runs export latest --only-passed -o train.jsonl"),
            ("Write Parquet", "osmosis runs export latest -o train.parquet"),
        ],
        "the file could not be written",
    ),
    "runs rescore": Page(
        "docs/runs.md",
        [
            ("Score the last run with the current reward code", "osmosis runs rescore"),
            ("Score it with one function", "osmosis runs rescore latest --eval-fn numbers_match_reward"),
        ],
        "a score could not be computed",
    ),
    "runs push": Page(
        "docs/testing.md",
        [
            ("Copy the last run to a file for another machine", "osmosis runs push pushed"),
            ("Copy another one", "osmosis runs push pushed 20260301-0941"),
        ],
        "the file could not be written",
    ),
    "runs pull": Page(
        "docs/testing.md",
        [
            ("Take in the latest pushed run and print its id", "osmosis runs pull pushed"),
            ("Compare the last run with it", 'osmosis runs compare "$(osmosis runs pull pushed)" latest'),
        ],
        "the store could not be written",
    ),
    "runs merge": Page(
        "docs/scale.md",
        [
            ("Merge the shards that ran with this store", "osmosis runs merge ."),
            ("Merge shards that ran elsewhere", "osmosis runs merge shard-1 shard-2 shard-3"),
            ("Write the results of all shards", 'osmosis eval --resume-run "$(osmosis runs merge .)" -o results.json'),
        ],
        "the store could not be written",
    ),
    "import": Page(
        "docs/coming-from.md",
        [
            ("Make a run of an inspect_ai log", "osmosis import logs/2026-03-01.eval"),
            ("Make rows of a promptfoo config", "osmosis import promptfooconfig.yaml -o rows.jsonl"),
        ],
        "a sample or a row could not be read",
    ),
    "runs rm": Page(
        "docs/runs.md",
        [
            ("Remove a run", "osmosis runs rm 20260301-0941"),
            ("Remove all finished runs without asking", "osmosis runs rm --all-finished --yes"),
        ],
        "the removal was declined",
    ),
    "preview": Page(
        "docs/datasets.md",
        [
            ("Show two rows as Osmosis reads them", "osmosis preview test_data.jsonl --limit 2"),
            ("Check a rubric file", "osmosis preview rubric_configs.yaml"),
        ],
    ),
    "config": Page(
        "docs/options.md",
        [
            ("Show where each option comes from", "osmosis config"),
            ("See what a command line would change", "osmosis config --n 5 --json"),
        ],
    ),
    "cache": Page(
        "docs/watch.md",
        [("Show how much is stored", "osmosis cache"), ("Remove all stored replies", "osmosis cache clear")],
    ),
    "cache clear": Page(
        "docs/watch.md",
        [("Remove all stored replies", "osmosis cache clear"), ("In a script", "osmosis cache clear --json")],
    ),
    "rollout": Page(
        "docs/workflows.md",
        [
            ("Create a rollout and try it", "osmosis rollout init my-rollout && osmosis rollout validate my-rollout"),
            ("List the workspace's rollouts", "osmosis rollout list"),
        ],
        "an error was found",
    ),
    "rollout init": Page(
        "docs/workflows.md",
        [
            ("Create a rollout with configs and rows", "osmosis rollout init my-rollout"),
            ("Overwrite what it wrote before", "osmosis rollout init my-rollout -f"),
        ],
    ),
    "rollout list": Page(
        "docs/workflows.md",
        [
            ("List the workspace's rollouts", "osmosis rollout list"),
            ("Read them from a script", "osmosis rollout list --json"),
        ],
    ),
    "rollout validate": Page(
        "docs/workflows.md, docs/checks.md",
        [
            ("Check a rollout without a model", "osmosis rollout validate my-rollout"),
            ("Try the first row of a file", "osmosis rollout validate my-rollout -d data/rows.jsonl"),
        ],
        "an error was found",
    ),
    "rollout serve": Page(
        "docs/workflows.md",
        [
            ("Serve a rollout to a trainer", "osmosis rollout serve my-rollout"),
            ("Serve it on another port", "osmosis rollout serve my-rollout --port 9000"),
        ],
    ),
    "serve": Page(
        "docs/agent-loops.md",
        [
            ("Serve a repository's tools, for tests on this machine", "osmosis serve --mcp ./mcp --local"),
            ("Serve your own agent loop", "osmosis serve -m server:agent_loop --port 9000"),
        ],
    ),
    "eval submit": Page(
        "docs/platform.md",
        [
            ("Evaluate on the platform", "osmosis eval submit configs/eval/my-rollout.toml"),
            (
                "Submit uncommitted code and follow the run",
                "osmosis eval submit configs/eval/my-rollout.toml --snapshot --wait",
            ),
        ],
        _REFUSED,
    ),
    "eval list": Page(
        "docs/platform.md",
        [
            ("List the latest evaluations", "osmosis eval list"),
            ("Read all from a script", "osmosis eval list --all --json"),
        ],
        _REFUSED,
    ),
    "eval info": Page(
        "docs/platform.md",
        [
            ("Show results", "osmosis eval info brave-falcon-421"),
            ("Read them from a script", "osmosis eval info brave-falcon-421 --json"),
        ],
        _REFUSED,
    ),
    "eval logs": Page(
        "docs/platform.md",
        [
            ("See what happened last", "osmosis eval logs brave-falcon-421"),
            ("See more of it", "osmosis eval logs brave-falcon-421 --limit 200"),
        ],
        _REFUSED,
    ),
    "eval stop": Page(
        "docs/platform.md",
        [
            ("Stop a run", "osmosis eval stop brave-falcon-421"),
            ("Stop it without asking", "osmosis eval stop brave-falcon-421 --yes"),
        ],
        _REFUSED,
    ),
    "eval retry": Page(
        "docs/platform.md",
        [
            ("Continue a failed run", "osmosis eval retry brave-falcon-421"),
            ("In a script", "osmosis eval retry brave-falcon-421 --json"),
        ],
        _REFUSED,
    ),
    "eval download": Page(
        "docs/platform.md",
        [
            ("Download the trajectories", "osmosis eval download brave-falcon-421"),
            ("Download two rows with artifacts", "osmosis eval download brave-falcon-421 --rows 3,7 --type all"),
        ],
        _REFUSED,
    ),
    "eval upload": Page(
        "docs/platform.md",
        [
            ("Upload a run that `osmosis eval run -o runs` wrote", "osmosis eval upload runs/my-run"),
            ("Upload it again after a retry", "osmosis eval upload runs/my-run --replace"),
        ],
        _REFUSED,
    ),
    "platform": Page(
        "docs/platform.md",
        [
            ("Start a platform", "osmosis platform up"),
            ("See what it does", "osmosis platform status"),
        ],
        _REFUSED,
    ),
    "platform up": Page(
        "docs/platform.md",
        [
            ("Start a platform in the background", "osmosis platform up"),
            ("Run four at a time, on another port", "osmosis platform up --max-runs 4 --port 9000"),
        ],
        _REFUSED,
    ),
    "platform down": Page(
        "docs/platform.md",
        [
            ("Stop the platform", "osmosis platform down"),
            ("Stop the one of another folder", "osmosis platform down --data /srv/osmosis"),
        ],
        _REFUSED,
    ),
    "platform status": Page(
        "docs/platform.md",
        [
            ("See if it runs", "osmosis platform status"),
            ("In a script", "osmosis platform status --json"),
        ],
        _REFUSED,
    ),
    "platform open": Page(
        "docs/platform.md",
        [
            ("See the workspace's runs in the browser", "osmosis platform open"),
            ("Print the address, for a browser on another machine", "osmosis platform open --no-open"),
        ],
        _REFUSED,
    ),
    "platform logs": Page(
        "docs/platform.md",
        [
            ("Read the end of the server's log", "osmosis platform logs"),
            ("Read more of it", "osmosis platform logs -n 500"),
        ],
        _REFUSED,
    ),
    "platform backup": Page(
        "docs/platform.md",
        [
            ("Back up everything", "osmosis platform backup platform.tar"),
            ("From another folder", "osmosis platform backup platform.tar --data /srv/osmosis"),
        ],
        _REFUSED,
    ),
    "platform token": Page(
        "docs/platform.md",
        [
            ("Make a token for a colleague", "osmosis platform token create ada"),
            ("List tokens", "osmosis platform token list"),
        ],
        _REFUSED,
    ),
    "platform token create": Page(
        "docs/platform.md",
        [
            ("Make a token", "osmosis platform token create ada"),
            ("Let it expire", "osmosis platform token create ci --days 30 --label nightly"),
        ],
        _REFUSED,
    ),
    "platform token approve": Page(
        "docs/platform.md",
        [
            ("Let Ada's `osmosis auth login` have a token", "osmosis platform token approve BCDF-GHJK ada"),
            ("In a script", "osmosis platform token approve BCDF-GHJK ada --json"),
        ],
        _REFUSED,
    ),
    "platform token list": Page(
        "docs/platform.md",
        [
            ("List tokens", "osmosis platform token list"),
            ("In a script", "osmosis platform token list --json"),
        ],
        _REFUSED,
    ),
    "platform token revoke": Page(
        "docs/platform.md",
        [
            ("Revoke a token", "osmosis platform token revoke 5f0c"),
            ("In a script", "osmosis platform token revoke 5f0c --json"),
        ],
        _REFUSED,
    ),
    "dataset": Page(
        "docs/platform.md",
        [
            ("Upload a dataset", "osmosis dataset upload data/rows.jsonl"),
            ("List datasets", "osmosis dataset list"),
        ],
        _REFUSED,
    ),
    "dataset upload": Page(
        "docs/platform.md",
        [
            ("Upload a dataset", "osmosis dataset upload data/rows.jsonl"),
            ("Replace it", "osmosis dataset upload data/rows.jsonl --overwrite"),
        ],
        _REFUSED,
    ),
    "dataset list": Page(
        "docs/platform.md",
        [
            ("List datasets", "osmosis dataset list"),
            ("Read all from a script", "osmosis dataset list --all --json"),
        ],
        _REFUSED,
    ),
    "dataset info": Page(
        "docs/platform.md",
        [
            ("Show columns and sizes", "osmosis dataset info rows"),
            ("In a script", "osmosis dataset info rows --json"),
        ],
        _REFUSED,
    ),
    "dataset preview": Page(
        "docs/platform.md",
        [
            ("Show the first rows", "osmosis dataset preview rows"),
            ("Show one", "osmosis dataset preview rows --rows 1"),
        ],
        _REFUSED,
    ),
    "dataset download": Page(
        "docs/platform.md",
        [
            ("Download a dataset", "osmosis dataset download rows"),
            ("Download it elsewhere", "osmosis dataset download rows -o data/rows.jsonl"),
        ],
        _REFUSED,
    ),
    "dataset validate": Page(
        "docs/platform.md",
        [
            ("Check a file before its upload", "osmosis dataset validate data/rows.jsonl"),
            ("In a script", "osmosis dataset validate data/rows.jsonl --json"),
        ],
        _REFUSED,
    ),
    "dataset delete": Page(
        "docs/platform.md",
        [
            ("Delete a dataset", "osmosis dataset delete rows"),
            ("Delete it without asking", "osmosis dataset delete rows --yes"),
        ],
        _REFUSED,
    ),
    "secret": Page(
        "docs/platform.md",
        [
            ("Store a key for your runs", "osmosis secret set OPENAI_API_KEY"),
            ("List secrets", "osmosis secret list"),
        ],
        _REFUSED,
    ),
    "secret set": Page(
        "docs/platform.md",
        [
            ("Store a key, which is asked for", "osmosis secret set OPENAI_API_KEY"),
            ("Take it from a variable", "osmosis secret set OPENAI_API_KEY --env OPENAI_API_KEY"),
        ],
        _REFUSED,
    ),
    "secret list": Page(
        "docs/platform.md",
        [
            ("List secrets", "osmosis secret list"),
            ("List those of everybody", "osmosis secret list --scope workspace"),
        ],
        _REFUSED,
    ),
    "secret delete": Page(
        "docs/platform.md",
        [
            ("Delete a secret of yours", "osmosis secret delete OPENAI_API_KEY"),
            ("Delete one of the workspace", "osmosis secret delete OPENAI_API_KEY --scope workspace --yes"),
        ],
        _REFUSED,
    ),
    "model": Page(
        "docs/platform.md",
        [
            ("List the models of the workspace's runs", "osmosis model list"),
            ("In a script", "osmosis model list --json"),
        ],
        _REFUSED,
    ),
    "model list": Page(
        "docs/platform.md",
        [
            ("List the models of the workspace's runs", "osmosis model list"),
            ("In a script", "osmosis model list --json"),
        ],
        _REFUSED,
    ),
    "train": Page(
        "docs/platform.md",
        [
            ("Submit a training run", "osmosis train submit configs/training/my-rollout.toml"),
            ("List training runs", "osmosis train list"),
        ],
        _REFUSED,
    ),
    "train run": Page(
        "docs/training.md",
        [
            ("Is it worth training?", "osmosis train run configs/training/sums.toml --dry"),
            ("Train on this machine", "osmosis train run configs/training/sums.toml --name first"),
            ("Continue after an interruption", "osmosis train run configs/training/sums.toml --resume first"),
        ],
        "the training failed; with --dry, nothing would be learned",
    ),
    "train submit": Page(
        "docs/platform.md",
        [
            ("Submit a training run", "osmosis train submit configs/training/my-rollout.toml"),
            ("Submit it without asking", "osmosis train submit configs/training/my-rollout.toml --yes"),
        ],
        _REFUSED,
    ),
    "train list": Page(
        "docs/platform.md",
        [
            ("List training runs", "osmosis train list"),
            ("Read all from a script", "osmosis train list --all --json"),
        ],
        _REFUSED,
    ),
    "train info": Page(
        "docs/platform.md",
        [
            ("Show a training run", "osmosis train info calm-otter-512"),
            ("In a script", "osmosis train info calm-otter-512 --json"),
        ],
        _REFUSED,
    ),
    "train stop": Page(
        "docs/platform.md",
        [
            ("Stop a training run", "osmosis train stop calm-otter-512"),
            ("Stop it without asking", "osmosis train stop calm-otter-512 --yes"),
        ],
        _REFUSED,
    ),
    "train logs": Page(
        "docs/platform.md",
        [
            ("See what happened last", "osmosis train logs calm-otter-512"),
            ("See more of it", "osmosis train logs calm-otter-512 --limit 200"),
        ],
        _REFUSED,
    ),
    "auth": Page(
        "docs/platform.md",
        [
            ("Log in to a team's platform", "osmosis auth login --platform https://osmosis.example"),
            ("Say who you are", "osmosis auth whoami"),
        ],
        _REFUSED,
    ),
    "auth login": Page(
        "docs/platform.md",
        [
            ("Log in with someone's approval there", "osmosis auth login --platform https://osmosis.example"),
            ("Read the token from a file", "osmosis auth login --token - --platform https://osmosis.example"),
        ],
        _REFUSED,
    ),
    "auth logout": Page(
        "docs/platform.md",
        [
            ("Log out", "osmosis auth logout --platform https://osmosis.example"),
            ("Without asking", "osmosis auth logout --yes --platform https://osmosis.example"),
        ],
        _REFUSED,
    ),
    "auth whoami": Page(
        "docs/platform.md",
        [
            ("Say which platform commands use", "osmosis auth whoami"),
            ("In a script", "osmosis auth whoami --json"),
        ],
        _REFUSED,
    ),
    "doctor": Page(
        "docs/platform.md",
        [
            ("Check the workspace", "osmosis doctor"),
            ("Create what is missing", "osmosis doctor --fix --yes"),
        ],
        _REFUSED,
    ),
}
"""The help page of every command, in the order of a user's work."""


class HelpCommand(TyperCommand):
    """A command whose help is plain text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """A group whose help is plain text and lists its commands in the order of `PAGES`."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = {name: place for place, name in enumerate(PAGES)}
        path = _path(ctx)
        return sorted(super().list_commands(ctx), key=lambda name: order.get(f"{path} {name}".strip(), len(order)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _write(self, ctx, formatter)


def _write(command: Any, ctx: Any, formatter: Any) -> None:
    parameters = [one for one in command.get_params(ctx) if not one.hidden]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    commands = _commands(command, ctx)
    usage = ["[OPTIONS]", *map(_usage, arguments), *(["[COMMAND]"] if commands else [])]
    lines = [f"{_styled('Usage:')} {ctx.command_path} {' '.join(usage)}", "", *_text(command.help, formatter.width)]
    # click 8.3 drops the help of arguments that typer 0.16 sets, so it is read from the declaration.
    declared = get_type_hints(command.callback, include_extras=True) if arguments else {}
    panels: dict[str, list[tuple[str, str]]] = {
        "Arguments": [(one.metavar, _described(one, declared.get(one.name))) for one in arguments],
        "Commands": commands,
    }
    for one in parameters:
        if one.param_type_name == "option":
            # --help itself is click's own option in older versions of typer, and has no panel.
            panel = getattr(one, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append((_flags(one), _described(one)))
    # Panels come first; "Options" has at least --help.
    panels["Options"] = panels.pop("Options")
    for title, rows in panels.items():
        lines += _section(title, rows, formatter.width)
    formatter.write("\n".join([*lines, *_end(_path(ctx), formatter.width)]) + "\n")


def _end(path: str, width: int) -> Iterator[str]:
    # An earlier name has the page of the command that it stands for.
    page = PAGES[COMMANDS.get(path, path)]
    yield from ("", _styled("Examples:"))
    for purpose, line in page.examples:
        yield from (_styled(f"  # {purpose}", dim=True), f"  {line}")
    codes = [("0", "success"), ("1", page.failed), ("2", "could not start"), ("130", "interrupted")]
    yield from _section("Exit codes", [(code, meaning) for code, meaning in codes if meaning], width)
    yield from ("", f"{_styled('More:')} {page.see}")


def _text(text: str, width: int) -> Iterator[str]:
    """Wrap paragraphs; an indented one is code."""
    for number, paragraph in enumerate(text.split("\n\n")):
        yield from [""] if number else []
        yield from [paragraph] if paragraph.startswith(" ") else _wrapped(paragraph, width)


def _section(title: str, rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    if not rows:
        return
    yield from ("", _styled(f"{title}:"))
    first = min(max(len(name) for name, _ in rows), FLAGS_WIDTH)
    for name, text in rows:
        indent = " " * (first + 4)
        wrapped = _wrapped(text, width, indent)
        if len(name) > first:
            yield f"  {name}"
        else:
            wrapped[0] = f"  {name:<{first}}  {wrapped[0].strip()}"
        yield from wrapped


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        # Options such as --eval-fn stay whole, so that they can be copied.
        break_on_hyphens=False,
        break_long_words=False,
    )


def _commands(command: Any, ctx: Any) -> list[tuple[str, str]]:
    if not isinstance(command, HelpGroup):
        return []
    found = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
    return [(name, (one.help or "").split("\n\n")[0]) for name, one in found if one is not None and not one.hidden]


def _path(ctx: Any) -> str:
    """Return the command's name without the program's, such as `runs show`; empty for the root."""
    names = []
    while ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(reversed(names))


def _usage(argument: Any) -> str:
    name = f"{argument.metavar}{'...' if argument.nargs == -1 else ''}"
    return name if argument.required else f"[{name}]"


def _flags(option: Any) -> str:
    if option.secondary_opts:
        return f"--[no-]{option.opts[0].removeprefix('--')}"
    # Short names come first: `-d, --dataset`.
    flags = ", ".join(sorted(option.opts, key=lambda flag: flag.startswith("--")))
    return flags if option.is_flag else f"{flags} {option.metavar}"


def _described(parameter: Any, declared: Any = None) -> str:
    default = parameter.default
    help = parameter.help if declared is None else get_args(declared)[1].help
    if parameter.show_default and default not in (None, False, "", ()) and not callable(default):
        text = f"{default:g}" if isinstance(default, float) else getattr(default, "value", default)
        return f"{help} Default: {text}."
    return str(help)


def _styled(text: str, *, dim: bool | None = None) -> str:
    if os.environ.get("NO_COLOR"):
        return text
    # click removes the styles where there is no terminal.
    return typer.style(text, bold=None if dim else True, dim=dim)
