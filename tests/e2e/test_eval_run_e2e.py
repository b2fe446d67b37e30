"""`osmosis eval run` at a terminal: a secret that is nowhere else is asked for, and not shown."""

from __future__ import annotations

import shutil
from pathlib import Path

from commands import clean_environment
from osmosis_ai.testing import ScriptedEndpoint, by_turn, text
from terminal import Terminal

EXAMPLE = Path(__file__).parents[2] / "examples" / "workflow"


def test_a_missing_secret_is_typed(tmp_path: Path) -> None:
    workspace = shutil.copytree(EXAMPLE, tmp_path / "workspace", ignore=shutil.ignore_patterns(".osmosis"))
    with ScriptedEndpoint(by_turn(text("408"))).run_in_thread() as endpoint:
        given = ["configs/eval/products-openai.toml", "--limit", "1", "--base-url", endpoint.url, "--workers", "1"]
        terminal = Terminal(["eval", "run", *given], workspace, clean_environment())
        try:
            terminal.wait_for("OPENAI_API_KEY: ")
            terminal.type("typed-secret\n")
            assert terminal.end() == 0, terminal.shown
        finally:
            terminal.close()
    assert "1 of 1 rollouts completed" in terminal.shown
    assert "typed-secret" not in terminal.shown
