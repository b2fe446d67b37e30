"""The whole loop: the real trainer, a tiny model made in code, and real MCP tools. Minutes; run by make test-train."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from test_train_run import REWARD, TOOLS, figures, info
from tokenizers import AddedToken, Tokenizer

from commands import command_line, run_osmosis
from osmosis_ai.models.policy.replies import form_of, read_reply
from osmosis_ai.models.policy.template import ChatTemplate, ChatTemplateError
from osmosis_ai.records import Message
from repos import write_repo
from running import running
from token_models import PLAIN, make_tokenizer
from waiting import PATIENCE

pytestmark = pytest.mark.train

PYTHON = os.environ.get("TRAINER_PYTHON", "")
TRAINER_FOLDER = Path(__file__).parents[2] / "trainers" / "trl"
WARM_UP = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import tiny_model

rows = [json.loads(line) for line in open(sys.argv[1])]
tiny_model.warm_up(Path(sys.argv[2]), [row["messages"] for row in rows], rows[0]["tools"])
"""
CONFIG = """
[experiment]
rollout = "mcp"
entrypoint = "main.py"
model_path = "../model"
dataset = "test_data"

[training]
lr = 5e-4
n_samples_per_prompt = 8
rollout_batch_size = 4
total_epochs = 2
max_response_length = 160

[checkpoints]
eval_interval = 100
checkpoint_save_freq = 6

[advanced]
eval_rows = 4
full_weights = true
beta = 0.0
lr_scheduler_type = "constant"
"""
EDGE = 4
"""Steps at the beginning and at the end whose rewards are compared: 128 rollouts each."""
MARGIN = 0.15
"""Three and a half standard errors of such a difference, if the policy stayed as it was."""


