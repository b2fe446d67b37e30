"""`osmosis train run` with a trainer that speaks the protocol and learns nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import Finished, Osmosis, command_line, run_osmosis
from osmosis_ai.store.queries import Queries
from repos import write_repo
from running import running
from token_models import write_model
from waiting import PATIENCE

TRAINER = f"{sys.executable} {Path(__file__).parents[1] / 'helpers' / 'fake_trainer.py'}"
TOOLS = """
from fastmcp import FastMCP

mcp = FastMCP("sums")


@mcp.tool
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    return a + b


@mcp.tool
def plus(a: int, b: int) -> int:
    \"\"\"Sum two numbers.\"\"\"
    return a + b
"""
REWARD = """
from __future__ import annotations

from osmosis_ai import osmosis_reward


@osmosis_reward
def prefers_add(messages: list, ground_truth: str | None, metadata: dict) -> float:
    return float([c["function"]["name"] for m in messages for c in m.get("tool_calls") or []] == ["add"])
"""
ROWS = [
    {
        "system_prompt": "Use a tool.",
        "user_prompt": f"{number} + 2?",
        "ground_truth": str(number + 2),
        "solution": [{"tool": "add", "arguments": {"a": number, "b": 2}}],
    }
    for number in range(6)
]
DYING_ONCE = """
    import os
    from pathlib import Path

    try:
        Path(__file__).with_name("died").mkdir()
    except FileExistsError:
        pass
    else:
        os._exit(1)
    return"""
CONFIG = """
[experiment]
rollout = "mcp"
entrypoint = "main.py"
model_path = "model"
dataset = "test_data"

[training]
n_samples_per_prompt = 2
rollout_batch_size = 2

[checkpoints]
eval_interval = 2
checkpoint_save_freq = 1
"""
STEPS = 2


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A repository with a training config, and a model without weights."""
    root = write_repo(tmp_path / "repo", main=TOOLS, rewards=REWARD, rows=ROWS)
    (root / "configs/training").mkdir(parents=True)
    (root / "configs/training/sums.toml").write_text(CONFIG, encoding="utf-8")
    write_model(root / "model")
    return root


def train(workspace: Path, *arguments: str, faults: dict[str, int] | None = None) -> Finished:
    """Run `osmosis train run` with the trainer that learns nothing."""
    env = {"FAKE_TRAINER": json.dumps(faults or {})}
    command = ("train", "run", "configs/training/sums.toml", "--trainer", TRAINER, *arguments)
    return run_osmosis(*command, cwd=workspace, env=env)


def info(workspace: Path, name: str = "first") -> Any:
    """Return what `train info --local` says."""
    done = run_osmosis("train", "info", name, "--local", "--json", cwd=workspace)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)["data"]


def figures(shown: Any, kind: str) -> dict[int, dict[str, float]]:
    return {line["step"]: line["metrics"] for line in shown["metrics"] if line["kind"] == kind}


def edit(workspace: Path, old: str, new: str) -> None:
    config = workspace / "configs/training/sums.toml"
    text = config.read_text(encoding="utf-8")
    assert old in text
    config.write_text(text.replace(old, new), encoding="utf-8")


def test_each_step_is_a_run_and_its_metrics_are_recorded(workspace: Path) -> None:
    done = train(workspace, "--name", "first")
    assert done.code == 0, done.stderr
    assert "step 2 of 2  reward " in done.stdout
    assert "first is finished: 2 steps; the LoRA adapter is " in done.stderr
    shown = info(workspace)
    run = shown["training_run"]
    assert (run["status"], run["step"], run["total_steps"]) == ("finished", STEPS, STEPS)
    assert (len(run["rows"]), len(run["held_out"])) == (5, 1)
    assert [Path(each["path"]).name for each in run["checkpoints"]] == ["checkpoint-1", "checkpoint-2"]
    assert figures(shown, "trainer")[2]["loss"] == 0.5
    assert figures(shown, "evaluation")[2]["rows"] == 1
    store = Queries(workspace / ".osmosis/runs.db")
    for step in (1, 2):
        stored = store.find_run(f"first.step-{step:05d}")
        assert store.count_rollouts(stored.id) == 4
        (totals,) = store.function_totals(stored.id)
        assert figures(shown, "rollouts")[step]["reward"] == totals.mean
    assert store.find_run("first.eval-00002").status == "finished"


