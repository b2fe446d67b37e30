"""Encode a rollout's results for controllers: answers to polls, and callbacks in both forms."""

from __future__ import annotations

from collections.abc import Mapping

from osmosis_ai.records import JsonObject
from osmosis_ai.rollout.types import (
    ExecutionResult,
    GraderStatus,
    RolloutInitRequest,
    RolloutSample,
    RolloutStatus,
)
from osmosis_ai.wire_json import encode_json

__all__ = ["completion_body", "grader_body", "result_body", "reward_of"]


def _samples_of(result: ExecutionResult, rollout_id: str) -> dict[str, RolloutSample]:
    """Return the samples of a result by id; a single sample without an id gets the rollout's id."""
    if result.samples or result.sample is None:
        return result.samples
    return {result.sample.id or rollout_id: result.sample}


def result_body(rollout_id: str, result: ExecutionResult) -> bytes:
    """Encode a RolloutResultResponse with a terminal status."""
    body = {"rollout_id": rollout_id, "status": result.status, **_error(result)}
    return _with_samples(body, result, rollout_id, by_id=False)


def completion_body(rollout_id: str, request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    """Encode a RolloutCompleteRequest."""
    status = result.status
    if status is RolloutStatus.CANCELLED and request.is_routed_by_body:
        # SDK 0.2 doesn't know the status "cancelled".
        status = RolloutStatus.FAILURE
    return encode_json({"status": status, "rollout_id": rollout_id, "extra_fields": None, **_error(result)})


def grader_body(rollout_id: str, request: RolloutInitRequest, result: ExecutionResult) -> bytes:
    """Encode a GraderCompleteRequest: with `samples` for controllers of SDK 0.2, else with `sample`."""
    status = GraderStatus.SUCCESS if result.status is RolloutStatus.SUCCESS else GraderStatus.FAILURE
    body = {"rollout_id": rollout_id, "status": status, **_error(result)}
    return _with_samples(body, result, rollout_id, by_id=request.is_routed_by_body)


def reward_of(result: ExecutionResult) -> float | None:
    """Return the reward of a result as it is sent; None if it has none."""
    succeeded = result.status is RolloutStatus.SUCCESS
    samples = _samples_of(result, "").items()
    sent = _one({name: _plain(sample, succeeded, {"id", "reward", "remove_sample"}) for name, sample in samples})
    return sent["reward"] if sent else None


def _error(result: ExecutionResult) -> JsonObject:
    message = result.err_message
    error: JsonObject = {"err_message": message, "err_category": result.err_category}
    if message is not None:
        # A lone surrogate, from a file name for example, can't be sent.
        error["err_message"] = message.encode("utf-8", "replace").decode()
    location = (result.extra_fields or {}).get("location")
    return {**error, "err_location": location} if location else error


def _with_samples(body: JsonObject, result: ExecutionResult, rollout_id: str, *, by_id: bool) -> bytes:
    """Encode a body with a result's samples, or with just their rewards if JSON can't hold the messages."""
    samples = _samples_of(result, rollout_id)
    succeeded = result.status is RolloutStatus.SUCCESS
    for fields in (None, {"id", "label", "reward", "remove_sample"}):
        try:
            plain = {name: _plain(sample, succeeded, fields) for name, sample in samples.items()}
            if by_id:
                # Those controllers need the id inside, too.
                return encode_json({**body, "samples": {name: {**each, "id": name} for name, each in plain.items()}})
            several = {"samples": plain} if len(plain) > 1 else {}
            return encode_json({**body, "sample": _one(plain), **several})
        except (ValueError, TypeError, RecursionError):
            if fields is not None:
                raise
    raise AssertionError


def _plain(sample: RolloutSample, succeeded: bool, fields: set[str] | None) -> JsonObject:
    plain = sample.json_safe_copy().model_dump(include=fields, exclude={"trajectory_messages"})
    if plain["id"] is None:
        del plain["id"]
    if not succeeded or sample.remove_sample:
        # Trainers use any reward in the body, so leave it out for samples that don't count.
        plain["reward"] = None
    return plain


def _one(samples: Mapping[str, JsonObject]) -> JsonObject | None:
    """Return the sample for controllers that take only one: the first, with the mean reward of those kept."""
    if len(samples) <= 1:
        return next(iter(samples.values()), None)
    rewards = [sample["reward"] for sample in samples.values() if sample["reward"] is not None]
    return {
        **next(iter(samples.values())),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "remove_sample": all(sample["remove_sample"] for sample in samples.values()),
    }
