"""A model folder, jobs for it and a runtime. torch has one thread here and in the trainers that are started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import pytest
import torch

from fake_runtime import FakeRuntime
from tiny_model import make_model, make_tokenizer, save_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer(["one two three"], size=300)
    model: Any = make_model(tokenizer, hidden=32, layers=2)
    model.get_input_embeddings().weight.data *= 20  # an adapter can't move logits that are all nearly equal
    return save_model(tmp_path_factory.mktemp("model"), tokenizer, model)


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with FakeRuntime().served() as runtime:
        yield runtime


@pytest.fixture
def job(model_folder: Path, runtime: FakeRuntime, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A job of 8 rows in batches of 4, with changes to its tables; `rows=` and other top-level fields replace."""

    def make(**changes: Any) -> dict[str, Any]:
        output = tmp_path / "checkpoints"
        output.mkdir(exist_ok=True)
        default: dict[str, Any] = {
            "schema_version": 1,
            "name": "tiny",
            "runtime_url": runtime.url,
            "model": str(model_folder),
            "output": str(output),
            "resume_from": None,
            "rows": list(range(8)),
            "seed": 1,
            "training": {
                "lr": 0.01,
                "total_epochs": 1,
                "n_samples_per_prompt": 4,
                "rollout_batch_size": 4,
                "max_prompt_length": 8,
                "max_response_length": 8,
            },
            "sampling": {"temperature": 1.0, "top_p": 1.0},
            "checkpoints": {"checkpoint_save_freq": None, "eval_interval": None},
            "advanced": {},
            "mode": "train",
            "policy_port": 0,
        }
        return {
            name: value | changes.get(name, {}) if isinstance(value, dict) else changes.get(name, value)
            for name, value in default.items()
        }

    return make
