"""The documented shards of a CI matrix, as the shell runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import yaml

from commands import COMMAND, clean_environment
from repos import write_repo

DOCUMENT = Path(__file__).parents[2] / "docs" / "scale.md"
ROWS = [
    {
        "system_prompt": "Use the tools.",
        "user_prompt": f"What is {number} + 1?",
        "ground_truth": str(number + 1),
        # The other rows have no solution to play.
        **({"solution": [{"tool": "add", "arguments": {"a": number, "b": 1}}, "{{result[0]}}"]} if number % 2 else {}),
    }
    for number in range(12)
]


def test_the_documented_matrix_runs_as_shell_commands(tmp_path: Path) -> None:
    """The steps of the documented workflow's jobs, with the shards' artifacts left where they are."""
    (block,) = re.findall(r"```yaml file=\.github[^\n]*\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    jobs = yaml.safe_load(block)["jobs"]
    repo = write_repo(tmp_path / "repo", rows=ROWS)
    path = f"{COMMAND.parent}:{os.environ['PATH']}"
    env = clean_environment(PATH=path, MODEL="offline/oracle", OSMOSIS_WORKERS="1")

    def run_steps(job: str, **values: str) -> None:
        for step in jobs[job]["steps"]:
            if "run" not in step or step["run"].startswith("pip"):
                continue
            assert step["env"]["MODEL"].endswith("'offline/oracle' }}")
            script = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: values[match[1]], step["run"])
            done = subprocess.run(["bash", "-e", "-c", script], cwd=repo, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    for number in jobs["shard"]["strategy"]["matrix"]["shard"]:
        run_steps("shard", shard=str(number))
        assert (repo / f"shard-{number}" / "runs.db").is_file()
    run_steps("merge")
    summary = json.loads((repo / "results.json").read_text(encoding="utf-8"))["summary"]
    assert (summary["total_runs"], summary["missing"]) == (12, 0)
