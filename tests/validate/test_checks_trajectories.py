"""Reward functions over `messages`: the controls vary tool calls, and don't call what they can't decide an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commands import run_osmosis
from osmosis_ai.records import Row
from osmosis_ai.validate.trajectories import trajectories
from repos import write_repo

HEAD = "import json\nimport re\n\nfrom osmosis_ai import osmosis_reward\n\n\n@osmosis_reward\n"
FULL = "(messages: list, ground_truth: str | None, metadata: dict) -> float:\n"
CALLS = "    calls = [call['function'] for message in messages for call in message.get('tool_calls') or []]\n"
RESULTS = "    results = [message['content'] for message in messages if message['role'] == 'tool']\n"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "reward-functions.md"


def findings(tmp_path: Path, rewards: str, *options: str, severity: str | None = None) -> dict[str, str]:
    """Return the codes of the reward functions' findings, with their messages."""
    root = write_repo(tmp_path / "repo", rewards=rewards)
    found = run_osmosis("validate", "--json", *options, cwd=root).json["findings"]
    return {
        one["code"]: one["message"]
        for one in found
        if one["code"].startswith("OSM3") and severity in (None, one["severity"])
    }


@pytest.mark.parametrize(
    "body",
    [
        "    return 1.0 / (1 + sum(message['role'] == 'tool' for message in messages))\n",
        "    return float(any(message['role'] == 'tool' for message in messages))\n",
        f"{CALLS}    return float(any(call['name'] == 'add' for call in calls))\n",
        f"{CALLS}    return float(len(calls) == 2)\n",
        f"{RESULTS}    return float(all('Error' not in result for result in results))\n",
        f"{CALLS}    answer = messages[-1]['content'] == ground_truth\n    return 0.5 * answer + 0.5 * bool(calls)\n",
    ],
    ids=["few calls", "used a tool", "the right tool", "how many", "no errors", "calls and the answer"],
)
def test_a_reward_for_the_tool_calls_is_a_note_and_no_error(body: str, tmp_path: Path) -> None:
    found = findings(tmp_path, f"{HEAD}def judged{FULL}{body}")
    assert set(found) == {"OSM319"}
    assert found["OSM319"].startswith("the same answer scores 0")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("    return 0.5\n", "OSM310"),
        ("    return float(ground_truth in messages[-1]['content'])\n", "OSM302"),
        ("    return float(messages[-3]['tool_calls'][0]['function']['name'] == 'add')\n", "OSM312"),
        (f"{CALLS}    import random\n    return random.random()\n", "OSM315"),
    ],
    ids=["constant", "contains", "raises without a call", "random"],
)
def test_what_is_wrong_with_any_trajectory_is_still_an_error(body: str, code: str, tmp_path: Path) -> None:
    assert code in findings(tmp_path, f"{HEAD}def judged{FULL}{body}", severity="error")


def test_the_functions_of_the_documentation_have_no_errors(tmp_path: Path) -> None:
    text = DOCUMENTED.read_text(encoding="utf-8")
    code = text.partition("```python file=reward_fn/answers.py\n")[2].partition("```")[0]
    assert "def ends_with_truth" in code
    assert "def few_calls" in code
    assert findings(tmp_path, code, severity="error") == {}


def test_trajectories_differ_in_calls_order_and_results_only() -> None:
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        }
        for name in ("add", "subtract")
    ]
    row = Row(index=0, id="r", system_prompt="Use tools.", user_prompt="1 + 2?", ground_truth="3")
    made = {one.what: one.messages for one in trajectories([row], tools)}
    assert {messages[-1]["content"] for messages in made.values()} == {"3"}

    def names(what: str) -> list[str]:
        return [call["function"]["name"] for message in made[what] for call in message.get("tool_calls") or []]

    assert names("no tool call") == []
    assert names("one call of subtract") == ["subtract"]
    assert names("five calls of add") == ["add"] * 5
    assert names("one call of every tool, in reverse order") == ["subtract", "add"]
    assert '"a"' in made["one call of add"][2]["tool_calls"][0]["function"]["arguments"]
    assert len({str(messages) for messages in made.values()}) == len(made)