def test_a_steps_rollouts_hold_the_tokens_that_were_sampled(workspace: Path) -> None:
    assert train(workspace, "--name", "first").code == 0
    exported = run_osmosis("runs", "export", "first.step-00001", "--format", "tokens", cwd=workspace)
    sequences = [json.loads(line) for line in exported.stdout.splitlines()]
    assert len(sequences) == 4
    for sequence in sequences:
        assert sequence["transitions"] == {"clean": 1, "realign": 0, "fork": 0}
        assert 0 < sum(sequence["mask"]) < len(sequence["mask"])
        assert len(sequence["logprobs"]) == len(sequence["input_ids"])


def test_the_token_of_both_sides_reaches_no_file(workspace: Path) -> None:
    assert train(workspace, "--name", "first").code == 0
    log = (workspace / ".osmosis/training/first/trainer.log").read_text(encoding="utf-8")
    assert "with the token [masked]" in log


def test_the_trainer_does_not_get_the_keys_of_the_environment(workspace: Path, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os; print(sorted(os.environ)); raise SystemExit(1)", encoding="utf-8")
    done = run_osmosis(
        *("train", "run", "configs/training/sums.toml", "--trainer", f"{sys.executable} {script}"),
        cwd=workspace,
        env={"OPENAI_API_KEY": "sk-0123456789", "HOME_SWEET_HOME": "x"},
    )
    assert "HOME_SWEET_HOME" in done.stderr
    assert "OPENAI_API_KEY" not in done.stderr


def test_a_trainer_that_fails_is_shown_with_its_last_lines_and_can_be_continued(workspace: Path) -> None:
    done = train(workspace, "--name", "first", faults={"fail_at": 2})
    assert done.code == 1
    assert "the trainer ended with status 3; its last lines:" in done.stderr
    assert "out of memory" in done.stderr
    assert "--resume first continues it" in done.stderr
    before = info(workspace)
    assert (before["training_run"]["status"], len(before["training_run"]["checkpoints"])) == ("failed", 1)
    store = Queries(workspace / ".osmosis/runs.db")
    drawn = store.find_run("first.step-00002").id

    again = train(workspace, "--resume", "first")
    assert again.code == 0, again.stderr
    assert "continuing first after step 1" in again.stderr
    after = info(workspace)
    assert after["training_run"]["status"] == "finished"
    # The policy that had drawn them is that of the checkpoint.
    assert store.find_run("first.step-00002").id == drawn
    assert figures(after, "rollouts")[2]["reward"] == figures(before, "rollouts")[2]["reward"]


@pytest.mark.in_process
def test_ctrl_c_ends_the_trainer_and_the_run_can_be_continued(workspace: Path) -> None:
    command = ("train", "run", "configs/training/sums.toml", "--trainer", TRAINER)
    with running(*command, "--name", "first", cwd=workspace, env={"FAKE_TRAINER": '{"hang_at": 2}'}) as first:
        first.until(lambda: (workspace / ".osmosis/training/first/checkpoints/checkpoint-1").exists())
        first.until(lambda: _reached(workspace, 2))
        first.interrupt()
        done = first.wait()
    assert (done.code, "interrupted; osmosis train run" in done.stderr) == (130, True), done.stderr
    assert not [one for one in psutil.Process().children(recursive=True) if "fake_trainer" in command_line(one)]
    assert info(workspace)["training_run"]["status"] == "interrupted"
    with running(*command, "--resume", "first", cwd=workspace) as second:
        assert second.wait().code == 0


def _reached(workspace: Path, step: int) -> bool:
    state = json.loads((workspace / ".osmosis/training/first/run.json").read_text(encoding="utf-8"))
    return bool(state["step"] == step)


def test_a_killed_runtime_takes_its_trainer_along_and_the_run_can_be_continued(workspace: Path) -> None:
    command = ("train", "run", "configs/training/sums.toml", "--trainer", TRAINER, "--name", "first")
    with running(*command, cwd=workspace, env={"FAKE_TRAINER": '{"hang_at": 2}'}) as started:
        started.until(lambda: (workspace / ".osmosis/training/first/checkpoints/checkpoint-1").exists())
        started.until(lambda: _reached(workspace, 2))
        trainers = started.descendants()
        started.process.kill()
        _, alive = psutil.wait_procs(trainers, PATIENCE)
        assert alive == []
    assert info(workspace)["training_run"]["status"] == "interrupted"
    assert train(workspace, "--resume", "first").code == 0


def test_a_failed_score_is_not_a_reward_of_zero(workspace: Path) -> None:
    broken = REWARD.replace(
        "    return", '    if "2 + 2" in str(messages):\n        raise ValueError("odd")\n    return'
    )
    (workspace / "reward_fn/rewards.py").write_text(broken, encoding="utf-8")
    edit(workspace, "eval_interval = 2", "eval_interval = 9")
    edit(workspace, "rollout_batch_size = 2", "rollout_batch_size = 5")
    assert train(workspace, "--name", "first").code == 0
    shown = info(workspace)
    store = Queries(workspace / ".osmosis/runs.db")
    scores = [
        score.value
        for scored in store.scored(store.find_run("first.step-00001").id)
        for score in scored.scores.values()
        if score.value is not None
    ]
    step = figures(shown, "rollouts")[1]
    left_out = 0 if 2 in shown["training_run"]["held_out"] else 2
    assert (step["left_out"], len(scores)) == (left_out, 10 - left_out)
    assert step["reward"] == pytest.approx(sum(scores) / len(scores))


def test_a_step_without_a_single_reward_ends_the_run(workspace: Path) -> None:
    broken = REWARD.replace("    return", '    raise ValueError("odd")\n    return')
    (workspace / "reward_fn/rewards.py").write_text(broken, encoding="utf-8")
    done = train(workspace, "--name", "first")
    assert done.code == 1
    assert "no rollout of step 1 can be learned from: 4 times: no score by " in done.stderr
    assert "ValueError: odd" in done.stderr
    assert info(workspace)["training_run"]["status"] == "failed"


def test_rollouts_lost_with_a_worker_are_sampled_again(workspace: Path) -> None:
    (workspace / "mcp/main.py").write_text(TOOLS.replace("    return", DYING_ONCE), encoding="utf-8")
    assert train(workspace, "--name", "first").code == 0
    assert (workspace / "mcp/died").exists()
    assert [step["left_out"] for step in figures(info(workspace), "rollouts").values()] == [0, 0]


def test_a_reply_to_different_prompt_tokens_is_never_learned_from(workspace: Path) -> None:
    done = train(workspace, "--name", "first", faults={"drift_at": 1})
    assert done.code == 1
    assert "prompt tokens that differ from those it was sent" in done.stderr


def test_rows_with_too_long_prompts_are_left_out_before_the_start(workspace: Path) -> None:
    rows = [*ROWS, {**ROWS[0], "user_prompt": "long " * 500}]
    (workspace / "test_data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    edit(workspace, "rollout_batch_size = 2", "rollout_batch_size = 2\nmax_prompt_length = 1500")
    done = train(workspace, "--name", "first")
    assert done.code == 0, done.stderr
    assert "row 6 is left out: its prompt has " in done.stderr
    state = info(workspace)["training_run"]
    assert [each["row"] for each in state["left_out"]] == [6]
    assert 6 not in [*state["rows"], *state["held_out"]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('rollout = "mcp"', 'rollout = "nope"', "the folder rollouts/nope doesn't exist"),
        ('model_path = "model"', 'model_path = "org/none"', "`hf download org/none`"),
        ('dataset = "test_data"', 'dataset = "none"', "--dataset-file FILE"),
        ("n_samples_per_prompt = 2", "n_samples_per_prompt = 1", "there must be 2 or more"),
        ("rollout_batch_size = 2", "rollout_batch_size = 6", "there are only 5 rows to train on"),
        ("rollout_batch_size = 2", "rollout_batch_size = 0", "sums.toml:10: rollout_batch_size is 0"),
        ("rollout_batch_size = 2", "max_prompt_length = 3", "0 of 6 rows can be trained on"),
        ("[checkpoints]", "[sampling]\nrollout_temperature = 0\n[checkpoints]", "nothing would be learned"),
        ("[checkpoints]", '[advanced]\ntrainer = "other"\n[checkpoints]', "trainer is 'other'; it must be trl"),
        ("[checkpoints]", '[advanced]\neval_rows = "x"\n[checkpoints]', "eval_rows is 'x'; it must be an integer"),
        ("[checkpoints]", '[secrets]\nrequired = ["NO_SUCH"]\n[checkpoints]', "the config needs the secrets NO_SUCH"),
    ],
)
def test_an_unusable_config_is_refused(workspace: Path, old: str, new: str, message: str) -> None:
    edit(workspace, old, new)
    done = train(workspace)
    assert (done.code, message in done.stderr) == (2, True), done.stderr
    assert not (workspace / ".osmosis/training").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "x", "--resume", "x"], "remove one of them"),
        (["--resume", "none"], "there is no training run none"),
        (["--name", "../out"], "a training run can't be named '../out': write up to 96 letters"),
        (["--name", "x" * 90], "leave 11 of them for the steps"),
        (["--model-folder", "reward_fn"], "has no tokenizer.json"),
    ],
)
def test_unusable_options_are_refused(workspace: Path, arguments: list[str], message: str) -> None:
    done = train(workspace, *arguments)
    assert (done.code, message in done.stderr) == (2, True), done.stderr


