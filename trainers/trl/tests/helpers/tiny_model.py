"""A tokenizer and a model of some 100,000 weights, made in code: nothing is downloaded.

`save_model` writes a model folder for a job. `warm_up` trains one by supervision on conversations, such as an offline
model's: a policy that never meets a reward learns nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

Messages = Sequence[Mapping[str, Any]]


def make_tokenizer(texts: Iterable[str], size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `texts` with Qwen3's special tokens and chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    core.add_tokens(PLAIN)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    return tokenizer


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, hidden: int = 96, layers: int = 3
) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden // 4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, model: Qwen3ForCausalLM) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def warm_up(
    folder: Path,
    conversations: Sequence[Messages],
    tools: Sequence[Mapping[str, Any]],
    *,
    steps: int = 140,
    seed: int = 0,
) -> Path:
    """A model folder whose model imitates the assistant of `conversations`; calls' arguments are text in them."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    shown = [{"messages": [_message(message) for message in messages]} for messages in conversations]
    tokenizer = make_tokenizer(_rendered(shown, tools))
    model = make_model(tokenizer, seed=seed)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([row | {"tools": json.dumps(tools)} for row in shown]),
        args=SFTConfig(
            output_dir=str(folder / "sft"),
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            assistant_only_loss=True,
            max_length=512,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=seed,
        ),
    )
    trainer.train()
    return save_model(folder, tokenizer, model)


def _rendered(rows: Iterable[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (TEMPLATES / "qwen3_training.jinja").read_text(encoding="utf-8")
    conversations = [row["messages"] for row in rows]
    given: list[Any] = [dict(tool) for tool in tools]
    rendered: Any = render_jinja_template(conversations=conversations, chat_template=template, tools=given)
    return list(rendered[0])


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """With empty content in place of none."""
    return {**message, "content": message.get("content") or ""}
