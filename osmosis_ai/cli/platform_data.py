"""`osmosis dataset`, `secret` and `model`: the datasets, secrets and models of a platform's runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osmosis_ai.cli.help import HelpCommand, HelpGroup
from osmosis_ai.cli.options import Json
from osmosis_ai.cli.platform_session import All, Limit, Plain, PlatformUrl, Session, Yes, platform_session

if TYPE_CHECKING:
    from osmosis_ai.records import JsonObject

__all__ = ["dataset_app", "list_submitted", "model_app", "secret_app"]

CHECK_SECONDS = 3600.0
"""Time limit for the check of an upload, longer than the platform's own."""

dataset_app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Upload datasets to a platform, and inspect them.")
secret_app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="Store secrets on a platform; values stay there.")
model_app = typer.Typer(cls=HelpGroup, no_args_is_help=True, help="List the models of a platform's runs.")
MODEL_TYPES = ("base", "lora")

Name = Annotated[str, typer.Argument(metavar="DATASET", help="The dataset's name or id.")]
File = Annotated[str, typer.Argument(metavar="FILE", help="A .jsonl, .json, .csv or .parquet file.")]
SecretName = Annotated[str, typer.Argument(metavar="NAME", help="Capital letters, digits and underscores.")]
Scope = Annotated[str, typer.Option("--scope", metavar="personal|workspace", help="Who may use the secret.")]


