"""`osmosis eval submit|list|info|…` and `osmosis train …`: runs of a platform."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json
from osmosis_ai.cli.platform_session import All, Limit, Plain, PlatformUrl, Session, Yes, platform_session
from osmosis_ai.cli.session import ExitCode
from osmosis_ai.cli.train import list_local, print_local_log, run_training, show_local

if TYPE_CHECKING:
    from osmosis_ai.platform.configs import RunConfigFile
    from osmosis_ai.records import JsonObject
    from osmosis_ai.validate.run_configs import Kind

__all__ = ["add_eval_commands", "train_app"]

_MANY = {"eval": "eval-runs", "training": "training-runs"}
ENDED = ("finished", "failed", "stopped")
ALL_TYPES = "metrics,trajectories,artifacts,logs,index"
"""The values of `types` in the API; `all` is this command's own."""
RECONNECTS = 60
"""Attempts to follow a run again, a second apart, which outlast a restart of the server."""
MAX_UNASKED_BYTES = 100 << 20
"""Size from which a download asks first."""
BATCH = 500
"""Files per request for URLs, the most that platforms allow."""

train_app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Train a model, here or on a platform.")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The run config, relative to the workspace.")]
Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name or id.")]
SecretsFile = Annotated[
    str | None,
    typer.Option(
        "--secrets-file", metavar="FILE", help="Send secrets from this dotenv file for this run only; - is stdin."
    ),
]
Snapshot = Annotated[bool, typer.Option("--snapshot", help="Submit the working tree as it is, committed or not.")]
Lines = Annotated[int, typer.Option("--limit", min=1, max=200, metavar="N", help="Print N entries.")]
Local = Annotated[
    bool, typer.Option("--local", help="Use the runs of `train run` in this repository's store, not a platform's.")
]
Cursor = Annotated[str | None, typer.Option("--cursor", metavar="CURSOR", help="Print the entries before this cursor.")]


def submit_eval(
    context: typer.Context,
    config: Config,
    yes: Yes = False,
    secrets_file: SecretsFile = None,
    snapshot: Snapshot = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the run to its end; exit with 1 if it fails or is stopped.")
    ] = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Submit an evaluation to the platform, which runs it from a clone of this workspace."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        run = _submit(session, "eval", config, secrets_file, yes=yes, snapshot=snapshot, quiet=wait)
        if run is None or not wait:
            return
        try:
            shown = _follow(session, run["name"])
        except KeyboardInterrupt:
            session.warn(f"{run['name']} keeps running; stop it with `osmosis eval stop {run['name']}`")
            raise
        session.detail(*_eval_detail(shown))
        status = shown["eval_run"]["status"]
    raise typer.Exit(ExitCode.OK if status == "finished" else ExitCode.FAILED)


def list_evals(
    context: typer.Context,
    limit: Limit = None,
    all: All = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """List the workspace's evaluations on the platform, newest first."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.cli.tables import Column

        items, page = _listed(session, "/api/cli/eval-runs", "eval_runs", limit, all=all)
        found = [_with_summary(item) for item in items]
        columns = [Column(title, kind) for title, kind in _COLUMNS]
        session.items(
            found,
            columns,
            _eval_cells,
            page["total_count"],
            empty="no evaluations yet; submit one with `osmosis eval submit`",
        )


def show_eval(
    context: typer.Context, name: Name, json: Json = False, plain: Plain = False, platform: PlatformUrl = None
) -> None:
    """Show an evaluation on the platform: its state, config and results."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        session.detail(*_eval_detail(session.client.get(_path("eval", name))))


def retry_eval(
    context: typer.Context,
    name: Name,
    secrets_file: SecretsFile = None,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Run an evaluation's failed and missing rollouts again, and keep the graded ones."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        client = session.client
        shown = client.get(_path("eval", name))
        provided = _provided_secrets(session, shown["config"]["required_secrets"], secrets_file)
        run = client.post(_path("eval", name, "retry"), {"secrets": provided})
        done = {"name": run["name"], "retryable_samples": run["retryable_samples"]}
        session.operation("eval.retry", f"{run['name']} is queued again", resource=done)


def download_eval(
    context: typer.Context,
    name: Name,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="DIR", help="The folder. Default: .osmosis/evals/RUN.")
    ] = None,
    types: Annotated[
        str, typer.Option("--type", metavar="TYPES", help="metrics, trajectories, artifacts, logs, or all.")
    ] = "metrics,trajectories",
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="ROWS", help="Trajectories and artifacts of these rows: 3,7,10-20.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Download files again that already exist.")] = False,
    yes: Yes = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Download an evaluation's metrics, trajectories, artifacts and logs."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.folders import given_path

        client = session.client
        run = client.get(_path("eval", name))["eval_run"]
        folder = given_path(output, session.cwd) if output else session.workspace.root / ".osmosis/evals" / run["name"]
        wanted_types = ALL_TYPES if types == "all" else f"{types},index"
        manifest = client.get(_path("eval", run["id"], "samples/manifest"), types=wanted_types, rows=rows)
        wanted = [file for file in manifest["files"] if overwrite or not _is_there(folder, file)]
        size = sum(file["size"] for file in wanted)
        if size > MAX_UNASKED_BYTES:
            question = f"Download {size / 1e6:,.0f} MB into {folder}?"
            if not session.confirm("eval.download", question, [("Files", str(len(wanted)))], yes=yes):
                return
        for start in range(0, len(wanted), BATCH):
            body = {"items": [{"path": file["path"]} for file in wanted[start : start + BATCH]]}
            for item in client.post(_path("eval", run["id"], "samples/download-urls"), body)["items"]:
                target = _target(folder, item["path"])
                target.parent.mkdir(parents=True, exist_ok=True)
                client.download(item["url"], target)
        here = len(manifest["files"]) - len(wanted)
        already = f"; {here} already existed" if here else ""
        message = f"{len(wanted)} files of {size / 1e6:,.1f} MB are in {folder}{already}"
        done = {"name": run["name"], "output_path": str(folder), "files": len(wanted), "size": size}
        session.operation("eval.download", message, resource=done)


