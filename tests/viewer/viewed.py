"""Stores and pages for tests of the viewer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal
from starlette.testclient import TestClient

from osmosis_ai.conversation import message_text
from osmosis_ai.records import Failure, JudgeCall, Rollout, Row, Score, ToolCall, Turn, Usage
from osmosis_ai.reward_fn.statistics import summarize
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.training.record import MetricsLine, TrainingRecord, TrainingState
from osmosis_ai.viewer.app import build_app
from osmosis_ai.viewer.security import Guard, OneToken
from osmosis_ai.viewer.stores import Stores

PORT = 8123
TOKEN = "the-token"
ADDRESS = f"http://127.0.0.1:{PORT}"


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def links(self, beginning: str) -> list[str]:
        return [
            str(attributes["href"]) for _, attributes in self.found if str(attributes.get("href")).startswith(beginning)
        ]


@contextmanager
def viewer(
    *roots: Path, cookie: bool = True, host: str = "127.0.0.1", addresses: Sequence[str] = ()
) -> Iterator[TestClient]:
    """A client of the viewer of these repositories, with or without the cookie."""
    pages = build_app(Stores([(root, root / ".osmosis") for root in roots]))
    app = Guard(OneToken(pages, TOKEN), host=host, port=PORT, lifespan=pages, addresses=addresses)
    cookies = {f"osmosis-view-{PORT}": TOKEN} if cookie else {}
    with TestClient(app, ADDRESS, cookies=cookies, follow_redirects=False) as client:
        yield client


Made = tuple[Rollout, list[Score], dict[str, Any]]


def made(index: int, attempt: int = 0, *, score: float | None = 1.0, **changes: Any) -> Made:
    """A rollout of one tool call, its score, and the fields of its row."""
    text: str = changes.pop("text", f"What is {index} + 2?")
    row = {"ground_truth": str(index + 2), **changes.pop("row", {})}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {index}, "b": 2}}'}}
    messages = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": text},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": f'{{"sum": {index + 2}}}'},
        {"role": "assistant", "content": str(index + 2)},
    ]
    usage = Usage(100, 10, 110)
    values: dict[str, Any] = {
        "messages": messages,
        "finish_reason": "error" if changes.get("failure") else "stop",
        "duration_ms": 12.0 + index,
        "usage": Usage(200, 20, 220),
        "turns": [Turn(0, "tool_calls", usage, 5.0, "m"), Turn(1, "stop", usage, 5.0, "m")],
        "tool_calls": [ToolCall(0, "c", "add", '{"a": 1}', 2.0)],
        **changes,
    }
    rollout = Rollout(f"r{index}.{attempt}", index, f"row{index}", attempt, "policy", **values)
    if changes.get("failure"):
        return rollout, [], row
    failed = Failure("reward", "ValueError: no number", "reward_raised", "reward_fn/r.py", 3, "Traceback …")
    asked = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Is it so?"}]
    judged = [JudgeCall("openai/judge", 7.0, reply="I like it", score=0.5, explanation="nice", prompt=asked)]
    scores = [Score("r:exact", score, failed if score is None else None, 1.0, "because", judged if index == 0 else [])]
    return rollout, scores, row


def write_run(root: Path, rollouts: Sequence[Made], *, status: Any = "finished", **config: Any) -> str:
    """Store a run in a repository's store, and return its id."""

    async def write() -> str:
        with RunStore.open(root) as store:
            known = {"model": "m/one", "dataset": "/data/rows.jsonl", "n": 1, "functions": ["r:exact"]}
            run_id = await store.create_run("eval", identity={}, config={**known, "planned": len(rollouts), **config})

            async def save(rollout: Rollout, scores: list[Score], fields: dict[str, Any]) -> None:
                prompt = message_text(rollout.messages[1]["content"])
                row = Row(rollout.row_index, rollout.row_id, "Use the tools.", prompt, **fields)
                key = await store.save_rollout(run_id, rollout, row)
                if scores:
                    await store.save_scores({key: scores})

            await asyncio.gather(*(save(*each) for each in rollouts))
            by_row: dict[int, list[float | None]] = {}
            for rollout, scores, _ in rollouts:
                by_row.setdefault(rollout.row_index, []).append(scores[0].value if scores else None)
            found = summarize(list(by_row.values()), 1.0)
            interval = {"r:exact": found.confidence_interval}
            summary = {"functions": {"r:exact": found.mean}, "intervals": interval, "total_tokens": 1}
            if status != "running":
                await store.mark(run_id, status, summary)
            return run_id

    # In a thread of its own, because Playwright runs a loop in this one.
    with start_blocking_portal() as portal:
        return portal.call(write)


def write_training(root: Path, name: str = "first", lines: Sequence[MetricsLine] = (), **state: Any) -> TrainingRecord:
    """Record a training run in a repository's store; its process is gone."""
    record = TrainingRecord(root / ".osmosis", name)
    known = {"config": "configs/training/sums.toml", "model": "/models/qwen", "dataset": "/data/rows.jsonl"}
    counts = {"rows": [0, 1, 2], "held_out": [3], "left_out": [], "options": {}, "policy_port": 1, "total_steps": 20}
    record.create()
    values = {"trainer": "trl", "status": "running", "created_at": 1.7e9, **known, **counts, **state}
    record.write(TrainingState(name, **values))
    for line in lines:
        record.add(line)
    return record


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202egnp.exe\u2066",
    "\ud800 alone",
    "</pre></details></article><b>",
    "&lt;b&gt;",
    "\x00\x0b\r",
]


def hostile_run(root: Path, text: str) -> str:
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
    nested = {"id": "c", "type": "function", "function": {"name": "n", "arguments": '{"\\ud800": "\\ud800<b>"}'}}
    messages = [
        {"role": "system", "content": text},
        {
            "role": "user",
            "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": text}}],
        },
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call, nested]},
        {"role": "tool", "tool_call_id": text, "content": text},
        {"role": text, "content": text},
    ]
    failure = Failure("tool", text, "tool_raised", text, 1, text)
    calls = [
        ToolCall(0, text, text, text, 1.0, "exception", content=[{"type": "image", "data": text}], failure=failure)
    ]
    row = {"ground_truth": text, "extra": {text: text}}
    rollout = made(0, messages=messages, tool_calls=calls, failure=failure, text=text, row=row)
    broken = made(1, score=None, messages=messages, row=row)
    return write_run(root, [rollout, broken], model=text, dataset=text, base_url=text, functions=[text], tools=[])


BENIGN = {
    "html",
    "head",
    "meta",
    "title",
    "link",
    "script",
    "body",
    "a",
    "header",
    "nav",
    "span",
    "button",
    "kbd",
    "main",
}