@dataset_app.command(cls=HelpCommand)
def upload(
    context: typer.Context,
    file: File,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the dataset of this name.")] = False,
    yes: Yes = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Upload a dataset, named after the file without its suffix. Every row is checked."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.data.dataset import open_dataset
        from osmosis_ai.folders import given_path
        from osmosis_ai.platform.client import ClientError, quoted

        path = given_path(file, session.cwd)
        # A file that can't be a dataset is refused before the platform hears of it.
        open_dataset(path, bare=True)
        client, size = session.client, path.stat().st_size
        about = {"file_name": path.stem, "file_size": size, "extension": path.suffix.lower().removeprefix(".")}
        try:
            created = client.post("/api/cli/datasets", about)
        except ClientError as error:
            known = error.details.get("existing_dataset_id")
            # The refusal names the dataset that --overwrite replaces.
            if error.code != "CONFLICT" or known is None:
                raise
            if not overwrite:
                raise ClientError(f"{error}; add --overwrite to replace it", error.code, error.details) from None
            created = client.post("/api/cli/datasets", {**about, "overwrite_dataset_id": known})
        instructions = created["upload"]
        with path.open("rb") as stream:
            client.upload(instructions["presigned_url"], stream, size, instructions["upload_headers"])
        complete = f"/api/cli/datasets/{quoted(created['id'])}/complete"
        done = client.post(complete, {"file_extension": about["extension"]}, seconds=CHECK_SECONDS)
        session.operation(
            "dataset.upload",
            f"{done['file_name']} is uploaded: {done['row_count']:,} rows",
            resource=done,
            next_steps=[{"action": "dataset_info", "name": done["file_name"]}],
            hints=[f"osmosis dataset info {done['file_name']}"],
        )


@dataset_app.command("list", cls=HelpCommand)
def list_datasets(
    context: typer.Context,
    limit: Limit = None,
    all: All = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """List the workspace's datasets, newest first."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.cli.tables import Column

        items, page = session.client.pages("/api/cli/datasets", "datasets", limit=None if all else limit or 50)
        columns = [Column("name", "name"), Column("status", "label"), Column("rows"), Column("size")]
        columns += [Column("uploaded", "label"), Column("by", "name")]
        empty = "no datasets yet; upload one with `osmosis dataset upload FILE`"
        session.items(items, columns, _dataset_cells, page["total_count"], empty=empty)


@dataset_app.command(cls=HelpCommand)
def info(
    context: typer.Context, name: Name, json: Json = False, plain: Plain = False, platform: PlatformUrl = None
) -> None:
    """Show a dataset with statistics of its columns."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        found = _dataset(session, name)
        statistics = found.get("statistics") or {"columns": {}}
        lines = [
            ("Name", found["file_name"]),
            ("ID", found["id"]),
            ("Status", found["status"]),
            ("Format", found["file_format"]),
            ("Rows", str(found["row_count"] or "–")),
            ("Size", _size(found["file_size"])),
            ("Uploaded", f"{found['created_at']} by {found['creator_name']}"),
        ]
        for column, figures in statistics["columns"].items():
            longest = f", up to {figures['longest']:,} characters" if "longest" in figures else ""
            lines.append((column, f"{figures['count']:,} of {', '.join(figures['types'])}{longest}"))
        if found["error"]:
            lines.append(("Error", found["error"]))
        session.detail({name: value for name, value in found.items() if name != "data_preview"}, lines)


@dataset_app.command(cls=HelpCommand)
def preview(
    context: typer.Context,
    name: Name,
    rows: Annotated[int, typer.Option("--rows", min=1, max=20, metavar="N", help="Show N rows.")] = 5,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Show a dataset's first rows."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.text import json_text

        found = _dataset(session, name)
        shown = (found.pop("data_preview") or [])[:rows]
        data = {"dataset": found, "rows": shown, "requested_rows": rows, "returned_rows": len(shown)}
        lines = [(f"Row {number}", json_text(row)) for number, row in enumerate(shown)]
        session.detail({**data, "available": bool(shown)}, lines)


@dataset_app.command(cls=HelpCommand)
def download(
    context: typer.Context,
    name: Name,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file or folder. Default: the working directory."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Download a dataset's file as it was uploaded."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.folders import given_path
        from osmosis_ai.platform.client import ClientError, quoted

        found = session.client.get(f"/api/cli/datasets/{quoted(name)}/download")
        target = given_path(output or ".", session.cwd)
        if target.is_dir():
            # The last part only: a server of another party mustn't choose the folder.
            target /= Path(found["file_name"]).name
        if target.exists() and not overwrite:
            raise ClientError(f"{target} exists; add --overwrite to replace it", "CONFLICT")
        session.client.download(found["presigned_url"], target)
        done = {"file": str(target), "size": target.stat().st_size}
        session.operation("dataset.download", f"{target} has {_size(target.stat().st_size)}", resource=done)


@dataset_app.command("validate", cls=HelpCommand)
def validate_file(context: typer.Context, file: File, json: Json = False, plain: Plain = False) -> None:
    """Check a file as an upload does, but without a platform."""
    with platform_session(context, json=json, plain=plain, scoped=False) as session:
        from osmosis_ai.data.dataset import open_dataset
        from osmosis_ai.folders import given_path

        summary = open_dataset(given_path(file, session.cwd), bare=True).check()
        data = {"file": file, "valid": True, "row_count": summary.count, "columns": list(summary.columns)}
        session.detail(data, [("Rows", f"{summary.count:,}"), ("Columns", ", ".join(summary.columns))])


@dataset_app.command(cls=HelpCommand)
def delete(
    context: typer.Context,
    name: Name,
    yes: Yes = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Delete a dataset; runs that were submitted with it keep its file."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        found = _dataset(session, name)
        question, about = f"Delete {found['file_name']}?", [("Rows", str(found["row_count"]))]
        if not session.confirm("dataset.delete", question, about, yes=yes):
            return
        from osmosis_ai.platform.client import quoted

        session.client.delete(f"/api/cli/datasets/{quoted(found['id'])}")
        session.operation("dataset.delete", f"{found['file_name']} is deleted", resource={"name": found["file_name"]})


@secret_app.command("set", cls=HelpCommand)
def set_secret(
    context: typer.Context,
    name: SecretName,
    scope: Scope = "personal",
    env: Annotated[
        str | None, typer.Option("--env", metavar="VAR", help="Take the value from this variable instead of asking.")
    ] = None,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Store a secret, replacing one with the same name and scope. Its value can't be read back."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.platform.client import ClientError

        wire = _wire(scope)
        if env is not None:
            value = os.environ.get(env, "")
            if not value:
                raise ClientError(f"--env {env}: the variable isn't set, or empty")
        elif session.form.json or session.form.plain or not sys.stdin.isatty():
            raise ClientError(
                "can't prompt for the value without a terminal; add --env VAR",
                "INTERACTIVE_REQUIRED",
                {"prompt": f"Value of {name}", "flags": ["--env"]},
            )
        else:
            value = typer.prompt(f"Value of {name}", hide_input=True, err=True)
        # Masked before the request, whose error could repeat it.
        session.session.use(session.workspace.root, keys=[value])
        body = {"name": name, "value": value, "scope": wire}
        stored = session.client.post("/api/cli/environment-secrets", body)
        message = f"{name} is stored ({scope})"
        session.operation("secret.set", message, resource=_secret(stored))


@secret_app.command("list", cls=HelpCommand)
def list_secrets(
    context: typer.Context,
    scope: Annotated[
        str, typer.Option("--scope", metavar="all|personal|workspace", help="Whose secrets to list.")
    ] = "all",
    limit: Limit = None,
    all: All = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """List the names of secrets, without values."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.cli.tables import Column

        items, page = session.client.pages(
            "/api/cli/environment-secrets",
            "environment_secrets",
            limit=None if all else limit or 50,
            scope="all" if scope == "all" else _wire(scope),
        )
        columns = [Column("name", "name"), Column("scope", "label"), Column("updated", "label"), Column("by", "name")]
        session.items(
            [_secret(item) for item in items],
            columns,
            lambda one: [one["name"], one["scope"], one["updated_at"], one["updater_name"]],
            page["total_count"],
            empty="no secrets yet; `osmosis secret set NAME`",
        )


@secret_app.command("delete", cls=HelpCommand)
def delete_secret(
    context: typer.Context,
    name: SecretName,
    scope: Scope = "personal",
    yes: Yes = False,
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """Delete a secret."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        wire = _wire(scope)
        if not session.confirm("secret.delete", f"Delete the {scope} secret {name}?", yes=yes):
            return
        session.client.delete("/api/cli/environment-secrets", {"name": name, "scope": wire})
        session.operation("secret.delete", f"{name} is deleted ({scope})", resource={"name": name, "scope": scope})


@model_app.command("list", cls=HelpCommand)
def list_models(
    context: typer.Context,
    type: Annotated[
        str, typer.Option("--type", metavar="all|base|lora", help="Base models, or trained ones (lora).")
    ] = "all",
    json: Json = False,
    plain: Plain = False,
    platform: PlatformUrl = None,
) -> None:
    """List the models that the workspace's runs have used or trained."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.platform.client import ClientError

        if type not in ("all", *MODEL_TYPES):
            raise ClientError(f"--type {type}: use all, base or lora")
        found = {
            each: session.client.pages(f"/api/cli/models/{each}", "models", limit=None)[0]
            for each in MODEL_TYPES
            if type in ("all", each)
        }
        session.sections(found, "no models yet; runs of `osmosis eval submit` add theirs", "model_name")


def list_submitted(
    context: typer.Context, branch: str | None, *, json: bool, plain: bool, platform: str | None
) -> None:
    """List the submitted rollouts, for `osmosis rollout list --remote`."""
    with platform_session(context, json=json, plain=plain, platform=platform) as session:
        from osmosis_ai.cli.tables import Column

        items, page = session.client.pages("/api/cli/rollouts", "rollouts", limit=None, branch=branch)
        columns = [Column("rollout", "name"), Column("commit", "label"), Column("first submitted", "label")]
        session.items(
            items,
            columns,
            lambda one: [one["name"], (one["last_synced_commit_sha"] or "–")[:12], one["created_at"]],
            page["total_count"],
            empty="no rollouts yet; submit one with `osmosis eval submit`",
        )


def _wire(scope: str) -> str:
    """Return a scope's name in requests."""
    from osmosis_ai.platform.client import ClientError

    if scope not in ("personal", "workspace"):
        raise ClientError(f"--scope {scope}: use personal or workspace")
    return "user" if scope == "personal" else scope


def _secret(item: JsonObject) -> JsonObject:
    return {**item, "scope": "personal" if item["scope"] == "user" else item["scope"]}


def _dataset(session: Session, name: str) -> JsonObject:
    from osmosis_ai.platform.client import quoted

    return session.client.get(f"/api/cli/datasets/{quoted(name)}")


def _dataset_cells(item: JsonObject) -> list[str]:
    rows = "–" if item["row_count"] is None else f"{item['row_count']:,}"
    created = [item["created_at"], item["creator_name"]]
    return [item["file_name"], item["status"], rows, _size(item["file_size"]), *created]


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
