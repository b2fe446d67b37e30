"""Stepping through rollouts in a real worker: what each step gives, what may be edited, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.from_thread
import pytest

from osmosis_ai.config import RunConfig
from osmosis_ai.records import Rollout
from osmosis_ai.runtime.protocol import Called, Paused
from osmosis_ai.runtime.run.debugger import Debugger, Ended, RefusedError
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.store.queries import Queries
from repos import ADDING, write_repo

MAIN = f"""{ADDING}
import os


@mcp.tool
def crash() -> str:
    os._exit(7)
"""
SUM = [{"tool": "add", "arguments": {"a": 1, "b": 2}}, "{{result[0]}}"]
ROWS: list[dict[str, Any]] = [
    {"system_prompt": "Add.", "user_prompt": "1 + 2?", "ground_truth": "3", "solution": SUM},
    {"system_prompt": "Say it.", "user_prompt": "7?", "ground_truth": "7"},
]

pytestmark = pytest.mark.xdist_group("debugger")


@contextmanager
def stepping(repo: Path, **options: Any) -> Iterator[Debugger]:
    config = RunConfig.of("test", **{"model": "offline/oracle", "workers": 1, **options})
    with anyio.from_thread.start_blocking_portal() as portal:
        opened = RunSession.open(config, repo, interactive=True)
        with portal.wrap_async_context_manager(opened) as run:
            portal.call(run.begin)
            debugger = Debugger(portal, run)
            yield debugger
            debugger.leave()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debugger]:
    """A debugger of two rows, of which the first takes two turns."""
    with stepping(write_repo(tmp_path_factory.mktemp("debugger") / "repo", main=MAIN, rows=ROWS)) as opened:
        yield opened


@pytest.fixture
def debugger(shared: Debugger) -> Debugger:
    """The same one, without a rollout that another test has left."""
    shared.leave()
    return shared


def paused(stop: Paused | Ended) -> Paused:
    assert isinstance(stop, Paused)
    return stop


def at(debugger: Debugger, stage: str) -> Paused:
    """Start the first row and go to its first pause of this stage."""
    stop = paused(debugger.start(0))
    while stop.stage != stage:
        stop = paused(debugger.go_on())
    return stop


def end(debugger: Debugger) -> Ended:
    while isinstance(stop := debugger.go_on(), Paused):
        pass
    return stop


def recorded(debugger: Debugger) -> list[Rollout]:
    store = Queries(Path(debugger.plan.root) / ".osmosis" / "runs.db")
    return [scored.stored.rollout for scored in store.scored(store.find_run("latest").id, with_trajectory=True)]


def test_a_rollout_pauses_at_every_request_reply_and_result(debugger: Debugger) -> None:
    stops = [paused(debugger.start(0)), *(paused(debugger.go_on()) for _ in range(4))]
    assert [(stop.stage, stop.index, len(stop.messages)) for stop in stops] == [
        ("request", 0, 2),
        ("reply", 0, 3),
        ("result", 0, 4),
        ("request", 1, 4),
        ("reply", 1, 5),
    ]
    assert [call.name for call in stops[2].calls] == ["add"]
    ended = debugger.go_on()
    assert isinstance(ended, Ended)
    assert [(score.function, score.value) for score in ended.scores] == [("reward_fn.rewards:exact", 1.0)]
    assert ended.rollout in recorded(debugger)


@pytest.mark.parametrize("ended", [False, True])
def test_what_cannot_be_done_now_is_refused(debugger: Debugger, ended: bool) -> None:
    if ended:
        debugger.start(1)
        end(debugger)
    for request in (debugger.go_on, debugger.editable, lambda: debugger.edit([]), lambda: debugger.call("add", "{}")):
        with pytest.raises(RefusedError, match="no rollout is paused; r N starts row N"):
            request()
    with pytest.raises(RefusedError, match="there is no row 2; the rows are 0 to 1"):
        debugger.start(2)


def test_before_the_first_rollout_there_is_nothing_to_score_or_save(repo: Path) -> None:
    with stepping(repo) as debugger:
        for request in (debugger.score, debugger.trajectory):
            with pytest.raises(RefusedError, match="there is no trajectory yet; r N starts row N"):
                request()


def test_no_rollout_starts_once_the_budget_is_spent(repo: Path) -> None:
    with (
        stepping(repo, max_cost=0.0) as debugger,
        pytest.raises(RefusedError, match=r"the budget of \$0 \(--max-cost\) is spent"),
    ):
        debugger.start(0)


def test_another_start_drops_the_paused_rollout_without_a_record(debugger: Debugger) -> None:
    before = recorded(debugger)
    debugger.start(0)
    debugger.start(1)
    ended = end(debugger)
    assert [rollout.row_index for rollout in recorded(debugger) if rollout not in before] == [1]
    assert ended.rollout.row_index == 1


def test_a_row_that_is_run_again_is_its_next_attempt(debugger: Debugger) -> None:
    attempts = []
    for _ in range(2):
        debugger.start(1)
        attempts.append(end(debugger).rollout.run_index)
    assert attempts[1] == attempts[0] + 1


def test_leaving_says_if_a_rollout_is_lost(debugger: Debugger) -> None:
    assert not debugger.leave()
    debugger.start(1)
    assert debugger.leave()
    assert debugger.paused is None
    debugger.start(1)
    end(debugger)
    assert not debugger.leave()


def test_a_call_by_hand_is_no_part_of_the_trajectory(debugger: Debugger) -> None:
    at(debugger, "reply")
    by_hand = [debugger.call("add", arguments) for arguments in ('{"a": 20, "b": 22}', "{")]
    by_hand.append(debugger.call("nothing", "{}"))
    assert [(called.text, called.error) for called in by_hand[:1] if isinstance(called, Called)] == [("42", None)]
    assert [called.error for called in by_hand[1:] if isinstance(called, Called)] == ["bad_json", "unknown_tool"]
    rollout = end(debugger).rollout
    assert [call.arguments for call in rollout.tool_calls] == ['{"a": 1, "b": 2}']


def test_a_call_by_hand_that_takes_the_worker_down_ends_the_rollout(debugger: Debugger) -> None:
    debugger.start(0)
    ended = debugger.call("crash", "{}")
    assert isinstance(ended, Ended)
    assert ended.rollout.failure is not None
    assert (ended.rollout.failure.origin, ended.scores) == ("worker", [])
    # Another worker runs the next one.
    debugger.start(0)
    assert end(debugger).rollout.failure is None


def test_the_conversation_so_far_is_scored_without_a_record(debugger: Debugger) -> None:
    before = recorded(debugger)
    at(debugger, "result")
    assert [score.value for score in debugger.score()] == [0.0]
    debugger.leave()
    assert recorded(debugger) == before


def test_without_functions_there_is_nothing_to_score_with(tmp_path: Path) -> None:
    with stepping(write_repo(tmp_path / "repo", rewards=None)) as debugger:
        debugger.start(0)
        with pytest.raises(RefusedError, match="nothing to score with"):
            debugger.score()
        assert end(debugger).scores == []


def test_a_trajectory_has_the_conversation_and_in_the_end_the_record(debugger: Debugger) -> None:
    at(debugger, "result")
    unfinished = debugger.trajectory()
    assert (unfinished["finish_reason"], unfinished["ground_truth"], unfinished["edited"]) == (None, "3", False)
    assert [message["role"] for message in unfinished["messages"]] == ["system", "user", "assistant", "tool"]
    end(debugger)
    finished = debugger.trajectory()
    assert (finished["finish_reason"], len(finished["turns"])) == ("stop", 2)
    assert [score["value"] for score in finished["scores"]] == [1.0]


def test_the_prompt_is_edited_as_a_whole(debugger: Debugger) -> None:
    debugger.start(1)
    prompt = debugger.editable()
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert not debugger.edit(prompt)
    assert not debugger.edited
    assert debugger.edit([{"role": "user", "content": "Now what?"}])
    assert debugger.edited
    rollout = end(debugger).rollout
    assert [message["content"] for message in rollout.messages] == ["Now what?", "7"]
    assert [turn.edited for turn in rollout.turns] == [True]


def test_an_edited_reply_is_what_runs_and_what_is_recorded(debugger: Debugger) -> None:
    at(debugger, "reply")
    call = {"function": {"name": "add", "arguments": {"a": 40, "b": 2}}}
    assert debugger.edit({"role": "assistant", "content": None, "tool_calls": [call]})
    assert paused(debugger.go_on()).messages[-1]["content"] == "42"
    rollout = end(debugger).rollout
    # Arguments may be written as an object, and an id isn't needed.
    (written,) = rollout.messages[2]["tool_calls"]
    assert written["function"] == {"name": "add", "arguments": '{"a":40,"b":2}'}
    assert rollout.messages[3]["tool_call_id"] == written["id"]
    assert [turn.index for turn in rollout.turns if turn.edited] == [0]


def test_a_reply_without_its_calls_ends_the_rollout(debugger: Debugger) -> None:
    at(debugger, "reply")
    assert debugger.edit({"role": "assistant", "content": "I don't know.", "tool_calls": []})
    ended = debugger.go_on()
    assert isinstance(ended, Ended)
    assert ended.rollout.messages[-1] == {"role": "assistant", "content": "I don't know."}


@pytest.mark.parametrize("requests", [0, 1])
def test_results_can_be_edited_when_they_come_and_before_the_next_request(debugger: Debugger, requests: int) -> None:
    at(debugger, "result")
    for _ in range(requests):
        debugger.go_on()
    (result,) = debugger.editable()
    assert debugger.edit({**result, "content": "4"})
    rollout = end(debugger).rollout
    assert [message["content"] for message in rollout.messages[3:]] == ["4", "4"]
    # What was changed is marked: the result itself, or else the request that it changed.
    assert [call.edited for call in rollout.tool_calls] == [requests == 0]
    assert [turn.edited for turn in rollout.turns] == [False, requests == 1]


REPLY = {"role": "assistant", "content": "x"}
NAMED = {"id": "x", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("stage", "edit", "why"),
    [
        ("reply", 7, "it must be a message, or a list of messages"),
        ("reply", [1], "it must be a message, or a list of messages"),
        ("reply", [REPLY, REPLY], "a reply is one message, and this has 2"),
        ("reply", {"role": "tool", "content": "x"}, "a reply's `role` is `assistant`"),
        ("reply", {"role": "assistant"}, "a reply needs a string as its `content`, or `tool_calls`"),
        ("reply", {"role": "assistant", "tool_calls": 3}, "`tool_calls` must be a list"),
        ("reply", {**REPLY, "tool_calls": ["x"]}, r"tool_calls\[0\] must look like"),
        ("reply", {**REPLY, "tool_calls": [NAMED, {"function": {}}]}, r"tool_calls\[1\] must look like"),
        ("reply", {**REPLY, "tool_calls": [NAMED, NAMED]}, "each of the `tool_calls` needs its own `id`"),
        ("request", [], "a request needs at least one message"),
        ("request", [{"content": "x"}], "every message needs a `role` and a `content`"),
        ("request", [{"role": "user", "content": None}], "every message needs a `role` and a `content`"),
        ("result", [], "the results must keep their number and order"),
        ("result", {"role": "tool", "tool_call_id": "another", "content": "3"}, "the results must keep"),
        ("result", {"role": "user", "content": "3"}, "the results must keep"),
    ],
)
def test_an_edit_that_no_model_could_take_is_refused_and_changes_nothing(
    debugger: Debugger, stage: str, edit: Any, why: str
) -> None:
    before = at(debugger, stage)
    with pytest.raises(RefusedError, match=why):
        debugger.edit(edit)
    assert debugger.paused == before
    assert not debugger.edited
    assert [message["content"] for message in end(debugger).rollout.messages[-2:]] == ["3", "3"]
