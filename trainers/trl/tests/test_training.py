"""The trainer against a runtime on loopback: what it asks for, what it learns from, what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fake_runtime import HALF, TOKEN, Answer, FakeRuntime, left_out_sample
from osmosis_trainer_trl.errors import JobError, ProtocolError, Stopped
from osmosis_trainer_trl.job import read_job
from osmosis_trainer_trl.runtime import Runtime
from osmosis_trainer_trl.training import train

MakeJob = Callable[..., dict[str, Any]]
SGD = {"full_weights": True, "optim": "sgd"}  # an update in proportion to the gradient


def write(job: dict[str, Any]) -> Path:
    path = Path(job["output"]).parent / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


def run(job: dict[str, Any]) -> None:
    train(read_job(write(job)), Runtime(job["runtime_url"], TOKEN), TOKEN)


def start(job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "osmosis_trainer_trl", str(write(job))]
    environment = os.environ | {"OSMOSIS_TRAINER_TOKEN": TOKEN}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def weights(job: dict[str, Any], step: int) -> torch.Tensor:
    """All weights of a full checkpoint in one row."""
    tensors = load_file(Path(job["output"]) / f"checkpoint-{step}" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def scripted(*left_out: dict[str, Any], scored: int = 3) -> Callable[[dict[str, Any]], Answer]:
    """Batches that don't come from the policy: `scored` samples a group, then those that are left out."""

    def answer(body: dict[str, Any]) -> Answer:
        groups = []
        for row in body["rows"]:
            dice = random.Random(f"{body['step']}/{row}")
            samples = []
            for _ in range(scored):
                tokens = [dice.randrange(3, 250) for _ in range(dice.randrange(2, 7))]
                sample = {"prompt_ids": [row + 5], "completion_ids": tokens, "mask": [1] * len(tokens)}
                samples.append(sample | {"rollout_id": "r", "logprobs": None, "reward": dice.random()})
            groups.append({"row": row, "samples": samples + list(left_out)})
        return 200, json.dumps({"step": body["step"], "groups": groups, "metrics": {}}).encode()

    return answer


def test_a_run_learns_and_reports(job: MakeJob, runtime: FakeRuntime, model_folder: Path) -> None:
    runtime.left_out = {1}
    given = job(training={"total_epochs": 10, "lr": 0.03}, checkpoints={"checkpoint_save_freq": 8, "eval_interval": 5})
    trainer = start(given)
    log, errors = trainer.communicate()
    assert (trainer.returncode, errors) == (0, ""), log

    batches, metrics = runtime.sent("/v1/batches"), [body["metrics"] for body in runtime.sent("/v1/metrics")]
    assert (
        [body["step"] for body in batches] == [body["step"] for body in runtime.sent("/v1/metrics")] == [*range(1, 21)]
    )
    assert all(body["samples"] == 4 for body in batches)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        assert sorted(first["rows"] + second["rows"]) == list(range(8))  # an epoch
    assert len({tuple(body["rows"]) for body in batches}) > 10
    assert [body["step"] for body in runtime.sent("/v1/evaluations")] == [0, 5, 10, 15, 20]

    rewards = [values["reward"] for values in metrics]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.5, rewards
    last = metrics[-1]
    assert last.keys() >= {
        "loss",
        "grad_norm",
        "learning_rate",
        "reward_std",
        "frac_reward_zero_std",
        "step_time",
        "entropy",
    }
    assert last["left_out"] == 4
    assert last["epoch"] == 10
    assert 1 <= last["sampled_tokens"] == last["completion_tokens"] <= 6
    assert last["rollout_time"] < last["step_time"]
    assert all(math.isfinite(value) for values in metrics for value in values.values())

    checkpoints = [(body["step"], body["kind"]) for body in runtime.sent("/v1/checkpoints")]
    assert checkpoints == [(8, "lora"), (16, "lora"), (20, "lora")]
    adapter = Path(runtime.sent("/v1/checkpoints")[-1]["path"])
    assert adapter.parent == Path(given["output"])
    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), adapter)
    likeliest = policy(torch.tensor([[12, 12]])).logits[0, -1].argmax().item()
    assert likeliest >= HALF

    assert TOKEN not in log
    assert "on the CPU" in log.splitlines()[0]
    assert re.search(
        r"^step 20 of 20: reward [\d.]+, loss .*; [\d.]+ s, [\d.]+ s of it for rollouts; 4 samples", log, re.M
    )
    assert "it/s" not in log
    assert "returned None" not in log


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a_sample_that_is_left_out_changes_no_weight(job: MakeJob, runtime: FakeRuntime, loss_type: str) -> None:
    """Two steps end with the same weights for whatever it holds, and with those of groups that never had it."""
    tokens = {"prompt_ids": [9] * 5, "completion_ids": [7] * 9, "mask": [1] * 9, "logprobs": [-9.0] * 9}
    held = {"rollout_id": "x", "reward": 100.0, "left_out": "a tool crashed"} | tokens
    unscored = held | {"reward": None, "left_out": None, "logprobs": None}
    options = SGD | {"loss_type": loss_type}
    given = job(training={"lr": 1.0}, advanced=options | {"per_device_train_batch_size": 16})
    results = []
    for sample in [left_out_sample(), held, unscored, held | {"left_out": None}]:
        runtime.answers["/v1/batches"] = scripted(sample)
        run(given)
        results.append(weights(given, 2))
    runtime.answers["/v1/batches"] = scripted()
    training = {"lr": 1.0, "n_samples_per_prompt": 3}
    without = job(training=training, advanced=options | {"per_device_train_batch_size": 12})
    run(without)

    empty, absurd, no_reward, counted = results
    assert torch.equal(empty, absurd)
    assert torch.equal(empty, no_reward)
    torch.testing.assert_close(empty, weights(without, 2))
    assert (empty - counted).abs().max() > 1e-3  # it would have counted