def warm_rows() -> list[dict[str, Any]]:
    """Sums that a third of the reference solutions solve with `add`, and the others with `plus`."""
    sums = [(number % 10, (number * 7 + 3) % 10, ("plus", "plus", "add")[number % 3]) for number in range(40)]
    return [
        {
            "system_prompt": "Use a tool.",
            "user_prompt": f"{a} + {b}?",
            "ground_truth": str(a + b),
            "solution": [{"tool": tool, "arguments": {"a": a, "b": b}}],
        }
        for a, b, tool in sums
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that imitates the reference solutions."""
    folder = tmp_path_factory.mktemp("warm")
    root = write_repo(folder / "repo", main=TOOLS, rewards=REWARD, rows=warm_rows())
    assert run_osmosis("test", "--model", "offline/oracle", cwd=root).code == 0
    file = folder / "transcripts.jsonl"
    assert run_osmosis("runs", "export", "--format", "jsonl", "-o", file, cwd=root).code == 0
    environ = {**os.environ, "PYTHONPATH": str(TRAINER_FOLDER / "tests" / "helpers")}
    subprocess.run([PYTHON, "-c", WARM_UP, str(file), str(folder / "model")], env=environ, check=True)
    return folder / "model"


@pytest.fixture
def workspace(tmp_path: Path, model: Path) -> Path:
    root = write_repo(tmp_path / "repo", main=TOOLS, rewards=REWARD, rows=warm_rows())
    (tmp_path / "model").symlink_to(model)
    (root / "configs/training").mkdir(parents=True)
    (root / "configs/training/sums.toml").write_text(CONFIG, encoding="utf-8")
    return root


COMMAND = ("train", "run", "configs/training/sums.toml", "--trainer", f"{PYTHON} -m osmosis_trainer_trl")
ENVIRON = {"PYTHONPATH": str(TRAINER_FOLDER)}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(workspace: Path, seed: int) -> None:
    config = workspace / "configs/training/sums.toml"
    config.write_text(f"{CONFIG}seed = {seed}\n", encoding="utf-8")
    done = run_osmosis(*COMMAND, "--name", "first", cwd=workspace, env=ENVIRON)
    assert done.code == 0, done.stderr
    shown = info(workspace)
    steps = figures(shown, "rollouts")
    rewards = [steps[step]["reward"] for step in sorted(steps)]
    rise = statistics.fmean(rewards[-EDGE:]) - statistics.fmean(rewards[:EDGE])
    assert rise > MARGIN, rewards
    assert {step["left_out"] for step in steps.values()} == {0}
    checkpoint = Path(shown["training_run"]["checkpoints"][-1]["path"])
    assert (checkpoint / "model.safetensors").is_file()


@pytest.mark.parametrize("victim", ["trainer", "runtime"])
def test_a_killed_process_in_the_middle_of_a_step_costs_no_finished_checkpoint(workspace: Path, victim: str) -> None:
    config = workspace / "configs/training/sums.toml"
    text = CONFIG.replace("total_epochs = 2", "total_epochs = 1").replace("save_freq = 6", "save_freq = 2")
    config.write_text(text, encoding="utf-8")
    with running(*COMMAND, "--name", "first", cwd=workspace, env=ENVIRON) as started:
        wait_for_step(workspace, 3)
        trainers = [one for one in started.descendants() if command_line(one).startswith(f"{PYTHON} -m")]
        (trainers[0] if victim == "trainer" else started.process).kill()
        if victim == "trainer":
            assert "the trainer ended with status" in started.wait().stderr
    assert [each["step"] for each in info(workspace)["training_run"]["checkpoints"]] == [2]
    done = run_osmosis(*COMMAND, "--resume", "first", cwd=workspace, env=ENVIRON)
    assert done.code == 0, done.stderr
    assert "continuing first after step 2" in done.stderr
    run = info(workspace)["training_run"]
    assert (run["status"], run["step"]) == ("finished", 9)


def wait_for_step(workspace: Path, step: int) -> None:
    """Wait until a step's rollouts are there, which takes longer than anything else that tests wait for."""
    state = workspace / ".osmosis/training/first/run.json"
    deadline = monotonic() + 20 * PATIENCE
    while not (state.exists() and json.loads(state.read_text(encoding="utf-8"))["step"] == step):
        assert monotonic() < deadline
        sleep(0.1)


def test_a_dry_run_serves_the_model_as_it_is(workspace: Path) -> None:
    done = run_osmosis(*COMMAND, "--dry", "--json", cwd=workspace, env=ENVIRON)
    report = json.loads(done.stdout)
    assert report["policy"]["groups_with_variance"] > 0
    assert 0 < report["policy"]["sampled_share"] < 1
    assert list((workspace / ".osmosis/training").iterdir()) == []


NO_TOOLS = "Conversation roles must alternate|no element 0|no attribute 'text'"
"""What templates say that can't render a tool's result, or no text."""


def test_the_templates_that_trl_bundles() -> None:
    code = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    found = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    rendered = {}
    for file in sorted(Path(found, "chat_templates").glob("*.jinja")):
        rendered[file.stem] = _try_template(file.read_text(encoding="utf-8"))
    unusable = {name: said for name, said in rendered.items() if said}
    for name, said in unusable.items():
        assert any(part in said for part in NO_TOOLS.split("|")), (name, said)
    assert len(rendered) - len(unusable) >= 50


def _try_template(source: str) -> str:
    """Compare what comes after a reply with the template's own rendering; return why it can't be rendered, if so."""
    tokenizer = _tokenizer_for(source)
    message: Message = {"role": "user", "content": "one plus two?"}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "3"}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}]
    try:
        # A model says itself what ends its replies, if its template doesn't.
        stops = [tokenizer.token_to_id("</s>")]
        template = ChatTemplate(tokenizer, source, {"bos_token": "<s>", "eos_token": "</s>"}, stops)
        alone = template.render([message, reply], tools, generate=False)
        whole = template.render([message, reply, result], tools)
    except ChatTemplateError as error:
        return str(error)
    opening = len(template.render([message], tools))
    ends = [number for number, token in enumerate(alone) if token in template.stop_ids and number >= opening]
    last = alone[ends[-1]] if ends else -1
    after = template.after(reply, last, [result])
    assert whole[len(whole) - len(after) :] == after
    assert template.text(after).count("3") >= 1 or not template.shows_tools
    form = form_of(source)
    if form is not None and template.shows_tools and ends:
        read = read_reply(template.text(alone[opening : ends[-1]]), form, tools, 1)
        assert [one["function"] for one in read["tool_calls"]] == [call["function"]]
    return ""


def _tokenizer_for(source: str) -> Tokenizer:
    """Make a tokenizer whose special tokens are those that a template writes."""
    import re

    tokenizer = make_tokenizer()
    names = set(re.findall(r"<\|[^|<>\s]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_turn>|<eos>|<bos>|<｜[^<>]+｜>", source))
    names |= {"<s>", "</s>"}
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in sorted(names - {*PLAIN})]
    )
    return tokenizer
