"""Run TRL's GRPO with rollouts, rewards and evaluations from the runtime.

TRL calls `_Steps.rollouts` for the rollouts of a batch; the dataset's prompts are just row numbers. A placeholder of
one masked token replaces a sample without a reward: TRL leaves a reward of None out of its group, and nothing of the
sample reaches the model.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar
from trl import GRPOTrainer

from osmosis_trainer_trl.errors import JobError, ProtocolError
from osmosis_trainer_trl.job import Job, row_order
from osmosis_trainer_trl.policy import PolicyServer
from osmosis_trainer_trl.runtime import Runtime, Sample
from osmosis_trainer_trl.settings import read_settings

Kind = Literal["lora", "full"]


def train(job: Job, runtime: Runtime, token: str) -> None:
    """Train to the last step; raise TrainerError if that fails."""
    settings = read_settings(job)
    kind: Kind = "lora" if settings.lora else "full"
    if job.resume_from is not None:
        _check_checkpoint(job.resume_from, kind)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    steps = _Steps(job, runtime, kind, tokenizer.eos_token_id)
    rows = row_order(job, shuffled=settings.shuffled)
    # TRL would log all tokens of each sample without a reward.
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(
        lambda record: "All reward functions returned None" not in str(record.msg)
    )
    trainer = GRPOTrainer(
        model=str(job.model),
        processing_class=tokenizer,
        args=settings.grpo,
        train_dataset=Dataset.from_dict({"prompt": [str(row) for row in rows]}),
        rollout_func=steps.rollouts,
        reward_funcs=[_reward],
        peft_config=settings.lora,
        callbacks=[steps],
    )
    trainer.remove_callback(PrinterCallback)
    # PEFT puts the LoRA layers into the model itself, so the model below its wrapper samples with them.
    model = trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    _say_how(job, kind, trainer.accelerator.device.type)
    precision = trainer.accelerator.autocast
    with PolicyServer(token, job.seed, model, tokenizer, precision, job.policy_port) as policy:
        steps.policy = policy
        trainer.train(resume_from_checkpoint=str(job.resume_from) if job.resume_from else None)


def serve(job: Job, runtime: Runtime, token: str) -> None:
    """Serve the untrained model until the process is stopped."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    device = torch.accelerator.current_accelerator()
    dtype = torch.float32 if device is None else torch.bfloat16  # the same precision as when training an adapter
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    model.to(device or "cpu")
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    with PolicyServer(token, job.seed, model, tokenizer, port=job.policy_port) as policy, policy.sampling(0):
        runtime.ready(policy.url)
        _say(f"{job.name}: serving {job.model} on {model.device.type}")
        threading.Event().wait()