def test_a_step_whose_samples_are_all_left_out_trains_nothing(job: MakeJob, runtime: FakeRuntime) -> None:
    runtime.answers["/v1/batches"] = scripted(*[left_out_sample()] * 4, scored=0)
    given = job(advanced=SGD, checkpoints={"checkpoint_save_freq": 1})
    run(given)
    metrics = runtime.sent("/v1/metrics")[0]["metrics"]
    assert metrics["left_out"] == 16
    assert metrics["frac_groups_trained"] == 0
    assert "reward" not in metrics
    assert metrics["grad_norm"] == 0
    assert torch.equal(weights(given, 1), weights(given, 2))


def test_a_scored_rollout_without_a_token_counts_in_its_group_only(job: MakeJob, runtime: FakeRuntime) -> None:
    silent = left_out_sample() | {"reward": 0.0, "left_out": None}
    runtime.answers["/v1/batches"] = scripted(silent)
    run(job())
    assert runtime.sent("/v1/metrics")[0]["metrics"]["left_out"] == 0


def test_tokens_of_tools_are_not_trained(job: MakeJob, runtime: FakeRuntime) -> None:
    """Masked tokens are context: with all of them masked nothing is learned."""

    def masked(body: dict[str, Any]) -> Answer:
        status, answer = scripted(scored=4)(body)
        batch = json.loads(answer)
        for group in batch["groups"]:
            for sample in group["samples"]:
                sample["mask"] = [0] * len(sample["mask"])
        return status, json.dumps(batch).encode()

    runtime.answers["/v1/batches"] = masked
    run(job(advanced=SGD))
    assert [body["metrics"]["grad_norm"] for body in runtime.sent("/v1/metrics")] == [0, 0]
    assert runtime.sent("/v1/metrics")[0]["metrics"]["frac_groups_trained"] == 1


@pytest.mark.parametrize("advanced", [{"full_weights": True}, {}])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(
    job: MakeJob, runtime: FakeRuntime, advanced: dict[str, Any]
) -> None:
    """The third epoch's rows, Adam's moments and the learning rate are those of the run that wasn't interrupted."""
    runtime.answers["/v1/batches"] = scripted(left_out_sample())
    tables: dict[str, Any] = {
        "training": {"total_epochs": 3},
        "checkpoints": {"checkpoint_save_freq": 3, "eval_interval": 3},
        "advanced": advanced | {"lr_scheduler_type": "linear"},
    }
    given = job(**tables)
    run(given)
    checkpoint = Path(given["output"])
    name = "model.safetensors" if advanced else "adapter_model.safetensors"
    whole, sent = load_file(checkpoint / "checkpoint-6" / name), list(runtime.requests)
    resumed_at = next(at for at, (path, _) in enumerate(sent) if path == "/v1/checkpoints") + 1

    runtime.requests.clear()
    run(job(**tables, resume_from=str(checkpoint / "checkpoint-3")))
    again = load_file(checkpoint / "checkpoint-6" / name)
    assert all(torch.equal(whole[key], again[key]) for key in whole)

    def comparable(requests: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, Any]]:
        """Without what differs between two runs: times and the policy's port."""
        kept = {"step", "rows", "samples", "learning_rate", "loss", "epoch"}
        return [
            (path, {name: value for name, value in (body | body.get("metrics", {})).items() if name in kept})
            for path, body in requests
        ]

    assert comparable(runtime.requests) == comparable(sent[resumed_at:])
    assert [body["step"] for body in runtime.sent("/v1/evaluations")] == [6]


def test_a_complete_run_that_is_resumed_has_nothing_to_do(job: MakeJob, runtime: FakeRuntime) -> None:
    given = job()
    run(given)
    runtime.requests.clear()
    run(job(resume_from=f"{given['output']}/checkpoint-2"))
    assert runtime.requests == []


