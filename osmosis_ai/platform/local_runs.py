"""Upload local evaluations: hash the files that `osmosis eval run` wrote, and send those that are missing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from osmosis_ai.platform.client import Client, ClientError
from osmosis_ai.records import JsonObject

__all__ = ["LocalRunFiles", "read_local_run", "upload_local_run"]

FILES = ("index.jsonl", "progress.json", "metrics.json", "summary.jsonl", "logs.txt")
FOLDERS = ("trajectories", "artifacts")
BATCH = 100
"""Files per request for URLs, the platform's limit."""
PARALLEL = 8
FINALIZE_SECONDS = 300
"""Time limit for the platform to read every result and arrange the files."""
IMPORTS = "/api/cli/eval-runs/imports"


class LocalRunFiles(NamedTuple):
    """The folder of a finished run, and the request that announces its files."""

    request: JsonObject
    files: Mapping[str, Path]


def read_local_run(folder: Path) -> LocalRunFiles:
    """Read and hash a finished run; raise ClientError."""
    manifest_data, manifest = _json(folder, "manifest.json")
    _, metrics = _json(folder, "metrics.json")
    run, inputs = metrics.get("eval_run", {}), manifest.get("inputs", {})
    if run.get("status") != "finished":
        raise ClientError(f"{folder} isn't finished: continue the run with `osmosis eval run`, then upload it")
    files = {name: folder / name for name in FILES if (folder / name).is_file()}
    for each in FOLDERS:
        # A symbolic link may lead to a file that isn't part of the run.
        found = (path for path in (folder / each).rglob("*") if path.is_file() and not path.is_symlink())
        files |= {path.relative_to(folder).as_posix(): path for path in found}
    try:
        hashed = [{"path": name, "size": path.stat().st_size, "sha256": _hash(path)} for name, path in files.items()]
    except OSError as error:
        raise ClientError(f"{error.filename} can't be read: {error.strerror}") from None
    entrypoint = Path(inputs.get("rollout server", {}).get("rollout") or "main.py").name
    request = {
        "schema_version": 1,
        "local_run_id": run.get("id"),
        "manifest_digest": hashlib.sha256(manifest_data).hexdigest(),
        "run": {
            "name": run.get("name") or run.get("id"),
            "started_at": run.get("started_at"),
            "completed_at": run.get("completed_at"),
            "experiment_config": {
                "rollout": {"name": run.get("rollout_name")},
                "entrypoint": entrypoint,
                "model_path": run.get("model_name"),
                "dataset": {"name": run.get("dataset_name"), "sha256": str(inputs.get("dataset", ""))},
            },
            "evaluation_config": {
                "n": metrics["summary"].get("n_runs", 1),
                "pass_threshold": metrics["summary"]["pass_threshold"],
            },
        },
        "provenance": {"osmosis_ai": manifest.get("provenance", {}).get("osmosis_ai")},
        "files": hashed,
    }
    return LocalRunFiles(request, files)


def upload_local_run(client: Client, run: LocalRunFiles, *, replace: bool) -> JsonObject:
    """Upload the files that the platform lacks, and return the finished import; raise OsmosisError."""
    state = client.post(IMPORTS, {**run.request, "reimport": replace})
    session = f"{IMPORTS}/{state['session_id']}"
    missing = [file["path"] for file in state["files"] if file["state"] == "pending"]

    def send(wanted: JsonObject) -> None:
        upload, path = wanted["upload"], str(wanted["path"])
        with run.files[path].open("rb") as stream:
            client.upload(upload["presigned_url"], stream, wanted["size"], upload["upload_headers"])
        client.post(f"{session}/uploads/complete", {"path": path})

    with ThreadPoolExecutor(PARALLEL) as pool:
        for start in range(0, len(missing), BATCH):
            batch = client.post(f"{session}/uploads", {"paths": missing[start : start + BATCH]})
            # Iterating raises the first error of an upload.
            list(pool.map(send, batch["files"]))
    return client.post(f"{session}/finalize", {}, seconds=FINALIZE_SECONDS)


def _json(folder: Path, name: str) -> tuple[bytes, JsonObject]:
    try:
        data = (folder / name).read_bytes()
        return data, msgspec.json.decode(data, type=dict)
    except (OSError, msgspec.DecodeError):
        raise ClientError(
            f"{folder} isn't the folder of a local run: it has no {name}, or one that can't be read; "
            "`osmosis eval run -o DIR` writes such folders"
        ) from None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