class _Steps(TrainerCallback):
    """Asks the runtime for rollouts and evaluations in each step, and reports metrics and checkpoints to it."""

    policy: PolicyServer

    def __init__(self, job: Job, runtime: Runtime, kind: Kind, end_token: int) -> None:
        self._job = job
        self._runtime = runtime
        self._kind = kind
        self._end_token = end_token
        self._metrics: dict[str, float] = {}

    def rollouts(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return a batch of rollouts, as TRL's `rollout_func`; `prompts` repeats each row once per sample."""
        start = time.perf_counter()
        count = self._job.training.n_samples_per_prompt
        step = trainer.state.global_step + 1
        rows = [int(prompt) for prompt in prompts[::count]]
        with self.policy.sampling(step):
            samples = self._runtime.batch(step, rows, count, self.policy.url)
        for sample in samples:
            if sample.scored and not self.policy.knows(sample.prompt_ids + sample.completion_ids):
                raise ProtocolError(f"step {step}: rollout {sample.rollout_id} has tokens that the model doesn't have")
        self._metrics = _batch_metrics(samples, count) | {"rollout_time": time.perf_counter() - start}
        used = [sample if sample.scored and sample.completion_ids else self._masked(sample) for sample in samples]
        logprobs = [sample.logprobs for sample in used]
        return {
            "prompt_ids": [sample.prompt_ids for sample in used],
            "completion_ids": [sample.completion_ids for sample in used],
            "env_mask": [sample.mask for sample in used],
            "logprobs": None if None in logprobs else logprobs,
            "runtime_reward": [sample.reward for sample in used],
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == 0 and self._job.checkpoints.eval_interval:
            self._evaluate(0)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report and evaluate a step. TRL calls this before it saves the step's checkpoint."""
        if not logs or "loss" not in logs:
            return  # TRL's summary at the end of training
        step = state.global_step
        metrics = {
            name: float(value)
            for name, value in (logs | self._metrics | {"epoch": step / self._job.steps_per_epoch}).items()
            if isinstance(value, int | float) and math.isfinite(value) and not name.startswith("rewards/")
        }
        self._runtime.report(step, metrics)
        _say(_step_line(step, state.max_steps, metrics))
        interval = self._job.checkpoints.eval_interval
        if interval and (step % interval == 0 or step == state.max_steps):
            self._evaluate(step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        path = self._job.output / f"checkpoint-{state.global_step}"
        self._runtime.checkpoint(state.global_step, path, self._kind)
        _say(f"step {state.global_step}: checkpoint {path.name}")

    def _masked(self, sample: Sample) -> Sample:
        """Return a placeholder with one masked token, since TRL can't handle an empty sample."""
        token = self._end_token
        return Sample(sample.rollout_id, [token], [token], [0], [0.0], sample.reward if sample.scored else None)

    def _evaluate(self, step: int) -> None:
        with self.policy.sampling(step):
            evaluation = self._runtime.evaluate(step, self.policy.url)
        reward = "no reward" if evaluation.reward is None else f"mean reward {evaluation.reward:.3f}"
        _say(f"step {step}: evaluation, {reward}")


def _reward(runtime_reward: list[float | None], **_: object) -> list[float | None]:
    return runtime_reward


def _batch_metrics(samples: list[Sample], count: int) -> dict[str, float]:
    scored = [sample for sample in samples if sample.scored]
    groups = [samples[at : at + count] for at in range(0, len(samples), count)]
    trained = [group for group in groups if len({sample.reward for sample in group if sample.scored}) > 1]
    metrics = {"left_out": len(samples) - len(scored), "frac_groups_trained": len(trained) / len(groups)}
    if scored:
        metrics["prompt_tokens"] = sum(len(sample.prompt_ids) for sample in scored) / len(scored)
        metrics["completion_tokens"] = sum(len(sample.completion_ids) for sample in scored) / len(scored)
        metrics["sampled_tokens"] = sum(sum(sample.mask) for sample in scored) / len(scored)
    return metrics


def _check_checkpoint(path: Path, kind: Kind) -> None:
    if not (path / "trainer_state.json").is_file():
        raise JobError(f"{path} is not a checkpoint of this trainer: it has no trainer_state.json")
    if (path / "adapter_config.json").is_file() != (kind == "lora"):
        raise JobError(f"{path} can't be resumed: full_weights in [advanced] was different when it was saved")


def _say_how(job: Job, kind: Kind, device: str) -> None:
    what = "a LoRA adapter" if kind == "lora" else "all weights"
    where = (
        f"on the CPU with {torch.get_num_threads()} threads, because there is no GPU"
        if device == "cpu"
        else f"on {device}"
    )
    _say(f"{job.name}: training {what} for {job.steps} steps {where}")
    if job.resume_from:
        _say(f"resuming from {job.resume_from.name}")
    if left := len(job.rows) % job.training.rollout_batch_size:
        _say(f"{left} of {len(job.rows)} rows don't fill a batch and are left out of each epoch")


def _step_line(step: int, last: int, metrics: dict[str, float]) -> str:
    names = ("reward", "loss", "grad_norm", "frac_groups_trained")
    shown = [f"{name} {metrics[name]:.4g}" for name in names if name in metrics]
    times = f"{metrics.get('step_time', 0):.1f} s, {metrics['rollout_time']:.1f} s of it for rollouts"
    left_out = f"; {metrics['left_out']:.0f} samples left out" if metrics["left_out"] else ""
    return f"step {step} of {last}: {', '.join(shown)}; {times}{left_out}"


def _say(line: str) -> None:
    print(line, flush=True)
