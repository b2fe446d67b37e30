"""Runs: accept a submission after checking its config, dataset and secrets, then record what its job reports."""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from osmosis_ai.platform.accounts import Holder, Workspace
from osmosis_ai.platform.database import Database, Row
from osmosis_ai.platform.datasets import Datasets
from osmosis_ai.platform.errors import ApiError, conflict, invalid, not_found
from osmosis_ai.platform.logs import Logs
from osmosis_ai.platform.names import new_name
from osmosis_ai.platform.orders import JobMessage, Logged, Resolved, Results, Started
from osmosis_ai.platform.paging import Window, iso, now
from osmosis_ai.platform.vault import Vault
from osmosis_ai.records import JsonObject, Record
from osmosis_ai.validate.run_configs import check_document

__all__ = ["TERMINAL", "Kind", "Provided", "Runs", "Submission", "detail", "metrics", "sources_of", "submitted"]

Kind = Literal["eval", "training"]
TERMINAL = ("finished", "failed", "stopped", "crashed", "killed", "unknown")
"""The API's words for an end, of which this platform uses the first three."""
MAX_KEY = 200
"""Characters of an idempotency key."""
SEED_BITS = 31


class Provided(Record, frozen=True):
    """The secrets of a submission: required names, and values for this run only."""

    required: list[str] = []
    provided: dict[str, str] | None = None


class Submission(Record, frozen=True, forbid_unknown_fields=True):
    """A run config as clients send it, table by table."""

    experiment_config: JsonObject
    evaluation_config: JsonObject | None = None
    training_config: JsonObject | None = None
    sampling_config: JsonObject | None = None
    checkpoints_config: JsonObject | None = None
    advanced_config: JsonObject | None = None
    env_config: JsonObject | None = None
    secrets: Provided | None = None

    def document(self) -> JsonObject:
        """Return the run config in the form of its file."""
        tables = {
            "experiment": self.experiment_config,
            "evaluation": self.evaluation_config,
            "training": self.training_config,
            "sampling": self.sampling_config,
            "checkpoints": self.checkpoints_config,
            "advanced": self.advanced_config,
            "env": self.env_config,
            # Older clients omit an empty list.
            "secrets": {"required": [] if self.secrets is None else self.secrets.required},
        }
        return {name: table for name, table in tables.items() if table}


