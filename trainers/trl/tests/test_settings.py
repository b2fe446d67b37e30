"""The job as TRL's and PEFT's options, and the order of its rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from osmosis_trainer_trl.errors import JobError
from osmosis_trainer_trl.job import Job, read_job, row_order
from osmosis_trainer_trl.settings import Settings, read_settings

MakeJob = Callable[..., dict[str, Any]]


def read(job: dict[str, Any], folder: Path) -> Job:
    path = folder / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    return read_job(path)


@pytest.fixture
def settings(job: MakeJob, tmp_path: Path) -> Callable[..., Settings]:
    return lambda **tables: read_settings(read(job(**tables), tmp_path))


def test_the_tables_become_trl_s_options(settings: Callable[..., Settings]) -> None:
    found = settings(
        training={"lr": 3e-5, "max_response_length": 77, "n_samples_per_prompt": 8},
        sampling={"temperature": 0.8, "top_p": 0.95},
        checkpoints={"checkpoint_save_freq": 7},
    )
    grpo = found.grpo
    assert (grpo.learning_rate, grpo.temperature, grpo.top_p) == (3e-5, 0.8, 0.95)
    assert (grpo.num_generations, grpo.generation_batch_size, grpo.max_completion_length) == (8, 32, 77)
    assert (grpo.per_device_train_batch_size, grpo.gradient_accumulation_steps, grpo.steps_per_generation) == (8, 4, 4)
    assert (grpo.save_steps, grpo.seed, grpo.lr_scheduler_type, grpo.report_to) == (7, 1, "constant", [])
    assert (grpo.use_cpu, grpo.bf16) == (True, False)
    assert found.lora is not None
    assert (found.lora.r, found.lora.lora_alpha, found.lora.target_modules) == (16, 32, "all-linear")


def test_the_seed_can_be_given(settings: Callable[..., Settings]) -> None:
    assert settings(advanced={"seed": 7}).grpo.seed == 7
    with pytest.raises(JobError, match="Expected `int`, got `str`"):
        settings(advanced={"seed": "7"})


def test_advanced_options_pass_through(settings: Callable[..., Settings]) -> None:
    found = settings(
        advanced={
            "beta": 0.04,
            "loss_type": "dr_grpo",
            "lr_scheduler_type": "cosine",
            "warmup_steps": 5,
            "per_device_train_batch_size": 2,
            "shuffle_dataset": False,
            "lora_r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
        }
    )
    assert (found.grpo.beta, found.grpo.loss_type, found.grpo.lr_scheduler_type) == (0.04, "dr_grpo", "cosine")
    assert (found.grpo.warmup_steps, found.grpo.gradient_accumulation_steps) == (5, 8)
    assert not found.shuffled
    assert found.lora is not None
    assert (found.lora.r, found.lora.lora_alpha, set(found.lora.target_modules or ())) == (4, 8, {"q_proj"})
    assert settings(advanced={"full_weights": True}).lora is None


@pytest.mark.parametrize(
    ("advanced", "message"),
    [
        ({"los_type": "grpo"}, r"los_type is not an option .*: did you mean loss_type"),
        ({"lora_rank": 8}, r"lora_rank is not an option .*: did you mean .*lora_r"),
        ({"qqq": 1}, r"qqq is not an option of TRL's GRPOConfig or PEFT's LoraConfig$"),
        ({"learning_rate": 1}, r"learning_rate is set by lr in \[training\]"),
        ({"gradient_accumulation_steps": 2}, "is set by per_device_train_batch_size"),
        ({"use_vllm": True}, "use_vllm can't be set"),
        ({"per_device_train_batch_size": 3}, "3 doesn't divide the 16 samples of a batch"),
        ({"full_weights": True, "lora_r": 4}, "full_weights trains no adapter: remove lora_r"),
        ({"lr_scheduler_type": "steep"}, "TRL can't train with these settings: steep is not a valid"),
    ],
)
def test_an_option_that_can_t_be_is_refused(
    settings: Callable[..., Settings], advanced: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        settings(advanced=advanced)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, r"is not a training job: Invalid enum value 2 - at `\$.schema_version`"),
        ({"rows": ["a"]}, r"Expected `int`, got `str` - at `\$.rows"),
        ({"rows": [1, 2, 3, 1]}, "lists a row twice"),
        ({"rows": [1, 2]}, "2 rows don't fill a batch of rollout_batch_size 4"),
        ({"training": {"n_samples_per_prompt": 1}}, ">= 2"),
        ({"sampling": {"temperature": 0}}, "> 0"),
    ],
)
def test_a_job_that_can_t_be_trained_is_refused(
    job: MakeJob, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        read(job(**changes), tmp_path)


def test_each_epoch_has_each_row_at_most_once_in_an_order_of_its_own(job: MakeJob, tmp_path: Path) -> None:
    given = read(job(rows=list(range(100, 111)), training={"total_epochs": 5}), tmp_path)
    order = row_order(given, shuffled=True)
    epochs = [tuple(order[at : at + 8]) for at in range(0, len(order), 8)]
    assert len(order) == given.steps * 4 == 40
    assert len(set(epochs)) == 5
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len(Counter(order)) == 11  # a row that an epoch leaves out comes in another
    assert row_order(given, shuffled=True) == order
    longer = read(job(rows=list(range(100, 111)), training={"total_epochs": 6}), tmp_path)
    assert row_order(longer, shuffled=True)[:40] == order
    assert row_order(given, shuffled=False)[:16] == [*range(100, 108), *range(100, 108)]
