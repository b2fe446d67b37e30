"""Choose which rows of a dataset to train on and which to hold out."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from osmosis_ai.errors import UsageError
from osmosis_ai.models.policy.template import ChatTemplateError, load_template
from osmosis_ai.records import Tool, opening_messages
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.training.config import TrainingConfig
from osmosis_ai.training.record import LeftOutRow

__all__ = ["Rows", "choose_rows"]


class Rows(NamedTuple):
    """A dataset's rows by use, and the prompt lengths in tokens that are known before the start, by row."""

    trained: list[int]
    held_out: list[int]
    left_out: list[LeftOutRow]
    tools: list[Tool]
    functions: list[str]
    prompt_tokens: dict[int, int]


async def choose_rows(config: TrainingConfig, store: str, environ: Mapping[str, str]) -> Rows:
    """Load the repository, then choose the rows to train on and to hold out.

    Rows are held out by the hash of their content, so reordering the dataset changes nothing. The built-in loop's
    prompts are rendered with their tools to measure them; other agents build theirs only at run time.

    Raises:
        StartError: The repository, the dataset or the model's tokenizer can't be used.
    """
    template = load_template(config.model)
    # Any model will do: the session is only opened, to load the tools and rows, and rolls out nothing.
    look = config.run_config(model="offline/empty", store=store)
    async with RunSession.open(look, Path(config.root), environ) as session:
        loaded = session.pool.loaded
        rows = [session.row(number) for number in session.rows]
    lengths: dict[int, int] = {}
    left_out: list[LeftOutRow] = []
    if "mcp" in config.agent:
        for row in rows:
            try:
                length = len(template.render(opening_messages(row), loaded.tools))
            except ChatTemplateError as error:
                left_out.append(LeftOutRow(row.index, str(error)))
                continue
            lengths[row.index] = length
            if length > config.max_prompt:
                reason = f"its prompt has {length:,} tokens; max_prompt_length is {config.max_prompt:,}"
                left_out.append(LeftOutRow(row.index, reason))
    without = {each.row for each in left_out}
    usable = [row for row in rows if row.index not in without]
    if len(usable) < 2:
        raise UsageError(
            f"{config.dataset}: {len(usable)} of {len(rows)} rows can be trained on; training needs 2 or more"
            + (f"; row {left_out[0].row}: {left_out[0].reason}" if left_out else "")
        )
    by_content = sorted(usable, key=lambda row: blake2b(row.id.encode(), digest_size=8).digest())
    held_out = {row.index for row in by_content[: config.held_out_of(len(usable))]}
    trained = [row.index for row in usable if row.index not in held_out]
    return Rows(trained, sorted(held_out), left_out, loaded.tools, loaded.functions, lengths)
