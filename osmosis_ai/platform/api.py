"""The API's routes and their handlers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from osmosis_ai import __version__
from osmosis_ai.errors import RepositoryError
from osmosis_ai.platform import requests, runs
from osmosis_ai.platform.accounts import Accounts, Workspace
from osmosis_ai.platform.database import Row
from osmosis_ai.platform.datasets import Datasets
from osmosis_ai.platform.errors import ApiError, conflict, invalid, not_found
from osmosis_ai.platform.home import Home
from osmosis_ai.platform.imports import ImportedEval, Imports
from osmosis_ai.platform.logs import Logs, entry
from osmosis_ai.platform.openapi import describe
from osmosis_ai.platform.pages import PagesAccess, page_path
from osmosis_ai.platform.paging import iso, page, window
from osmosis_ai.platform.queue import job_variables
from osmosis_ai.platform.repositories import Revision, has_file, resolve
from osmosis_ai.platform.requests import MAX_BODY, Call, Handler, answer, answer_stranger, error_response, json_response
from osmosis_ai.platform.runs import TERMINAL, Kind, Runs, Submission
from osmosis_ai.platform.trainings import checkpoints, progress, training_metrics
from osmosis_ai.platform.vault import Cipher, Vault
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.row_numbers import RowNumbers

__all__ = ["Api", "Operation"]

SIGNED_SECONDS = 3600
"""Validity of a signed URL: the time to begin its transfer."""
MAX_URLS = 500
MAX_IMPORT_URLS = 100
"""Files of one request for URLs, the most that released clients ask for: to download from, and to upload to."""
MAX_IMPORT_BODY = 16 << 20
"""An import announces every file, up to `imports.MAX_FILES`, in one body."""
EVENT_SECONDS = 15.0
"""An idle event stream sends a comment this often, because clients and proxies give up on a silent connection."""
RESOLVE_SECONDS = 25.0
"""Less than the 30 s that clients wait for an answer."""


class Device(Record, frozen=True):
    """A client that wants a token."""

    name: str = msgspec.field(default="a device", name="deviceName")


class DeviceCode(Record, frozen=True):
    """The code of a pending login."""

    device_code: str


class NewDataset(Record, frozen=True):
    """An announced upload."""

    file_name: str
    file_size: int
    extension: str
    overwrite_dataset_id: str | None = None


class NewSecret(Record, frozen=True):
    """A secret's value."""

    name: str
    value: str
    scope: str = "user"


class NamedSecret(Record, frozen=True):
    """A secret to delete."""

    name: str
    scope: str = "user"


class Retry(Record, frozen=True):
    """The secrets provided for the run, sent again because the platform doesn't keep them after its end."""

    secrets: dict[str, str] = {}


class WantedFile(Record, frozen=True):
    """A file of a run."""

    path: str


class WantedFiles(Record, frozen=True):
    """Files of a run to download."""

    items: list[WantedFile]


class ImportedPaths(Record, frozen=True):
    """Files of a local run."""

    paths: list[str]


class ImportedPath(Record, frozen=True):
    """A file of a local run."""

    path: str


