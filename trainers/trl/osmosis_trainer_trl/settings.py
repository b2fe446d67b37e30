"""Map a job to the options of TRL and PEFT; `[advanced]` uses their option names directly."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from trl import GRPOConfig

from osmosis_trainer_trl.errors import JobError
from osmosis_trainer_trl.job import Job

# Fields of GRPOConfig that other parts of the job set, and which part.
ELSEWHERE = {
    "learning_rate": "lr in [training]",
    "num_train_epochs": "total_epochs in [training]",
    "num_generations": "n_samples_per_prompt in [training]",
    "generation_batch_size": "rollout_batch_size in [training]",
    "max_completion_length": "max_response_length in [training]",
    "temperature": "[sampling]",
    "top_p": "[sampling]",
    "save_steps": "checkpoint_save_freq in [checkpoints]",
    "eval_steps": "eval_interval in [checkpoints]",
    "gradient_accumulation_steps": "per_device_train_batch_size, by which the batch is divided",
    "steps_per_generation": "per_device_train_batch_size, by which the batch is divided",
}
# Fields that the contract with the runtime fixes: one update per batch, tokens from the policy server.
# fmt: off
FIXED = [
    "auto_find_batch_size", "data_seed", "do_eval", "eval_on_start", "eval_strategy", "ignore_data_skip",
    "load_best_model_at_end", "logging_steps", "logging_strategy", "min_p", "num_generations_eval", "num_iterations",
    "output_dir", "repetition_penalty", "resume_from_checkpoint", "reward_weights", "save_only_model", "save_strategy",
    "top_k", "use_transformers_continuous_batching", "use_transformers_paged", "use_vllm",
]
# fmt: on
LORA = {"lora_r": "r"} | {
    field.name: field.name
    for field in fields(LoraConfig)
    if field.name != "r" and field.name not in {inherited.name for inherited in fields(PeftConfig)}
}
_LORA_DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


@dataclass(frozen=True)
class Settings:
    grpo: GRPOConfig
    lora: LoraConfig | None  # None to train all weights
    shuffled: bool


def read_settings(job: Job) -> Settings:
    """Return the settings of a job; raise JobError for an option that TRL and PEFT don't have or don't accept."""
    advanced = dict(job.advanced)
    full_weights = advanced.pop("full_weights", False)
    shuffled = advanced.pop("shuffle_dataset", True)
    for name in advanced:
        _check_name(name)
    lora = {name: advanced.pop(name) for name in LORA if name in advanced}
    if lora and full_weights:
        raise JobError(f"[advanced] full_weights trains no adapter: remove {', '.join(lora)}")
    adapter = _LORA_DEFAULTS | {LORA[name]: value for name, value in lora.items()}
    try:
        return Settings(
            grpo=_grpo(job, advanced, lora_only=not full_weights),
            lora=None if full_weights else LoraConfig(**adapter, task_type="CAUSAL_LM"),
            shuffled=bool(shuffled),
        )
    except (TypeError, ValueError) as error:
        raise JobError(f"TRL can't train with these settings: {error}") from error


def _grpo(job: Job, advanced: dict[str, Any], *, lora_only: bool) -> GRPOConfig:
    training = job.training
    batch = training.rollout_batch_size * training.n_samples_per_prompt
    at_once = advanced.pop("per_device_train_batch_size", training.n_samples_per_prompt)
    if not isinstance(at_once, int) or at_once < 1 or batch % at_once:
        raise JobError(
            f"[advanced] per_device_train_batch_size {at_once} doesn't divide the {batch} samples of a batch "
            "(rollout_batch_size times n_samples_per_prompt)"
        )
    on_cpu = bool(advanced.get("use_cpu")) or not torch.accelerator.is_available()
    defaults: dict[str, Any] = {
        "beta": 0.0,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": on_cpu,
    }
    if on_cpu:
        defaults |= {"bf16": False, "dataloader_pin_memory": False, "gradient_checkpointing": False}
    elif lora_only:
        defaults |= {"model_init_kwargs": {"dtype": "bfloat16"}}  # for the frozen weights; the adapter stays in float32
    return GRPOConfig(
        **defaults | advanced,
        output_dir=str(job.output),
        learning_rate=training.lr,
        num_train_epochs=1,  # the dataset already repeats the rows for all epochs
        num_generations=training.n_samples_per_prompt,
        generation_batch_size=batch,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=batch // at_once,
        max_completion_length=training.max_response_length,
        temperature=job.sampling.temperature,
        top_p=job.sampling.top_p,
        seed=job.seed,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="steps",
        save_steps=job.checkpoints.checkpoint_save_freq or job.steps,  # TRL also saves after the last step
    )


def _check_name(name: str) -> None:
    if name in ELSEWHERE:
        raise JobError(f"[advanced] {name} is set by {ELSEWHERE[name]}")
    if name in FIXED:
        raise JobError(f"[advanced] {name} can't be set: the trainer and the runtime rely on its value")
    known = ["full_weights", *LORA, *(field.name for field in fields(GRPOConfig))]
    if name not in known:
        close = difflib.get_close_matches(name, known)
        hint = f": did you mean {' or '.join(close)}?" if close else ""
        raise JobError(f"[advanced] {name} is not an option of TRL's GRPOConfig or PEFT's LoraConfig{hint}")
