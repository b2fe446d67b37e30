"""Watch mode with rubrics: a save rescores only with the functions it changes, without needless judge calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.testing import Reply, Request, text
from watching import REWARD, calls_the_tool, redone, repository, watching

RUBRIC = """
from osmosis_ai import evaluate_rubric, osmosis_rubric


@osmosis_rubric
def polite(solution_str: str, ground_truth: str | None, extra_info: dict, **kwargs) -> float:
    from reward_rubric.wording import RUBRIC

    model_info = {"provider": extra_info["provider"], "model": extra_info["model"]}
    return evaluate_rubric(rubric=RUBRIC, solution_str=solution_str, model_info=model_info)
"""

FILE = """
version: 1
default_model_info: {provider: openai, model: some-judge}
rubrics:
  - id: short
    rubric: Is it short?
  - id: clear
    rubric: Is it clear?
"""

FILES: dict[str, str | None] = {
    "reward_rubric/manners.py": RUBRIC,
    "reward_rubric/wording.py": 'RUBRIC = "Is it polite?"\n',
    "rubric_configs.yaml": FILE,
}
JUDGED = ("--judge-model", "the-judge", "--judge-base-url", "{url}")


def judge_or_agent(request: Request) -> Reply:
    if request.model == "the-judge":
        return text('{"score": 0.75, "explanation": "fine"}')
    return calls_the_tool(request)


@pytest.mark.litellm
@pytest.mark.in_process
def test_a_save_redoes_the_scores_of_the_functions_that_it_changes(tmp_path: Path) -> None:
    root = repository(tmp_path, FILES)
    with watching(root, "--rubric", "all", *JUDGED, script=judge_or_agent) as repo:

        def judged() -> list[str]:
            chats = repo.endpoint.chats[repo._asked :]
            repo.requests()
            texts = [chat.messages[-1]["content"] for chat in chats if chat.model == "the-judge"]
            return sorted({word for word in ("short", "brief", "clear", "polite", "kind") for t in texts if word in t})

        first = repo.next()
        assert redone(first) == (2, 8, 0)
        assert first["results"][0]["scores"] == {
            "reward_fn.rewards:exact": 1.0,
            "reward_rubric.manners:polite": 0.75,
            "rubric_configs.yaml#short": 0.75,
            "rubric_configs.yaml#clear": 0.75,
        }
        assert judged() == ["clear", "polite", "short"]

        changed = repo.save({"rubric_configs.yaml": "# The team's.\n" + FILE.replace("short?", "brief?")})
        assert changed["iteration"]["trigger"] == ["rubric_configs.yaml"]
        assert redone(changed) == (0, 2, 0)
        assert judged() == ["brief"]

        assert redone(repo.save({"reward_fn/rewards.py": REWARD.replace("1.0 if", "0.5 if")})) == (0, 2, 0)
        assert judged() == []

        assert redone(repo.save({"reward_rubric/wording.py": 'RUBRIC = "Is it kind?"\n'})) == (0, 2, 0)
        assert judged() == ["kind"]

        broken = repo.save({"rubric_configs.yaml": FILE.replace("rubrics:", "rubric:")})
        assert "did you mean 'rubrics'" in broken["error"]["message"]

        mended = repo.save({"rubric_configs.yaml": FILE.replace("id: clear", "id: lucid")})
        assert redone(mended) == (0, 4, 0)
        assert judged() == ["clear", "short"]
        assert list(mended["results"][0]["scores"]) == [
            "reward_fn.rewards:exact",
            "reward_rubric.manners:polite",
            "rubric_configs.yaml#short",
            "rubric_configs.yaml#lucid",
        ]
        assert mended["results"][0]["reward"] == (0.5 + 3 * 0.75) / 4
