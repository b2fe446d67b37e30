"""The client of the runtime, which runs and scores the rollouts and records the training run."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from osmosis_trainer_trl.errors import ProtocolError, Stopped

Token = Annotated[int, Meta(ge=0)]


class Sample(msgspec.Struct, frozen=True):
    """A rollout as tokens. `mask` is 1 for tokens that the policy sampled, 0 for tool results and the chat template."""

    rollout_id: str | None
    prompt_ids: list[Token]
    completion_ids: list[Token]
    mask: list[Literal[0, 1]]
    logprobs: list[float | None] | None
    reward: float | None
    left_out: str | None = None

    @property
    def scored(self) -> bool:
        return self.reward is not None and self.left_out is None


class Group(msgspec.Struct, frozen=True):
    row: int
    samples: list[Sample]


class Batch(msgspec.Struct, frozen=True):
    step: int
    groups: list[Group]
    metrics: dict[str, float | None] = {}


class Evaluation(msgspec.Struct, frozen=True):
    step: int
    reward: float | None
    metrics: dict[str, float | None] = {}


class Nothing(msgspec.Struct, frozen=True):
    pass


class _Refusal(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


Answer = TypeVar("Answer", Batch, Evaluation, Nothing)


class Runtime:
    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._token = token
        # The runtime is on this machine, which HTTP_PROXY in the environment mustn't change.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def batch(self, step: int, rows: list[int], samples: int, policy_url: str) -> list[Sample]:
        """Return the scored rollouts of a step in the order of `rows`, once all of them have ended."""
        body = {"step": step, "rows": rows, "samples": samples, "policy_url": policy_url}
        batch = self._post("/v1/batches", body, Batch)
        given = [(group.row, len(group.samples)) for group in batch.groups]
        if given != [(row, samples) for row in rows]:
            raise ProtocolError(f"step {step}: the runtime's batch isn't {samples} samples of each of the rows {rows}")
        for group in batch.groups:
            for number, sample in enumerate(group.samples):
                if sample.scored and (wrong := _wrong_lengths(sample)):
                    raise ProtocolError(f"step {step}, row {group.row}, sample {number}: {wrong}")
        return [sample for group in batch.groups for sample in group.samples]

    def evaluate(self, step: int, policy_url: str) -> Evaluation:
        return self._post("/v1/evaluations", {"step": step, "policy_url": policy_url}, Evaluation)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._post("/v1/metrics", {"step": step, "metrics": metrics}, Nothing)

    def checkpoint(self, step: int, path: Path, kind: Literal["lora", "full"]) -> None:
        self._post("/v1/checkpoints", {"step": step, "path": str(path), "kind": kind}, Nothing)

    def ready(self, policy_url: str) -> None:
        self._post("/v1/ready", {"policy_url": policy_url}, Nothing)

    def _post(self, path: str, body: object, answer: type[Answer]) -> Answer:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, msgspec.json.encode(body), headers)  # noqa: S310 - HTTP
        try:
            with self._opener.open(request) as response:  # no timeout: the answer waits for the slowest rollout
                return msgspec.json.decode(response.read(), type=answer)
        except urllib.error.HTTPError as error:
            message = _refusal(error) or f"the runtime answered {error.code} to POST {path}"
            raise (Stopped if error.code == HTTPStatus.CONFLICT else ProtocolError)(message) from error
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the runtime's answer to POST {path} can't be read: {error}") from error
        except OSError as error:
            raise ProtocolError(f"the runtime can't be reached for POST {path}: {error}") from error


def _wrong_lengths(sample: Sample) -> str | None:
    count = len(sample.completion_ids)
    if count and not sample.prompt_ids:
        return "no prompt tokens"
    if len(sample.mask) != count:
        return f"mask has {len(sample.mask)} entries for {count} tokens"
    if sample.logprobs is not None and len(sample.logprobs) != count:
        return f"logprobs has {len(sample.logprobs)} entries for {count} tokens"
    return None


def _refusal(error: urllib.error.HTTPError) -> str | None:
    try:
        return msgspec.json.decode(error.read(), type=_Refusal).error.message
    except (OSError, msgspec.DecodeError):
        return None