class Runs:
    """The runs of all workspaces."""

    def __init__(self, database: Database, datasets: Datasets, vault: Vault, logs: Logs) -> None:
        self._database = database
        self._datasets = datasets
        self._vault = vault
        self._logs = logs

    def submit(
        self,
        kind: Kind,
        holder: Holder,
        workspace: Workspace,
        submission: Submission,
        key: str | None,
        commit: str | None = None,
    ) -> tuple[Row, bool]:
        """Accept a run, and return its row, and False if the same request was accepted before. Raises ApiError.

        Args:
            kind: `eval` or `training`.
            holder: The user who submits.
            workspace: The run's workspace.
            submission: The request's body.
            key: The idempotency key, if the client sent one.
            commit: The commit of the code, if already resolved.
        """
        # A client that reuses a key for another submission should get an error, not another run's answer.
        digest = hashlib.sha256(msgspec.json.encode([kind, workspace.id, submission])).digest()
        if key is not None:
            if not 0 < len(key) <= MAX_KEY:
                raise invalid(f"Idempotency-Key has 1 to {MAX_KEY} characters", "Idempotency-Key")
            known = self._submitted(holder, key, digest)
            if known is not None:
                return known, False
        document, dataset, provided = self.check(kind, holder, workspace, submission)
        experiment = document["experiment"]
        run_id, at = str(uuid.uuid4()), now()
        values = {
            "id": run_id,
            "workspace": workspace.id,
            "kind": kind,
            "status": "pending" if kind == "eval" else "queued",
            "creator": holder.user_id,
            "model": experiment["model_path"],
            "rollout": experiment["rollout"],
            "dataset": dataset["id"],
            "dataset_name": dataset["name"],
            "dataset_sha256": dataset["sha256"],
            "document": msgspec.json.encode(document).decode(),
            "sources": msgspec.json.encode(sources_of(workspace)).decode(),
            "provided": self._vault.seal(provided),
            "seed": secrets.randbits(SEED_BITS),
            "branch": experiment.get("branch"),
            "commit_sha": commit,
            "created_at": at,
        }
        columns = f"{', '.join(values)}, name"
        try:
            with self._database.write("accepting a run") as db:
                # Names are random, and a workspace may already have a run of this name.
                while True:
                    name = new_name()
                    done = db.execute(
                        f"INSERT INTO runs ({columns}) VALUES ({', '.join('?' * len(values))}, ?) "  # noqa: S608
                        "ON CONFLICT (workspace, kind, name) DO NOTHING",
                        (*values.values(), name),
                    )
                    if done.rowcount:
                        break
                if key is not None:
                    db.execute("INSERT INTO submissions VALUES (?, ?, ?, ?)", (holder.user_id, key, digest, run_id))
                db.execute(
                    "INSERT INTO logs (subject, at, level, step, message) VALUES (?, ?, 'INFO', 'submit', ?)",
                    (run_id, at, f"{name} is queued"),
                )
        except Exception as error:
            # A concurrent request with the same key was accepted first.
            if key is None or not isinstance(error.__cause__, sqlite3.IntegrityError):
                raise
            known = self._submitted(holder, key, digest)
            assert known is not None
            return known, False
        return self.by_id(run_id), True

    def check(
        self, kind: Kind, holder: Holder, workspace: Workspace, submission: Submission
    ) -> tuple[JsonObject, Row, dict[str, str]]:
        """Check a submission, and return its config, dataset and provided secrets; raise ApiError if it isn't valid."""
        document = submission.document()
        self._check(kind, document)
        dataset = self._usable_dataset(workspace, document["experiment"]["dataset"])
        provided = (submission.secrets and submission.secrets.provided) or {}
        self._check_secrets(holder, workspace, document["secrets"]["required"], provided)
        return document, dataset, provided

    def rollouts(self, workspace: Workspace, branch: str | None, window: Window) -> tuple[list[JsonObject], int]:
        """Return a page of the evaluated rollouts, of one branch if given, and their total number."""
        where = "FROM runs WHERE workspace = ?1 AND (?2 IS NULL OR branch = ?2)"
        total = self._database.count(f"SELECT count(DISTINCT rollout) {where}", workspace.id, branch)
        latest = "SELECT l.commit_sha FROM runs AS l WHERE l.workspace = ?1 AND l.rollout = runs.rollout"
        rows = self._database.all(
            "SELECT rollout, min(created_at) AS created_at, "
            f"({latest} AND l.commit_sha IS NOT NULL ORDER BY l.pk DESC LIMIT 1) AS commit_sha "
            f"{where} GROUP BY rollout ORDER BY rollout LIMIT ?3 OFFSET ?4",
            workspace.id,
            branch,
            *window,
        )
        found: list[JsonObject] = [
            {
                "id": row["rollout"],
                "name": row["rollout"],
                "description": None,
                "is_active": True,
                "last_synced_commit_sha": row["commit_sha"],
                "repo_full_name": workspace.identity,
                "created_at": iso(row["created_at"]),
            }
            for row in rows
        ]
        return found, total

    def models(self, workspace: Workspace, window: Window) -> tuple[list[JsonObject], int]:
        """Return a page of the evaluated or trained models, and their total number."""
        total = self._database.count("SELECT count(DISTINCT model) FROM runs WHERE workspace = ?", workspace.id)
        rows = self._database.all(
            "SELECT model, min(created_at) AS created_at FROM runs WHERE workspace = ? GROUP BY model ORDER BY model "
            "LIMIT ? OFFSET ?",
            workspace.id,
            *window,
        )
        found: list[JsonObject] = [
            {
                "id": row["model"],
                "model_name": row["model"],
                "base_model": row["model"],
                "created_at": iso(row["created_at"]),
            }
            for row in rows
        ]
        return found, total

    def listed(self, kind: Kind, workspace: Workspace, window: Window) -> tuple[list[Row], int]:
        """Return a page of runs, newest first, and their total number."""
        total = self._database.count("SELECT count(*) FROM runs WHERE workspace = ? AND kind = ?", workspace.id, kind)
        rows = self._database.all(
            f"{_SELECT} WHERE r.workspace = ? AND r.kind = ? ORDER BY r.pk DESC LIMIT ? OFFSET ?",
            workspace.id,
            kind,
            *window,
        )
        return rows, total

    def find(self, kind: Kind, workspace: Workspace, name: str) -> Row:
        """Return a run by its name or id; raise ApiError."""
        row = self._database.one(
            f"{_SELECT} WHERE r.workspace = ? AND r.kind = ? AND (r.name = ? OR r.id = ?)",
            workspace.id,
            kind,
            name,
            name,
        )
        if row is None:
            command = "eval" if kind == "eval" else "train"
            raise not_found(f"there is no run {name[:100]}; `osmosis {command} list` shows them")
        return row

    def by_id(self, run_id: str) -> Row:
        """Return a run by its id."""
        row = self._database.one(f"{_SELECT} WHERE r.id = ?", run_id)
        if row is None:
            raise not_found("there is no such run")
        return row

    def stop(self, row: Row) -> None:
        """Mark a run as stopping; raise ApiError if it has ended."""
        with self._database.write("stopping a run") as db:
            (status,) = db.execute("SELECT status FROM runs WHERE id = ?", (row["id"],)).fetchone()
            if status in TERMINAL:
                raise conflict(f"the run {row['name']} is {status} already")
            db.execute("UPDATE runs SET stopping = 1 WHERE id = ?", (row["id"],))

    def retry(self, row: Row, provided: Mapping[str, str]) -> int:
        """Put an ended run back into the queue, and return how many rollouts will run; raise ApiError.

        Failed rollouts run again, and those that never ran. `provided` holds secrets for this run only.
        """
        if row["imported"]:
            raise conflict(f"{row['name']} ran elsewhere; run it again there, then use `osmosis eval upload --replace`")
        results = _results(row)
        # Not only failed ones: rollouts that a stopped run never reached count as well.
        left = 0 if results is None else results["total_samples"] - results["graded"]
        # A run that failed or was stopped may have no results yet, and is always worth a retry.
        if row["status"] == "finished" and not left:
            raise conflict(f"every rollout of {row['name']} is graded; there is nothing to retry")
        with self._database.write("retrying a run") as db:
            # The condition on the status makes concurrent retries queue the run once.
            done = db.execute(
                "UPDATE runs SET status = 'pending', stopping = 0, losses = 0, completed_at = NULL, retrying = ?, "
                "provided = ? WHERE id = ? AND status IN ('finished', 'failed', 'stopped')",
                (results is not None, self._vault.seal(provided), row["id"]),
            )
            if not done.rowcount:
                raise conflict(f"the run {row['name']} is {row['status']}; it can be retried once it has ended")
        self._logs.add(row["id"], "INFO", "submit", f"{row['name']} is queued again")
        return int(left)

    def to_do(self, with_training: bool) -> list[Row]:
        """List the runs that need a job, oldest first."""
        return self._database.all(
            f"{_SELECT} WHERE r.status IN ('pending', 'queued', 'running') AND (r.kind = 'eval' OR ?) ORDER BY r.pk",
            with_training,
        )

    def take(self, run_id: str, message: JobMessage) -> None:
        """Record a job's message."""
        if isinstance(message, Logged):
            self._logs.add(run_id, message.level, message.step, message.message, message.details)
        elif isinstance(message, Resolved):
            self._set(run_id, "commit_sha = ?", message.commit)
        elif isinstance(message, Started):
            self._set(
                run_id,
                # A job that continues a run keeps the start of the first one.
                "status = 'running', row_numbers = ?, started_at = coalesce(started_at, ?)",
                message.row_numbers,
                now(),
            )
        elif isinstance(message, Results):
            # After progress, losses count from zero: only a job that dies again and again without progress is given up.
            self._set(run_id, "results = ?, losses = 0", msgspec.json.encode(message.results).decode())
        else:
            self.end(run_id, message.status)

    def end(self, run_id: str, status: str) -> None:
        """Record a run's end, unless it has already ended, and delete the secrets provided for it."""
        with self._database.write("ending a run") as db:
            db.execute(
                "UPDATE runs SET status = ?, completed_at = ?, provided = NULL "
                "WHERE id = ? AND status IN ('pending', 'queued', 'running')",
                (status, now(), run_id),
            )

    def lost(self, run_id: str) -> int:
        """Count a job that died without reporting an end; return how often that has happened without progress."""
        self._set(run_id, "losses = losses + 1")
        return int(self.by_id(run_id)["losses"])

    def secrets_for(self, row: Row) -> tuple[dict[str, str], dict[str, str]]:
        """Return the values of a run's secrets and each one's scope, and record the scopes."""
        names = msgspec.json.decode(row["document"])["secrets"]["required"]
        provided = self._vault.unseal(row["provided"])
        stored = [name for name in names if name not in provided]
        found = self._vault.scopes(row["creator"], row["workspace"], stored)
        scopes = {**dict.fromkeys(provided, "provided"), **{name: scope for name, scope in found.items() if scope}}
        self._set(row["id"], "scopes = ?", msgspec.json.encode(scopes).decode())
        return {**self._vault.values(row["creator"], row["workspace"], stored), **provided}, scopes

    def _set(self, run_id: str, assignments: str, *values: object) -> None:
        with self._database.write("changing a run") as db:
            db.execute(f"UPDATE runs SET {assignments} WHERE id = ?", (*values, run_id))  # noqa: S608

    def _submitted(self, holder: Holder, key: str, digest: bytes) -> Row | None:
        known = self._database.one("SELECT * FROM submissions WHERE user = ? AND key = ?", holder.user_id, key)
        if known is None:
            return None
        if known["digest"] != digest:
            raise conflict("this Idempotency-Key was used for another submission; use a new one")
        return self.by_id(known["run"])

    def _check(self, kind: Kind, document: JsonObject) -> None:
        found = check_document(document, kind)
        issues: list[Mapping[str, str]] = [
            {"key": each.subject or "", "message": f"{each.message}{f'. {each.hint}' if each.hint else ''}"}
            for each in found
        ]
        if issues:
            raise invalid(f"Invalid {kind} config:", None, issues)

    def _usable_dataset(self, workspace: Workspace, name: str) -> Row:
        dataset = self._datasets.find(workspace, name)
        if dataset["status"] != "uploaded":
            raise invalid(f"the dataset {name} is {dataset['status']}; upload it first", "experiment.dataset")
        return dataset

    def _check_secrets(
        self, holder: Holder, workspace: Workspace, required: Sequence[str], provided: Mapping[str, str]
    ) -> None:
        strangers = [name for name in provided if name not in required]
        if strangers:
            raise invalid(f"values are provided for {', '.join(strangers)}, which [secrets] doesn't require", "secrets")
        scopes = self._vault.scopes(holder.user_id, workspace.id, required)
        missing = [name for name, scope in scopes.items() if scope is None and name not in provided]
        if missing:
            # Released clients recognise the error by this prefix.
            raise ApiError(404, f"Secret(s) not found: {', '.join(missing)}", "NOT_FOUND")