def upload_eval(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or its name in .osmosis/evals.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace an earlier upload of this run, after `eval run --retry-failed`.")
    ] = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Upload a finished local evaluation; the platform recomputes its results."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.folders import given_path
        from osmosis_ai.platform.local_runs import read_local_run, upload_local_run

        folder = given_path(run, session.cwd)
        if not folder.is_dir() and Path(run).name == run:
            folder = session.workspace.root / ".osmosis/evals" / run
        local = read_local_run(folder)
        done = upload_local_run(session.client, local, replace=replace)
        name = done["eval_run_name"]
        about = {field: value for field, value in done.items() if field != "files"}
        session.operation(
            "eval.upload",
            f"uploaded {name}: {len(local.files)} files",
            resource={**about, "local_run_id": local.request["local_run_id"], "local_run_path": str(folder)},
            next_steps=[{"action": "eval_info", "name": name}],
            hints=[f"osmosis eval info {name}"],
        )


def submit_training(
    context: typer.Context,
    config: Config,
    yes: Yes = False,
    secrets_file: SecretsFile = None,
    snapshot: Snapshot = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Check a training config, and submit it to the platform's trainer."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        _submit(session, "training", config, secrets_file, yes=yes, snapshot=snapshot, quiet=False)


def list_trainings(
    context: typer.Context,
    limit: Limit = None,
    all: All = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
    local: Local = False,
) -> None:
    """List the workspace's training runs on the platform, newest first."""
    with platform_session(context, json=json, plain=plain, platform=platform, scoped=not local) as session:
        if local:
            list_local(session)
            return
        from osmosis_ai.cli.tables import Column

        items, page = _listed(session, "/api/cli/training-runs", "training_runs", limit, all=all)
        columns = [Column(title, kind) for title, kind in _COLUMNS]
        session.items(items, columns, _training_cells, page["total_count"], empty="no training runs yet")


def show_training(
    context: typer.Context,
    name: Name,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
    local: Local = False,
) -> None:
    """Show a training run on the platform."""
    with platform_session(context, json=json, plain=plain, platform=platform, scoped=not local) as session:
        if local:
            show_local(session, name)
            return
        from osmosis_ai.platform.client import ClientError

        shown = session.client.get(_path("training", name))
        run = shown["training_run"]
        shown |= session.client.get(_path("training", name, "checkpoints"))
        try:
            shown["metrics"] = session.client.get(_path("training", name, "metrics"))
        except ClientError as error:
            # Other trainers than `osmosis train run` report no metrics.
            if error.code != "NOT_FOUND":
                raise
            shown["metrics"] = None
        lines = [("Name", run["name"]), ("Status", run["status"]), ("Model", shown["model"]["name"])]
        if run["current_step"] is not None:
            lines += [("Steps", f"{run['current_step']} of {run['total_steps']}"), ("Reward", _reward(run["reward"]))]
        lines += [(f"Checkpoint {each['checkpoint_step']}", each["checkpoint_name"]) for each in shown["checkpoints"]]
        session.detail(shown, lines)


def log_of_eval(
    context: typer.Context,
    name: Name,
    limit: Lines = 50,
    cursor: Cursor = None,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Print the end of a run's log, oldest entry first."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        _print_log(session, "eval", name, limit, cursor)


def log_of_training(
    context: typer.Context,
    name: Name,
    limit: Lines = 50,
    cursor: Cursor = None,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
    local: Local = False,
) -> None:
    """Print the end of a run's log, oldest entry first."""
    with platform_session(context, json=json, plain=plain, platform=platform, scoped=not local) as session:
        if local:
            print_local_log(session, name, limit)
        else:
            _print_log(session, "training", name, limit, cursor)


def _print_log(session: Session, kind: Kind, name: str, limit: int, cursor: str | None) -> None:
    from osmosis_ai.cli.tables import Column

    page = session.client.get(_path(kind, name, "logs"), limit=limit, cursor=cursor, direction="older")
    columns = [Column("time", "label"), Column("level", "label"), Column("step", "label"), Column("", "text")]
    further = {"next_cursor": page["next_cursor"], "has_more": page["next_cursor"] is not None}
    entries = page["logs"]
    session.items(entries, columns, _log_cells, len(entries), more=further, empty="nothing is logged yet")


def _stop(kind: Kind) -> Callable[..., None]:
    def stop(
        context: typer.Context,
        name: Name,
        yes: Yes = False,
        json: Json = False,
        plain: Plain = False,
        platform: PlatformUrl = None,
    ) -> None:
        """Stop a run; recorded results are kept."""
        with platform_session(context, json=json, plain=plain, platform=platform) as session:
            operation = f"{_command(kind)}.stop"
            client = session.client
            if not session.confirm(operation, f"Stop {name}?", [("Run", name)], yes=yes):
                return
            client.post(_path(kind, name, "stop"), {})
            session.operation(operation, f"{name} is stopping", resource={"name": name})

    return stop


def add_eval_commands(app: typer.Typer) -> None:
    """Add the platform's commands to `osmosis eval`."""
    commands: dict[str, Callable[..., None]] = {
        "submit": submit_eval,
        "list": list_evals,
        "info": show_eval,
        "stop": _stop("eval"),
        "retry": retry_eval,
        "logs": log_of_eval,
        "download": download_eval,
        "upload": upload_eval,
    }
    for name, command in commands.items():
        app.command(name, cls=HelpCommand)(command)


_TRAIN_COMMANDS: Mapping[str, Callable[..., None]] = {
    "run": run_training,
    "submit": submit_training,
    "list": list_trainings,
    "info": show_training,
    "stop": _stop("training"),
    "logs": log_of_training,
}
for _name, _function in _TRAIN_COMMANDS.items():
    train_app.command(_name, cls=HelpCommand)(_function)


def _submit(
    session: Session, kind: Kind, text: str, secrets_file: str | None, *, yes: bool, snapshot: bool, quiet: bool
) -> JsonObject | None:
    """Submit a config and print what was submitted; return the run, or None if the user declined."""
    from osmosis_ai.platform import workspace as workspaces
    from osmosis_ai.platform.client import ClientError
    from osmosis_ai.platform.configs import read_config

    workspace, command = session.workspace, _command(kind)
    # Before the client, because a config's errors should show without a platform too.
    config = read_config(text, kind, workspace.root)
    try:
        client = session.client
    except ClientError as error:
        raise _with_hint(error, kind, text) from None
    provided = _provided_secrets(session, config.secrets, secrets_file)
    if not snapshot:
        for note in workspaces.git_notes(workspace, pinned=config.pinned):
            session.warn(note, "GIT")
    question = f"Submit this to {client.server.url}?"
    if not session.confirm(f"{command}.submit", question, _summary(config, provided), yes=yes):
        return None
    # Only once confirmed, because it writes a commit to the repository.
    commit = workspaces.snapshot(workspace) if snapshot else None
    body = config.submission(provided, commit)
    try:
        # With the key, a request that something on the way repeats starts one run.
        run = client.post(f"/api/cli/{_MANY[kind]}", body, key=str(uuid.uuid4()))
    except ClientError as error:
        raise _with_hint(error, kind, text) from None
    if quiet:
        session.output.say(f"submitted {run['name']}")
        return run
    experiment = body["experiment_config"]
    shown = {
        **run,
        "model_name": experiment["model_path"],
        "dataset_name": experiment["dataset"],
        "config": {
            "rollout": experiment["rollout"],
            "entrypoint": experiment["entrypoint"],
            "model": experiment["model_path"],
            "dataset": experiment["dataset"],
            "branch": experiment.get("branch"),
            "commit_sha": experiment.get("commit_sha"),
        },
    }
    steps = [{"action": f"{command}_info", "name": run["name"]}, {"action": f"{command}_list"}]
    hints = [f"osmosis {command} info {run['name']}", f"osmosis {command} logs {run['name']}"]
    if url := run.get("platform_url"):
        shown["url"] = url
        steps.append({"action": "open_url", "url": url})
        hints.append(f"{url} (let the browser in first with `osmosis platform open`)")
    session.operation(f"{command}.submit", f"submitted {run['name']}", resource=shown, next_steps=steps, hints=hints)
    return run


def _provided_secrets(session: Session, names: Sequence[str], file: str | None) -> dict[str, str]:
    """Return the secrets in a file, and mask them in all further output; raise ClientError."""
    from osmosis_ai.platform.configs import provided_secrets

    stdin: Any = sys.stdin
    provided = provided_secrets(names, file, session.cwd, stdin)
    # `use` makes a new masker, which must know the token again.
    session.session.use(session.workspace.root, keys=[*provided.values(), session.client.server.token or ""])
    return provided


def _with_hint(error: Any, kind: Kind, text: str) -> Exception:
    """Return a client's error with a hint on what to do instead."""
    from osmosis_ai.platform.client import ClientError

    message = str(error)
    if error.code == "PLATFORM_ERROR" and kind == "eval":
        message = f"{message}; `osmosis eval run {text}` evaluates on this machine, without a platform"
    # The platform's prefix, which released clients look for too.
    if missing := message.partition("Secret(s) not found: ")[2]:
        names = missing.split(", ")
        message = f"{message}; store {'it' if len(names) == 1 else 'each'} with `osmosis secret set {names[0]}`"
    return ClientError(message, error.code, error.details)


def _summary(config: RunConfigFile, provided: dict[str, str]) -> list[tuple[str, str]]:
    experiment = config.document["experiment"]
    lines = [
        ("Rollout", experiment["rollout"]),
        ("Entrypoint", experiment["entrypoint"]),
        ("Model", experiment["model_path"]),
        ("Dataset", experiment["dataset"]),
        ("Branch", experiment.get("branch", "")),
        ("Commit", experiment.get("commit_sha", "")),
        ("Env", ", ".join(f"{name}={value}" for name, value in config.document.get("env", {}).items())),
        ("Secrets", ", ".join(f"{name} (provided)" if name in provided else name for name in config.secrets)),
    ]
    return [(label, value) for label, value in lines if value]


def _follow(session: Session, name: str) -> JsonObject:
    """Print a run's log and results live until it ends, and return the run."""
    from osmosis_ai.platform.client import ClientError

    client, since, failures = session.client, 0, 0
    while True:
        try:
            for event_id, kind, data in client.events(_path("eval", name, "events"), since):
                failures = 0
                since = int(event_id) if event_id else since
                if kind == "log":
                    session.output.say(f"{data['step']}: {data['message']}")
                elif data.get("results"):
                    session.output.say(_progress(data["results"]))
            # The stream also ends when the server stops, and then the run hasn't.
            shown: JsonObject = client.get(_path("eval", name))
        except ClientError as error:
            # The server may be restarting; the run continues meanwhile, and `since` resumes the stream.
            failures += 1
            if error.code != "PLATFORM_ERROR" or failures > RECONNECTS:
                raise
            time.sleep(1)
            continue
        if shown["eval_run"]["status"] in ENDED:
            return shown


def _progress(results: JsonObject) -> str:
    passed = "" if results["pass_rate"] is None else f", {_pass_rate(results)} passed"
    cost = "" if results["cost_usd"] is None else f", ${results['cost_usd']:.4f}"
    return f"{results['total_runs']}/{results['total_samples']} rollouts{passed}{cost}"


def _pass_rate(results: JsonObject) -> str:
    interval = results["pass_rate_interval"]
    shown = "" if interval is None else f" (95 % CI {interval[0]:.1%} to {interval[1]:.1%})"
    return f"{results['pass_rate']:.1%}{shown}"


def _listed(
    session: Session, path: str, name: str, limit: int | None, *, all: bool
) -> tuple[list[JsonObject], JsonObject]:
    from osmosis_ai.platform.client import ClientError

    if all and limit is not None:
        raise ClientError("--all lists everything; leave out --limit")
    return session.client.pages(path, name, limit=None if all else limit or 50)


def _with_summary(item: JsonObject) -> JsonObject:
    summary = _summary_of(item.get("results"))
    names = {name: (item.get(name) or {}).get("name") for name in ("model", "dataset", "rollout")}
    return {**item, **names, "summary": summary}


def _summary_of(results: JsonObject | None) -> JsonObject | None:
    if results is None:
        return None
    done, total = results["total_runs"], results["total_samples"]
    names = (
        "pass_rate",
        "pass_rate_interval",
        "graded",
        "passed",
        "failed",
        "skipped",
        "pass_threshold",
        "total_tokens",
        "resumed_count",
    )
    return {
        "avg_reward": results["score"],
        **{name: results[name] for name in names},
        "dataset_rows": results["total_dataset_rows"],
        "progress": {"completed": done, "total": total, "fraction": done / total if total else None},
    }


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("name", "label"),
    ("status", "label"),
    ("rollout", "name"),
    ("reward", "figure"),
    ("submitted", "label"),
    ("by", "name"),
)


def _eval_cells(item: JsonObject) -> list[str]:
    reward = (item["summary"] or {}).get("avg_reward")
    shown = "–" if reward is None else f"{reward:.2f}"
    return [item["name"], item["status"], item["rollout"], shown, item["created_at"], item["creator_name"]]


def _training_cells(item: JsonObject) -> list[str]:
    return [
        item["name"],
        item["status"],
        item["rollout"]["name"],
        _reward(item["reward"]),
        item["created_at"],
        item["creator_name"],
    ]


def _reward(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _log_cells(entry: JsonObject) -> list[str]:
    return [entry["timestamp"], entry["level"], entry["step"], entry["message"]]


def _eval_detail(shown: JsonObject) -> tuple[JsonObject, list[tuple[str, str]]]:
    """Return an evaluation's data for `--json`, and its lines for the terminal."""
    run, results = shown["eval_run"], shown["results"]
    summary = _summary_of(results)
    lines = [
        ("Name", run["name"]),
        ("ID", run["id"]),
        ("Status", run["status"]),
        ("Model", shown["model"]["name"]),
        ("Rollout", f"{shown['rollout']['name']}/{shown['entrypoint']}"),
        ("Dataset", shown["dataset"]["name"]),
        ("Commit", (shown["commit_sha"] or "–")[:12]),
        ("Submitted", f"{run['created_at']} by {run['creator_name']}"),
    ]
    scopes = shown["resolved_secret_scopes"]
    if scopes:
        lines.append(("Secrets", ", ".join(f"{name} ({scope})" for name, scope in scopes.items())))
    if summary is not None:
        lines += _result_lines(results)
    if url := shown.get("platform_url"):
        lines.append(("Page", url))
    if run["status"] == "failed":
        lines.append(("Why", f"osmosis eval logs {run['name']}"))
    elif run["status"] not in ENDED:
        lines.append(("Stop it", f"osmosis eval stop {run['name']}"))
    return {**shown, "summary": summary}, lines


def _result_lines(results: JsonObject) -> list[tuple[str, str]]:
    stats = results["reward_stats"]
    rate = "–" if results["pass_rate"] is None else _pass_rate(results)
    lines = [
        ("Progress", f"{results['total_runs']} of {results['total_samples']} rollouts"),
        ("Pass rate", f"{rate}, with a reward of at least {results['pass_threshold']:g}"),
        ("Counts", ", ".join(f"{results[name]} {name}" for name in ("graded", "passed", "failed", "skipped"))),
        ("Tokens", f"{results['total_tokens']:,}"),
    ]
    if results["cost_usd"] is not None:
        lines.append(("Cost", f"${results['cost_usd']:.4f}"))
    if stats is not None:
        lines.append(("Reward", ", ".join(f"{name} {stats[name]:.3f}" for name in ("mean", "std", "min", "max"))))
        lines.append(("Pass@k", ", ".join(f"{k}: {value:.3f}" for k, value in stats["pass_at_k"].items())))
    return lines


def _is_there(folder: Path, file: JsonObject) -> bool:
    path, size = folder / str(file["path"]), int(file["size"])
    return path.is_file() and path.stat().st_size == size


def _target(folder: Path, name: str) -> Path:
    from osmosis_ai.platform.client import ClientError

    target = folder / name
    # The platform may be another party's server: its names must not write elsewhere.
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ClientError(f"the platform names a file outside the folder: {name}", "PLATFORM_ERROR")
    return target


def _command(kind: Kind) -> str:
    return "eval" if kind == "eval" else "train"


def _path(kind: Kind, name: str, rest: str = "") -> str:
    from osmosis_ai.platform.client import quoted

    return f"/api/cli/{_MANY[kind]}/{quoted(name)}{f'/{rest}' if rest else ''}"
