"""Whatever a model's endpoint replies costs at most its own rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import run_osmosis
from fuzz import CASES, generator, mutated, nested
from osmosis_ai.bounds import MAX_COUNT, too_deep
from osmosis_ai.errors import ModelError
from osmosis_ai.models.base import parse_reply
from osmosis_ai.records import Completion
from osmosis_ai.testing import Reply, Request, ScriptedEndpoint, raw_json, text

REPLY = {
    "id": "1",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning_content": "so",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            "logprobs": {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]},
            "token_ids": [1, 2],
        }
    ],
    "prompt_token_ids": [3],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


def test_a_mutated_reply_is_a_completion_that_can_be_stored_or_an_error() -> None:
    chance = generator()
    kinds = set()
    for _ in range(CASES):
        reply: Any = REPLY
        for _ in range(chance.choice([1, 2, 4])):
            reply = mutated(reply, chance)
        try:
            completion = parse_reply(reply, source="it", position=1)
        except ModelError as error:
            kinds.add(error.kind)
            continue
        kinds.add("completion")
        assert not too_deep(completion.message)
        assert all(0 <= count <= MAX_COUNT for count in msgspec.structs.astuple(completion.usage))
        assert msgspec.json.decode(msgspec.json.encode(completion), type=Completion) == completion
        calls = completion.message.get("tool_calls") or []
        assert len({call["id"] for call in calls}) == len(calls)
        assert all(isinstance(call["function"]["arguments"], str) for call in calls)
    assert {"completion", "bad_reply"} <= kinds


@pytest.mark.parametrize(
    ("reply", "failed"),
    [
        ({"usage": {"prompt_tokens": True}}, None),
        ({"usage": {"prompt_tokens": 2**62, "completion_tokens": 2**62}}, None),
        ({"message": {"content": "done", "extra": nested(1, 940)}}, "nested more than 200 levels deep"),
    ],
    ids=["a truth for a number", "too large", "as deep as can be read"],
)
def test_the_other_rollouts_go_on(tmp_path: Path, repo: Path, reply: dict[str, Any], failed: str | None) -> None:
    first = json.loads((repo / "test_data.jsonl").read_text(encoding="utf-8").splitlines()[0])["user_prompt"]
    body = {"choices": [{"message": reply.get("message", {"content": "done"})}], "usage": reply.get("usage")}

    def script(request: Request) -> Reply:
        return raw_json(body) if request.messages[1]["content"] == first else text("done")

    with ScriptedEndpoint(script).run_in_thread() as endpoint:
        model = ["--base-url", endpoint.url, "--model", "m"]
        done = run_osmosis("test", *model, "--json", cwd=repo)
        assert [result["success"] for result in done.json["results"]] == [failed is None, True, True], done.stderr
        assert done.code == (0 if failed is None else 1)
        assert failed is None or failed in done.json["results"][0]["error"]
    # What is stored can be read again.
    assert len(run_osmosis("runs", "show", "--json", cwd=repo).json["rollouts"]) == 3