class Operation(NamedTuple):
    """One route: its summary, and the body that it takes."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[Record] | None = None
    status: int = 200
    scoped: bool = True
    max_body: int = MAX_BODY


class Api:
    """The application's parts, and the handlers of its routes.

    The handlers call `wake` after a submission and `stop` to stop a running run; `changes` waits for a run's next
    change.
    """

    def __init__(
        self,
        home: Home,
        accounts: Accounts,
        cipher: Cipher,
        vault: Vault,
        datasets: Datasets,
        runs: Runs,
        imports: Imports,
        logs: Logs,
        pages: PagesAccess,
        *,
        has_trainer: bool,
        wake: Callable[[], None],
        stop: Callable[[str], None],
        changes: Callable[[str], anyio.Event],
        stopping: Callable[[], bool],
    ) -> None:
        self._home = home
        self._accounts = accounts
        self._cipher = cipher
        self._vault = vault
        self._datasets = datasets
        self._runs = runs
        self._imports = imports
        self._logs = logs
        self._pages = pages
        self._has_trainer = has_trainer
        self._wake = wake
        self._stop = stop
        self._changes = changes
        self._stopping = stopping
        self.operations = [
            *self._account_operations(),
            *self._data_operations(),
            *self._import_operations(),
            *self._run_operations(),
        ]

    def routes(self) -> list[Route]:
        """Return the routes of the application."""
        found = [
            Route(each.path, self._endpoint(each), methods=[each.method], name=f"{each.method} {each.path}")
            for each in self.operations
        ]
        signed = [
            Route("/api/files/datasets/{id}", self._upload, methods=["PUT"]),
            Route("/api/files/datasets/{id}", self._download_dataset, methods=["GET"]),
            Route("/api/files/imports/{id}/{number:int}", self._upload_import, methods=["PUT"]),
            Route("/api/files/runs/{id}/{path:path}", self._download_file, methods=["GET"]),
        ]
        return [
            Route("/health", self._health, methods=["GET"]),
            # For clients without a token yet.
            Route("/api/cli/device/authorize", self._begin_login, methods=["POST"]),
            Route("/api/cli/device/token", self._finish_login, methods=["POST"]),
            Route("/api/openapi.json", self._describe, methods=["GET"]),
            *found,
            Route("/api/cli/eval-runs/{name}/events", self._events, methods=["GET"]),
            *signed,
        ]

    def _endpoint(self, operation: Operation) -> Callable[..., object]:
        def handler(call: Call) -> JsonObject | Response:
            if operation.scoped:
                # Every scoped route requires a valid workspace, even if its handler doesn't use it.
                _ = call.workspace
            return operation.handler(call)

        async def endpoint(request: Request) -> Response:
            return await answer(request, self._accounts, handler, operation.status, operation.max_body)

        return endpoint

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok", "version": __version__})

    async def _describe(self, request: Request) -> Response:
        return json_response(describe(self.operations))

    # Accounts

    def _account_operations(self) -> list[Operation]:
        return [
            Operation("GET", "/api/cli/verify", self._verify, "Say whose token this is.", scoped=False),
            Operation("DELETE", "/api/cli/tokens/{id}", self._revoke, "Revoke a token of one's own.", scoped=False),
            Operation("GET", "/api/cli/workspaces", self._workspaces, "List the workspaces.", scoped=False),
            Operation("POST", "/api/cli/pages", self._open_pages, "Get a URL that lets a browser see the runs."),
        ]

    async def _begin_login(self, request: Request) -> Response:
        origin = str(request.base_url).rstrip("/")

        def begin(asked: Device) -> JsonObject:
            return {**self._accounts.begin_login(asked.name), "verification_uri": f"{origin}/"}

        return await answer_stranger(request, Device, begin)

    async def _finish_login(self, request: Request) -> Response:
        def finish(asked: DeviceCode) -> JsonObject:
            token, holder = self._accounts.finish_login(asked.device_code)
            user = {"id": holder.user_id, "email": holder.email, "name": holder.name}
            return {"token": token, "token_id": holder.token_id, "expires_at": iso(holder.expires_at), "user": user}

        return await answer_stranger(request, DeviceCode, finish)

    def _verify(self, call: Call) -> JsonObject:
        holder = call.holder
        workspace = None
        if requests.IDENTITY in call.request.headers:
            found = call.workspace
            # There are no roles: every user may work in every workspace.
            workspace = {"id": found.id, "name": found.identity, "role": "admin"}
        return {
            "token_id": holder.token_id,
            "user": {"id": holder.user_id, "email": holder.email, "name": holder.name},
            "expires_at": iso(holder.expires_at),
            "workspace": workspace,
        }

    def _revoke(self, call: Call) -> JsonObject:
        if not self._accounts.revoke(call.named("id"), owner=call.holder.user_id):
            raise not_found("you have no such token")
        return {}

    def _workspaces(self, call: Call) -> JsonObject:
        return {"workspaces": self._accounts.workspaces()}

    def _open_pages(self, call: Call) -> JsonObject:
        ticket = self._pages.ticket(call.holder, call.workspace)
        return {"url": f"{call.origin}/?{urlencode({'token': ticket})}", "token": ticket}

    # Datasets and secrets

    def _data_operations(self) -> list[Operation]:
        one, secret = "/api/cli/datasets/{name}", "/api/cli/environment-secrets"
        return [
            Operation("POST", "/api/cli/datasets", self._create_dataset, "Announce an upload.", NewDataset, 201),
            Operation("GET", "/api/cli/datasets", self._list_datasets, "List datasets."),
            Operation("GET", one, self._show_dataset, "Show a dataset with its first rows."),
            Operation("DELETE", one, self._delete_dataset, "Delete a dataset."),
            Operation("POST", f"{one}/complete", self._complete_dataset, "Check an upload, and make it a dataset."),
            Operation("POST", f"{one}/abort", self._abort_dataset, "Give up an upload."),
            Operation("GET", f"{one}/download", self._dataset_url, "Get a URL to download a dataset from."),
            Operation("GET", f"{one}/logs", self._dataset_logs, "Read a dataset's log."),
            Operation("GET", secret, self._list_secrets, "List the names of secrets."),
            Operation("POST", secret, self._set_secret, "Store a secret.", NewSecret),
            Operation("DELETE", secret, self._delete_secret, "Delete a secret.", NamedSecret),
        ]

    def _create_dataset(self, call: Call) -> JsonObject:
        asked = call.read(NewDataset)
        row = self._datasets.create(
            call.holder, call.workspace, asked.file_name, asked.extension, asked.file_size, asked.overwrite_dataset_id
        )
        return {**self._datasets.item(row), "upload": self._put_to(call, f"/api/files/datasets/{row['id']}")}

    def _put_to(self, call: Call, path: str) -> JsonObject:
        """Return how a client uploads a file."""
        return {
            "method": "simple",
            # Clients of version 0.2 require this field but ignore it.
            "s3_key": path.rpartition("/")[2],
            "presigned_url": self._signed(call.origin, "PUT", path),
            "upload_headers": {"Content-Type": "application/octet-stream"},
            "expires_in": SIGNED_SECONDS,
        }

    def _list_datasets(self, call: Call) -> JsonObject:
        return self._datasets.listed(call.workspace, window(call.query))

    def _show_dataset(self, call: Call) -> JsonObject:
        return self._datasets.detail(self._datasets.find(call.workspace, call.named()))

    def _delete_dataset(self, call: Call) -> JsonObject:
        self._datasets.delete(call.workspace, call.named())
        return {}

    def _complete_dataset(self, call: Call) -> JsonObject:
        return self._datasets.item(self._datasets.complete(call.workspace, call.named()))

    def _abort_dataset(self, call: Call) -> JsonObject:
        self._datasets.abort(call.workspace, call.named())
        return {}

    def _dataset_url(self, call: Call) -> JsonObject:
        row = self._datasets.find(call.workspace, call.named())
        if row["status"] != "uploaded":
            raise conflict(f"the dataset {row['name']} is {row['status']}; upload it first")
        _, name = self._datasets.file(row["id"])
        url = self._signed(call.origin, "GET", f"/api/files/datasets/{row['id']}")
        return {"presigned_url": url, "expires_in": SIGNED_SECONDS, "file_name": name}

    def _dataset_logs(self, call: Call) -> JsonObject:
        return self._logs.page(self._datasets.find(call.workspace, call.named())["id"], call.query)

    def _list_secrets(self, call: Call) -> JsonObject:
        scope = call.query.get("scope", "all")
        return self._vault.listed(call.holder, call.workspace, scope, window(call.query))

    def _set_secret(self, call: Call) -> JsonObject:
        asked = call.read(NewSecret)
        return self._vault.set(call.holder, call.workspace, asked.name, asked.value, asked.scope)

    def _delete_secret(self, call: Call) -> JsonObject:
        asked = call.read(NamedSecret)
        self._vault.delete(call.holder, call.workspace, asked.name, asked.scope)
        return {}

    # Imported runs

    def _import_operations(self) -> list[Operation]:
        many = "/api/cli/eval-runs/imports"
        one = f"{many}/{{id}}"
        return [
            Operation(
                "POST", many, self._start_import, "Begin to upload a local run.", ImportedEval, max_body=MAX_IMPORT_BODY
            ),
            Operation("POST", f"{one}/uploads", self._import_urls, "Get URLs to upload files to.", ImportedPaths),
            Operation("POST", f"{one}/uploads/complete", self._complete_import, "Note an uploaded file.", ImportedPath),
            Operation("POST", f"{one}/finalize", self._finalize_import, "Make a run of the uploaded files."),
        ]

    def _start_import(self, call: Call) -> JsonObject:
        return self._import_state(call, self._imports.start(call.holder, call.workspace, call.read(ImportedEval)))

    def _import_urls(self, call: Call) -> JsonObject:
        row = self._imports.find(call.workspace, call.named("id"))
        paths = call.read(ImportedPaths).paths
        if not 0 < len(paths) <= MAX_IMPORT_URLS:
            raise invalid(f"from 1 to {MAX_IMPORT_URLS} files at a time", "paths")
        files = [
            {**msgspec.structs.asdict(file), "upload": self._put_to(call, f"/api/files/imports/{row['id']}/{number}")}
            for number, file in self._imports.missing(row, paths)
        ]
        return {"files": files}

    def _complete_import(self, call: Call) -> JsonObject:
        row = self._imports.find(call.workspace, call.named("id"))
        path = call.read(ImportedPath).path
        if self._imports.missing(row, [path]):
            raise conflict(f"nothing was uploaded for {path} yet")
        return {}

    def _finalize_import(self, call: Call) -> JsonObject:
        row = self._imports.find(call.workspace, call.named("id"))
        self._imports.finalize(call.workspace, row)
        return self._import_state(call, self._imports.find(call.workspace, row["id"]))

    def _import_state(self, call: Call, row: Row) -> JsonObject:
        state = self._imports.state(row)
        if not row["finalized"]:
            return state
        run = self._runs.by_id(row["run"])
        return {**state, "eval_run_id": run["id"], "eval_run_name": run["name"], **self._page(call, run)}

    # Runs

    def _run_operations(self) -> list[Operation]:
        found: list[Operation] = []
        kinds: tuple[tuple[Kind, str, str], ...] = (
            ("eval", "/api/cli/eval-runs", "evaluation"),
            ("training", "/api/cli/training-runs", "training run"),
        )
        for kind, many, word in kinds:
            one = f"{many}/{{name}}"
            found += [
                Operation("GET", many, partial(self._list_runs, kind), f"List {word}s."),
                Operation("GET", one, partial(self._show_run, kind), f"Show a {word}."),
                Operation("GET", f"{one}/logs", partial(self._run_logs, kind), f"Read the log of a {word}."),
                Operation("GET", f"{one}/metrics", partial(self._run_metrics, kind), f"Show the figures of a {word}."),
                Operation("POST", f"{one}/stop", partial(self._stop_run, kind), f"Stop a {word}."),
            ]
        evaluations, one = "/api/cli/eval-runs", "/api/cli/eval-runs/{name}"
        return [
            *found,
            Operation("POST", evaluations, self._submit_eval, "Submit an evaluation.", Submission, 201),
            Operation(
                "POST", "/api/cli/training-runs", self._submit_training, "Submit a training run.", Submission, 201
            ),
            Operation("POST", f"{one}/retry", self._retry_run, "Run again what failed, and what is left.", Retry),
            Operation("GET", f"{one}/samples/manifest", self._manifest, "List an evaluation's files."),
            Operation("POST", f"{one}/samples/download-urls", self._file_urls, "Get URLs of files.", WantedFiles),
            Operation("GET", "/api/cli/training-runs/{name}/checkpoints", self._checkpoints, "List checkpoints."),
            Operation("GET", "/api/cli/rollouts", self._list_rollouts, "List the rollouts that were evaluated."),
            Operation("GET", "/api/cli/models/base", self._list_models, "List the models that were used."),
            Operation("GET", "/api/cli/models/lora", self._list_trained, "List trained models."),
        ]

    def _submit_eval(self, call: Call) -> Response:
        asked = call.read(Submission)
        key = call.request.headers.get("Idempotency-Key")
        row, is_new = self._runs.submit("eval", call.holder, call.workspace, asked, key)
        self._wake()
        return json_response({**runs.submitted(row), **self._page(call, row)}, 201 if is_new else 200)

    def _submit_training(self, call: Call) -> Response:
        asked = call.read(Submission)
        document, _, _ = self._runs.check("training", call.holder, call.workspace, asked)
        commit = self._frozen_commit(call.workspace, document)
        # Only after the checks, so that a config can be tried before there is a trainer.
        if not self._has_trainer:
            raise ApiError(
                409,
                "no trainer is configured on this platform: everything is valid, but there is nothing to run it; "
                "`osmosis platform up --trainer COMMAND` names one",
                "TRAINER_REQUIRED",
            )
        key = call.request.headers.get("Idempotency-Key")
        row, is_new = self._runs.submit("training", call.holder, call.workspace, asked, key, commit)
        self._wake()
        return json_response(runs.submitted(row), 201 if is_new else 200)

    def _frozen_commit(self, workspace: Workspace, document: JsonObject) -> str:
        """Return the commit of a training run's code, which has its rollout; raise ApiError."""
        experiment = document["experiment"]
        revision = Revision(experiment.get("commit_sha"), experiment.get("branch"))
        repository, environ = self._home.repository(workspace.id), job_variables()
        entrypoint = f"rollouts/{experiment['rollout']}/{experiment['entrypoint']}"
        try:
            commit, _ = resolve(revision, runs.sources_of(workspace), repository, environ, seconds=RESOLVE_SECONDS)
            is_there = has_file(repository, commit, entrypoint, environ)
        except RepositoryError as error:
            raise invalid(f"the code can't be fetched: {error}", "experiment") from None
        if not is_there:
            raise invalid(f"commit {commit[:12]} has no {entrypoint}", "experiment.entrypoint")
        return commit

    def _list_runs(self, kind: Kind, call: Call) -> JsonObject:
        found, total = self._runs.listed(kind, call.workspace, window(call.query))
        shown = [runs.listed(row) | (progress(row, self._store(row)) if kind == "training" else {}) for row in found]
        return page("eval_runs" if kind == "eval" else "training_runs", shown, total, window(call.query))

    def _show_run(self, kind: Kind, call: Call) -> JsonObject:
        row = self._run(kind, call)
        shown = {**runs.detail(row), **self._page(call, row)}
        if kind == "training":
            shown["training_run"] |= progress(row, self._store(row))
        return shown

    def _page(self, call: Call, row: Row) -> JsonObject:
        """Return the URL of a run's page, which exists once the run has started."""
        if row["kind"] != "eval":
            return {}
        is_shown = row["started_at"] and not row["imported"]
        path = page_path(call.workspace.identity, row["name"] if is_shown else None)
        return {"platform_url": f"{call.origin}{path}"}

    def _run_logs(self, kind: Kind, call: Call) -> JsonObject:
        return self._logs.page(self._run(kind, call)["id"], call.query)

    def _run_metrics(self, kind: Kind, call: Call) -> JsonObject:
        row = self._run(kind, call)
        return training_metrics(row, self._store(row)) if kind == "training" else runs.metrics(row)

    def _store(self, row: Row) -> Path:
        """Return the folder of a run's store."""
        return self._home.store(row["workspace"])

    def _stop_run(self, kind: Kind, call: Call) -> JsonObject:
        row = self._run(kind, call)
        self._runs.stop(row)
        self._stop(row["id"])
        return runs.submitted(self._runs.by_id(row["id"]))

    def _retry_run(self, call: Call) -> JsonObject:
        row = self._run("eval", call)
        again = self._runs.retry(row, call.read(Retry).secrets)
        self._wake()
        return {**runs.submitted(self._runs.by_id(row["id"])), "workflow_id": row["id"], "retryable_samples": again}

    def _checkpoints(self, call: Call) -> JsonObject:
        row = self._run("training", call)
        return {"training_run_name": row["name"], "checkpoints": checkpoints(row, self._store(row))}

    def _list_rollouts(self, call: Call) -> JsonObject:
        found, total = self._runs.rollouts(call.workspace, call.query.get("branch"), window(call.query))
        return page("rollouts", found, total, window(call.query))

    def _list_models(self, call: Call) -> JsonObject:
        found, total = self._runs.models(call.workspace, window(call.query))
        return page("models", found, total, window(call.query))

    def _list_trained(self, call: Call) -> JsonObject:
        return page("models", [], 0, window(call.query))

    def _manifest(self, call: Call) -> JsonObject:
        folder = self._files(self._run("eval", call))
        types = set(call.query.get("types", "metrics,trajectories").split(","))
        rows = call.query.get("rows")
        try:
            wanted = None if not rows else RowNumbers(rows)
        except ValueError as error:
            raise invalid(f"rows: {error}", "rows") from None
        files = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            # A run's code writes artifacts, and a link could lead to the platform's key.
            if path.is_file() and not path.is_symlink() and _is_wanted(name, types, wanted):
                files.append({"path": name, "size": path.stat().st_size})
        return {"files": files, "totals": {"files": len(files), "size": sum(file["size"] for file in files)}}

    def _file_urls(self, call: Call) -> JsonObject:
        row = self._run("eval", call)
        folder = self._files(row)
        asked = call.read(WantedFiles).items
        if not 0 < len(asked) <= MAX_URLS:
            raise invalid(f"from 1 to {MAX_URLS} files at a time", "items")
        for wanted in asked:
            _inside(folder, wanted.path)
        urls = [
            {
                "path": wanted.path,
                "url": self._signed(call.origin, "GET", f"/api/files/runs/{row['id']}/{quote(wanted.path)}"),
            }
            for wanted in asked
        ]
        return {"items": urls, "expires_in": SIGNED_SECONDS}

    def _run(self, kind: Kind, call: Call) -> Row:
        return self._runs.find(kind, call.workspace, call.named())

    def _files(self, row: Row) -> Path:
        folder = self._home.run(row["id"]) / "files" / str(row["name"])
        if not folder.is_dir():
            raise conflict(f"the run {row['name']} is {row['status']}; its files are available once it has ended")
        return folder

    # Signed URLs: the signature authorizes the request

    def _signed(self, origin: str, method: str, path: str) -> str:
        expires = int(time.time()) + SIGNED_SECONDS
        signature = self._cipher.sign(f"{method} {path} {expires}")
        return f"{origin}{path}?{urlencode({'expires': expires, 'signature': signature})}"

    def _check_signature(self, request: Request) -> None:
        # The server has decoded the path, and the signature is of the encoded one.
        path = quote(request.scope["path"])
        expires = request.query_params.get("expires", "")
        expected = self._cipher.sign(f"{request.method} {path} {expires}")
        if not requests.same(expected, request.query_params.get("signature", "")):
            raise ApiError(403, "this URL isn't signed by the platform", "SIGNATURE_INVALID")
        # The signature has shown that this is the platform's own number.
        if int(expires) < time.time():
            raise ApiError(403, "this URL has expired", "SIGNATURE_EXPIRED")

    async def _upload(self, request: Request) -> Response:
        return await self._received(request, lambda of: self._datasets.receive(of["id"], request.stream()))

    async def _upload_import(self, request: Request) -> Response:
        return await self._received(request, lambda of: self._imports.receive(of["id"], of["number"], request.stream()))

    async def _received(self, request: Request, receive: Callable[[dict[str, Any]], Awaitable[str]]) -> Response:
        try:
            self._check_signature(request)
            digest = await receive(request.path_params)
        except Exception as error:  # noqa: BLE001 - every request has an answer
            return error_response(error)
        return Response(status_code=200, headers={"ETag": f'"{digest}"'})

    def _download_dataset(self, request: Request) -> Response:
        try:
            self._check_signature(request)
            path, name = self._datasets.file(request.path_params["id"])
            return FileResponse(path, filename=name, media_type="application/octet-stream")
        except Exception as error:  # noqa: BLE001 - every request has an answer
            return error_response(error)

    def _download_file(self, request: Request) -> Response:
        try:
            self._check_signature(request)
            run_id = request.path_params["id"]
            folder = self._files(self._runs.by_id(run_id))
            path = _inside(folder, request.path_params["path"])
            # As a download: a browser mustn't run a rollout's HTML as a page of the platform.
            return FileResponse(path, filename=path.name, media_type="application/octet-stream")
        except Exception as error:  # noqa: BLE001 - every request has an answer
            return error_response(error)

    # Events

    async def _events(self, request: Request) -> Response:
        def find(call: Call) -> JsonObject:
            return {"id": self._run("eval", call)["id"]}

        found = await answer(request, self._accounts, find)
        if found.status_code != 200:
            return found
        run_id = msgspec.json.decode(found.body)["id"]
        since = request.headers.get("last-event-id") or request.query_params.get("since", "0")
        # SQLite's integers have at most 19 digits.
        cursor = int(since) if since.isascii() and since.isdecimal() and len(since) <= 16 else 0
        return StreamingResponse(self._stream(run_id, cursor), media_type="text/event-stream")

    async def _stream(self, run_id: str, cursor: int) -> AsyncIterator[str]:
        """Yield a run's log entries after `cursor`, and its state after each change, until the run ends."""
        yield "retry: 1000\n\n"
        before = b""
        while not self._stopping():
            # Before the run is read, so that a change in between isn't missed.
            change = self._changes(run_id)
            row = await anyio.to_thread.run_sync(self._runs.by_id, run_id)
            while entries := await anyio.to_thread.run_sync(self._logs.after, run_id, cursor):
                for each in entries:
                    cursor = each["pk"]
                    yield f"id: {cursor}\nevent: log\ndata: {msgspec.json.encode(entry(each)).decode()}\n\n"
            shown = runs.detail(row)
            state = msgspec.json.encode({**shown["eval_run"], "results": shown["results"]})
            if state != before:
                before = state
                yield f"event: run\ndata: {state.decode()}\n\n"
            if row["status"] in TERMINAL:
                return
            with anyio.move_on_after(EVENT_SECONDS):
                await change.wait()
                continue
            yield ": still here\n\n"


_TYPES = {
    "metrics.json": "metrics",
    "summary.jsonl": "trajectories",
    "index.jsonl": "index",
    "logs.txt": "logs",
}


def _inside(folder: Path, name: str) -> Path:
    """Return the file with this name in a folder; raise ApiError if there is none or the name leads outside."""
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()) or not path.is_file() or path.is_symlink():
        raise not_found(f"there is no file {name[:200]!r}")
    return path


def _is_wanted(name: str, types: set[str], rows: RowNumbers | None) -> bool:
    folder = name.partition("/")[0]
    # Released clients reject a whole list that has a file of an unknown type.
    kind = _TYPES.get(name, folder)
    if kind not in types:
        return False
    if rows is None or folder not in ("trajectories", "artifacts"):
        return True
    number = name.partition("/row_")[2].partition("_")[0]
    return number.isdecimal() and int(number) in rows
