"""The data of workflow rollouts: contexts, configurations, samples, and the check of a workflow and its grader."""

from __future__ import annotations

import asyncio
import logging
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from workflows import ANSWER, PROMPT, Answering, Exact, Held, Named

from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    AgentWorkflowOutput,
    BaseConfig,
    ConcurrencyConfig,
    ControllerAuth,
    ExecutionRequest,
    Grader,
    GraderContext,
    HarborAgentWorkflowContext,
    RolloutSample,
    get_rollout_context,
)
from osmosis_ai.rollout.context import RolloutContext
from osmosis_ai.rollout.validator import resolved_agent_name, validate_backend

# Contexts.


def test_a_workflows_context_takes_its_fields_in_order() -> None:
    config = AgentWorkflowConfig(name="w")
    ctx = AgentWorkflowContext(PROMPT, config, {"level": 1}, Path("files"))
    assert (ctx.prompt, ctx.config, ctx.metadata, ctx.artifacts_dir) == (PROMPT, config, {"level": 1}, Path("files"))
    assert AgentWorkflowContext(PROMPT) == AgentWorkflowContext(prompt=PROMPT)
    assert AgentWorkflowContext[AgentWorkflowConfig](PROMPT).config is None
    assert HarborAgentWorkflowContext(PROMPT, config, environment="e").environment == "e"


def test_a_rollouts_context_is_filled_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RolloutContext() == RolloutContext("", None, "")
    monkeypatch.setenv("OSMOSIS_CHAT_COMPLETIONS_URL", "http://model")
    monkeypatch.setenv("OSMOSIS_API_KEY", "key-of-the-environment")
    monkeypatch.setenv("OSMOSIS_ROLLOUT_ID", "r1")
    assert RolloutContext() == RolloutContext("http://model", "key-of-the-environment", "r1")
    assert RolloutContext("http://other").chat_completions_url == "http://other"
    assert "key-of-the-environment" not in repr(RolloutContext())


def test_a_rollout_is_active_inside_its_block_and_the_outer_one_after_it() -> None:
    outer, inner = RolloutContext(rollout_id="outer"), RolloutContext(rollout_id="inner")
    assert get_rollout_context() is None
    with outer:
        with inner, inner:
            assert get_rollout_context() is inner
        assert get_rollout_context() is outer
    assert get_rollout_context() is None


@pytest.mark.anyio
async def test_rollouts_of_concurrent_tasks_dont_mix() -> None:
    async def active(name: str) -> str:
        with RolloutContext(rollout_id=name):
            await asyncio.sleep(0)
            rollout = get_rollout_context()
            return "" if rollout is None else rollout.rollout_id

    assert await asyncio.gather(*map(active, "abc")) == ["a", "b", "c"]


@pytest.mark.anyio
async def test_samples_come_from_one_source_or_from_named_ones() -> None:
    rollout = RolloutContext(rollout_id="r1")
    assert (await rollout.get_sample(), await rollout.get_samples(), rollout.has_samples) == (None, {}, False)
    rollout.register_sample_source("left", Named())
    sample = await rollout.get_sample()
    assert sample is not None
    assert sample.id == "left"
    rollout.set_sample_source(Held(ANSWER))
    samples = await rollout.get_samples()
    assert {name: sample.id for name, sample in samples.items()} == {"left": "left", "r1": None}
    with pytest.raises(ValueError, match="has 2 samples"):
        await rollout.get_sample()
    with pytest.raises(ValueError, match="named 'left' already"):
        rollout.register_sample_source("left", Held())
    with pytest.raises(ValueError, match="a sample source already"):
        rollout.set_sample_source(Held())


def test_a_graders_context_has_one_sample_or_several() -> None:
    sample = RolloutSample(messages=ANSWER)
    ctx = GraderContext("4", sample, None, {"level": 1}, Path("files"))
    assert (ctx.sample, ctx.get_samples(), ctx.metadata) == (sample, {"sample": sample}, {"level": 1})
    ctx.set_reward(1)
    ctx.set_sample_reward("sample", 0.5)
    assert (type(sample.reward), sample.reward) == (float, 0.5)
    ctx.sample = None
    assert (GraderContext().sample, ctx.samples) == (None, {})

    several = GraderContext(samples={name: RolloutSample(id=name) for name in ("a", "b")})
    assert several.sample is None
    several.set_sample_reward("b", 1)
    assert [each.reward for each in several.samples.values()] == [None, 1.0]


# Configurations and outputs.


class Sampling(BaseConfig):
    """A configuration as users write them."""

    temperature: float = 1.0
    client: Any = None


def test_a_configuration_keeps_unknown_fields_and_validates_assignments() -> None:
    config = Sampling.model_validate({"name": "w", "tools": ["search"], "client": object()})
    assert config.model_extra == {"tools": ["search"]}
    with pytest.raises(ValidationError):
        config.temperature = "hot"  # type: ignore[assignment]
    with pytest.raises(ValidationError, match="name"):
        Sampling()  # type: ignore[call-arg]
    assert AgentWorkflowConfig(name="w").concurrency == ConcurrencyConfig(max_concurrent=None)
    with pytest.raises(ValidationError):
        ConcurrencyConfig(max_concurrent=0)