_SELECT = "SELECT r.*, u.name AS creator_name, u.email AS creator_email FROM runs r JOIN users u ON u.id = r.creator"


def sources_of(workspace: Workspace) -> list[str]:
    """Return the places to fetch a workspace's code from."""
    # Released clients send only owner/repo, which is always on GitHub.
    known = [source for source in (workspace.remote, workspace.path) if source]
    return known or [f"https://github.com/{workspace.identity}"]


def submitted(row: Row) -> JsonObject:
    """Return an accepted run in the API's format."""
    return {"id": row["id"], "name": row["name"], "status": _status(row), "created_at": iso(row["created_at"])}


def detail(row: Row) -> JsonObject:
    """Return a run in the API's format, with its config and results."""
    document = msgspec.json.decode(row["document"])
    experiment = document["experiment"]
    evaluation = row["kind"] == "eval"
    shown = {**_run(row), **({} if evaluation else _training(row))}
    return {
        "eval_run" if evaluation else "training_run": shown,
        "config": {
            **experiment,
            **document.get("evaluation", {}),
            **document.get("training", {}),
            **document.get("sampling", {}),
            **document.get("checkpoints", {}),
            "required_secrets": document["secrets"]["required"],
            "advanced": document.get("advanced", {}),
            "seed": row["seed"],
            "row_numbers": row["row_numbers"],
        },
        "results": _results(row),
        "model": {"id": row["model"], "name": row["model"]},
        "dataset": {"id": row["dataset"], "name": row["dataset_name"], "sha256": row["dataset_sha256"]},
        "rollout": {"id": row["rollout"], "name": row["rollout"]},
        "entrypoint": experiment["entrypoint"],
        "branch": row["branch"],
        "commit_sha": row["commit_sha"] or experiment.get("commit_sha"),
        "env_config": document.get("env", {}),
        "resolved_secret_scopes": None if row["scopes"] is None else msgspec.json.decode(row["scopes"]),
        "dataset_df_stats": None,
        "is_internal_user": False,
    }