def test_a_missing_trainer_command_is_refused(workspace: Path, osmosis: Osmosis) -> None:
    done = run_osmosis("train", "run", "configs/training/sums.toml", "--trainer", "no-such-trainer", cwd=workspace)
    assert (done.code, "--trainer no-such-trainer: there is no such command" in done.stderr) == (2, True)


def test_a_run_is_not_started_or_resumed_twice_or_with_a_changed_config(workspace: Path) -> None:
    assert train(workspace, "--name", "first").code == 0
    assert "--resume first continues it" in train(workspace, "--name", "first").stderr
    assert "first has finished" in train(workspace, "--resume", "first").stderr
    edit(workspace, "n_samples_per_prompt = 2", "n_samples_per_prompt = 3")
    assert "first can't be resumed: training changed" in train(workspace, "--resume", "first").stderr


def test_a_dry_run_says_what_could_be_learned(workspace: Path) -> None:
    done = train(workspace, "--dry")
    assert done.code == 0, done.stderr
    assert "rows: 5 to train on, 1 held out, 0 left out" in done.stdout
    assert "steps: 2 of 2 rows × 2 rollouts, 8 in all" in done.stdout
    assert "reward of reference solutions 1.000, of an empty answer 0.000 (5 rows)" in done.stdout
    assert "groups that would train: " in done.stdout
    data = json.loads(train(workspace, "--dry", "--json").stdout)
    assert data["policy"]["sampled_share"] == pytest.approx(0.69, abs=0.1)
    assert data["tokens"] > 0