def test_a_checkpoint_of_another_kind_is_refused(job: MakeJob, runtime: FakeRuntime) -> None:
    given = job()
    run(given)
    for advanced, folder, message in [
        ({"full_weights": True}, "checkpoint-2", "full_weights"),
        ({}, "checkpoint-9", "not a checkpoint of this trainer"),
    ]:
        with pytest.raises(JobError, match=message):
            run(job(resume_from=f"{given['output']}/{folder}", advanced=advanced))


def batch_with(**changes: Any) -> Callable[[dict[str, Any]], Answer]:
    def answer(body: dict[str, Any]) -> Answer:
        batch = json.loads(scripted(scored=4)(body)[1])
        batch["groups"][2]["samples"][1] |= changes
        return 200, json.dumps(batch).encode()

    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: (500, b'{"error": {"message": "the store\\nis full"}}'), "the store\nis full"),
        (lambda _: (500, b"<html>"), "the runtime answered 500 to POST /v1/batches"),
        (lambda _: (200, b"<html>"), "the runtime's answer to POST /v1/batches can't be read: JSON is malformed"),
        (lambda _: (200, b'{"step": 1}'), "can't be read: Object missing required field `groups`"),
        (lambda _: (200, b'{"step": 1, "groups": []}'), "the runtime's batch isn't 4 samples of each of the rows"),
        (batch_with(reward=float("nan")), "can't be read: JSON is malformed"),
        (batch_with(mask=[2]), "Invalid enum value 2"),
        (batch_with(mask=[1]), r"step 1, row \d, sample 1: mask has 1 entries for \d tokens"),
        (batch_with(logprobs=[]), r"sample 1: logprobs has 0 entries for \d tokens"),
        (batch_with(prompt_ids=[]), "sample 1: no prompt tokens"),
        (batch_with(prompt_ids=[5000], rollout_id="r7"), "rollout r7 has tokens that the model doesn't have"),
    ],
)
def test_an_answer_that_breaks_the_contract_ends_the_run(
    job: MakeJob, runtime: FakeRuntime, answer: Callable[[dict[str, Any]], Answer], message: str
) -> None:
    runtime.answers["/v1/batches"] = answer
    with pytest.raises(ProtocolError, match=message):
        run(job())
    assert len(runtime.requests) == 1


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/evaluations", "/v1/metrics", "/v1/checkpoints"])
def test_a_conflict_is_a_stop_whatever_it_answers(job: MakeJob, runtime: FakeRuntime, path: str) -> None:
    runtime.answers[path] = lambda _: (409, b'{"error": {"message": "stopped by hand"}}')
    with pytest.raises(Stopped, match="stopped by hand"):
        run(job(checkpoints={"eval_interval": 1, "checkpoint_save_freq": 1}))


def test_a_runtime_that_is_gone_ends_the_run(job: MakeJob) -> None:
    with pytest.raises(ProtocolError, match=r"the runtime can't be reached for POST /v1/batches"):
        run(job(runtime_url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("status", "code", "last"), [(500, 1, "the store is full"), (409, 0, "stopped: the store is full")]
)
def test_the_process_ends_with_the_reason_in_its_last_line(
    job: MakeJob, runtime: FakeRuntime, status: int, code: int, last: str
) -> None:
    runtime.answers["/v1/batches"] = lambda _: (status, b'{"error": {"message": "the store is full"}}')
    given = job()
    trainer = start(given)
    log, _ = trainer.communicate()
    assert trainer.returncode == code
    assert log.splitlines()[-1] == last
    assert list(Path(given["output"]).iterdir()) == []


def test_a_model_is_served_as_it_is_until_sigterm(job: MakeJob, runtime: FakeRuntime) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = threading.Event()

    def ready(_: dict[str, Any]) -> Answer:
        served.set()
        return 200, b"{}"

    runtime.answers["/v1/ready"] = ready
    trainer = start(job(mode="serve", rows=[], policy_port=port) | {"checkpoints": {}})
    try:
        assert served.wait(120)
        url = runtime.sent("/v1/ready")[0]["policy_url"]
        assert url == f"http://127.0.0.1:{port}/v1"
        assert len(runtime.samples(url, [1, 2, 3])) == 3
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(5) == 143
    finally:
        trainer.kill()
        trainer.communicate()


def test_sigterm_ends_it_in_the_middle_of_a_step(job: MakeJob, runtime: FakeRuntime) -> None:
    asked, ended = threading.Event(), threading.Event()

    def wait(_: dict[str, Any]) -> Answer:
        asked.set()
        ended.wait()
        return 500, b""

    runtime.answers["/v1/batches"] = wait
    given = job()
    trainer = start(given)
    try:
        assert asked.wait(120)
        children = psutil.Process(trainer.pid).children(recursive=True)
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(5) == 143
        assert children == []
        assert list(Path(given["output"]).iterdir()) == []
    finally:
        trainer.kill()
        ended.set()
        trainer.communicate()