@pytest.mark.parametrize(
    "fields", [{"note": "unknown"}, {"metrics": {"loss": float("nan")}}, {"metrics": {"loss": float("inf")}}]
)
def test_an_output_refuses_what_it_doesnt_know_and_what_isnt_finite(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AgentWorkflowOutput(**fields)
    assert AgentWorkflowOutput().model_dump() == {"messages": None, "metrics": {}, "info": {}}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/a", "C:\\a", "a\0b"])
def test_a_rollouts_id_is_one_path_segment(name: str) -> None:
    with pytest.raises(ValidationError, match="one path segment"):
        ExecutionRequest(id=name, prompt=[])


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), float("-inf")])
def test_a_deadline_is_finite(seconds: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        ExecutionRequest(id="r", prompt=[], agent_timeout_sec=seconds)
    assert ExecutionRequest(id="r", prompt=[], agent_timeout_sec=-1).agent_timeout_sec == -1


# Samples.


def test_a_sample_copies_its_messages_for_the_trajectory() -> None:
    messages = [{"role": "user", "content": "hi"}]
    sample = RolloutSample(messages=messages)
    messages[0]["content"] = "changed"
    assert sample.trajectory_messages == [{"role": "user", "content": "hi"}]
    assert RolloutSample(messages=ANSWER, trajectory_messages=None).trajectory_messages is None
    sample.reward = 1
    assert sample.trajectory_messages == [{"role": "user", "content": "hi"}]
    assert sample.model_copy(update={"reward": 0.5}).reward == 0.5


class Uncopyable:
    """A framework's object that refuses to be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def test_messages_that_cant_be_copied_cost_the_trajectory_alone() -> None:
    sample = RolloutSample(messages=[{"role": "user", "content": Uncopyable()}])
    assert (len(sample.messages), sample.trajectory_messages) == (1, None)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "high", [1]])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    sample = RolloutSample()
    with pytest.raises(ValueError, match="reward"):
        sample.reward = reward
    assert sample.reward is None


def test_a_json_safe_copy_holds_only_what_json_can(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {
        "int": 3,
        "fraction": Fraction(1, 2),
        "nan": float("nan"),
        "nested": {1: [2.5, float("inf"), object()], (1, 2): "tuple", 1.5: True},
        "decimal": Decimal("1.5"),
        "none": None,
    }
    sample = RolloutSample(metrics=metrics, extra_fields={"set": {1}})
    with caplog.at_level(logging.WARNING):
        copied = sample.json_safe_copy()
    assert copied.metrics == {"int": 3, "fraction": 0.5, "nested": {"1": [2.5], "1.5": True}, "none": None}
    assert copied.extra_fields == {}
    assert len(caplog.records) == 1
    assert "a Decimal, a float that isn't finite, a key of type tuple, a object, a set" in caplog.text
    assert sample.metrics is not copied.metrics
    assert set(sample.metrics) == set(metrics)


def test_a_controllers_key_isnt_shown() -> None:
    auth = ControllerAuth("secret-key")
    assert repr(auth) == "ControllerAuth(api_key=<redacted>)"
    assert auth.as_bearer_headers() == {"Authorization": "Bearer secret-key"}
    assert (repr(ControllerAuth()), ControllerAuth().as_bearer_headers()) == ("ControllerAuth(api_key=None)", None)


# Checks.


class Plain(AgentWorkflow[AgentWorkflowConfig]):
    """A workflow whose `run` isn't async."""

    def run(self, ctx: Any) -> Any: ...


class Picky(Grader):
    """A grader that can't be created."""

    def __init__(self, config: Any = None) -> None:
        raise ValueError("no judge")

    def grade(self, ctx: Any) -> Any: ...


@pytest.mark.parametrize(
    ("workflow", "config", "grader", "codes"),
    [
        (Answering, None, Exact, []),
        (Answering, None, None, ["MISSING_GRADER"]),
        (AgentWorkflow, None, Exact, ["INVALID_WORKFLOW_CLASS"]),
        (Exact, None, Answering, ["INVALID_WORKFLOW_CLASS", "INVALID_GRADER_CLASS"]),
        ("Answering", None, Exact, ["INVALID_WORKFLOW_CLASS"]),
        (Plain, None, Picky, ["WORKFLOW_RUN_NOT_ASYNC", "GRADER_GRADE_NOT_ASYNC", "GRADER_INIT_FAILED"]),
        (Answering, AgentWorkflowConfig(name="w" * 257), Exact, ["INVALID_AGENT_NAME"]),
    ],
)
def test_a_workflow_and_its_grader_are_checked(workflow: Any, config: Any, grader: Any, codes: list[str]) -> None:
    result = validate_backend(workflow, config, grader)
    assert [error.code for error in result.errors] == codes
    assert result.valid is not bool(codes)
    assert all(error.field for error in result.errors)


def test_a_workflows_name_is_that_of_its_configuration_or_class() -> None:
    assert resolved_agent_name(Plain, None) == "Plain"
    assert resolved_agent_name(Plain, AgentWorkflowConfig(name=" multiply ")) == "multiply"
    assert resolved_agent_name(Plain, AgentWorkflowConfig(name=" ")) == "Plain"