def test_a_dry_run_finds_a_reward_that_cannot_be_learned(workspace: Path) -> None:
    (workspace / "reward_fn/rewards.py").write_text(REWARD.replace("float([", "0 * float(["), encoding="utf-8")
    done = train(workspace, "--dry")
    assert done.code == 1
    assert "the reward doesn't tell reference solutions (0.000) from an empty answer (0.000)" in done.stderr
    assert "no row's rollouts differ in their reward" in done.stderr


def test_the_local_training_runs_are_listed(workspace: Path) -> None:
    assert "no training runs yet" in run_osmosis("train", "list", "--local", cwd=workspace).stderr
    assert train(workspace, "--name", "first").code == 0
    assert "finished  2 of 2" in run_osmosis("train", "list", "--local", cwd=workspace).stdout
    assert "learns nothing" in run_osmosis("train", "logs", "first", "--local", cwd=workspace).stdout
    shown = run_osmosis("train", "info", "first", "--local", cwd=workspace).stdout
    assert "Checkpoint 2:" in shown
    missing = run_osmosis("train", "info", "none", "--local", cwd=workspace)
    assert (missing.code, "there is no training run none" in missing.stderr) == (1, True)


def test_a_platform_s_order_is_trained_and_resumed_after_an_interruption(workspace: Path, tmp_path: Path) -> None:
    """As `osmosis platform up --trainer "osmosis train run"` starts it, and again after an interruption."""
    output = tmp_path / "output"
    output.mkdir()
    order = {
        "schema_version": 1,
        "run_id": "r1",
        "name": "calm-otter-512",
        "model": str(workspace / "model"),
        "code": str(workspace),
        "commit": "0" * 40,
        "rollout": "mcp",
        "entrypoint": "main.py",
        "dataset": str(workspace / "test_data.jsonl"),
        "dataset_sha256": "",
        "dataset_rows": len(ROWS),
        "training": {"n_samples_per_prompt": 2, "rollout_batch_size": 2},
        "sampling": {},
        "checkpoints": {"checkpoint_save_freq": 1, "eval_interval": 9},
        "advanced": {},
        "env": {},
        "secrets": [],
        "output": str(output),
        "store": str(output),
    }
    (tmp_path / "training.json").write_text(json.dumps(order), encoding="utf-8")
    command = ("train", "run", tmp_path / "training.json", "--trainer", TRAINER)
    failed = run_osmosis(*command, cwd=workspace, env={"FAKE_TRAINER": '{"fail_at": 2}'})
    assert (failed.code, "out of memory" in failed.stderr) == (1, True), failed.stderr
    done = run_osmosis(*command, cwd=workspace)
    assert (done.code, "continuing calm-otter-512 after step 1" in done.stderr) == (0, True), done.stderr
    assert (output / "training/calm-otter-512/checkpoints/checkpoint-2").is_dir()
    assert Queries(output / "runs.db").find_run("calm-otter-512.step-00002").status == "finished"