def duration_ms(row: Row) -> int:
    """Return how long a run has taken so far, in milliseconds."""
    began: float = row["started_at"] or row["created_at"]
    ended: float = row["completed_at"] or now()
    # The clock may have been set back.
    return round(max(0.0, ended - began) * 1000)


def metrics(row: Row) -> JsonObject:
    """Return a run's metrics in the API's format; raise ApiError if there are none yet."""
    results = _results(row)
    if results is None:
        raise not_found(f"the run {row['name']} has no results yet")
    stats = results["reward_stats"]
    names = ("graded", "passed", "failed", "skipped", "pass_rate", "pass_threshold", "total_samples")
    return {
        "status": _status(row),
        "overview": {
            **{name: results[name] for name in names},
            "duration_ms": duration_ms(row),
            "completed_samples": results["total_runs"],
            "tokens_used": results["total_tokens"],
        },
        "reward_stats": None
        if stats is None
        else {name: stats[name] for name in ("mean", "median", "std", "min", "max")},
        "pass_at_k": []
        if stats is None
        else [{"k": int(k), "value": value} for k, value in stats["pass_at_k"].items()],
    }


def _run(row: Row) -> JsonObject:
    return {
        "id": row["id"],
        "name": row["name"],
        "status": _status(row),
        **{name: iso(row[name]) for name in ("created_at", "started_at", "completed_at")},
        "creator_name": row["creator_name"],
        "creator_email": row["creator_email"],
    }


def _training(row: Row) -> JsonObject:
    names = {f"{each}_{what}": row[each] for each in ("model", "dataset", "rollout") for what in ("id", "name")}
    return {**names, "dataset_name": row["dataset_name"], "notes": None}


def listed(row: Row) -> JsonObject:
    """Return a run in the format of the API's lists."""
    return {
        **_run(row),
        "model": {"id": row["model"], "name": row["model"], "model_name": row["model"]},
        "dataset": {"id": row["dataset"], "name": row["dataset_name"], "file_name": row["dataset_name"]},
        "rollout": {"id": row["rollout"], "name": row["rollout"]},
        "results": _results(row),
        "config": {"model_path": row["model"]},
    }


def _results(row: Row) -> JsonObject | None:
    return None if row["results"] is None else msgspec.json.decode(row["results"], type=dict)


def _status(row: Row) -> str:
    return str(row["status"])
