"""Scripts of users that call models and judges: their interpreters end without a word that isn't theirs."""

from __future__ import annotations

import subprocess
import sys

from osmosis_ai.testing import ScriptedEndpoint, hang, status, text


def test_nothing_is_printed_or_left_open() -> None:
    code = """
import asyncio, sys
from osmosis_ai.records import ModelSpec
from osmosis_ai.models.host import create_model
from osmosis_ai.errors import ModelError

async def main():
    spec = ModelSpec("m", "litellm", "openai/scripted-x", sys.argv[1], "k", request_timeout=20.0)
    host, other = create_model(spec), create_model(spec)
    await host.probe()
    await other.aclose()
    model = host.for_rollout(None, 0)
    print((await model.complete([{"role": "user", "content": "x"}], [], {})).message["content"])
    try:
        await model.complete([{"role": "user", "content": "x"}], [], {})
    except ModelError as error:
        print(error.kind)
    await host.aclose()

asyncio.run(main())
"""
    with ScriptedEndpoint([text("fine"), status(401)]).run_in_thread() as endpoint:
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", code, endpoint.url],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stdout) == (0, "fine\nauth\n"), done.stderr
    for trouble in ("Unclosed", "never awaited", "was destroyed", "Traceback", "Give Feedback"):
        assert trouble not in done.stderr


ENDS = """
import sys, threading
from osmosis_ai import evaluate_rubric

assert "litellm" not in sys.modules
judge = {"provider": "openai", "model": "m", "api_base": sys.argv[1], "api_key": "sk-0123456789"}
assert evaluate_rubric("r", "s", judge) == 1.0
threading.Thread(target=evaluate_rubric, args=("r", "s", judge), daemon=True).start()
sys.stdin.read()
"""


def test_a_process_ends_cleanly_while_a_judge_is_silent() -> None:
    with (
        ScriptedEndpoint([text('{"explanation": "because", "score": 1}'), hang()]).run_in_thread() as endpoint,
        subprocess.Popen(
            [sys.executable, "-c", ENDS, endpoint.url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        endpoint.wait_for_requests(2, timeout=60)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert "destroyed" not in stderr
