"""The parts of a loop: its base class, its context, the schemas, the helpers for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loops import ADD, loop_that
from pydantic import ValidationError

from osmosis_ai.errors import OsmosisError
from osmosis_ai.rollout import (
    AgentLoopNotFoundError,
    CompletionsRequest,
    CompletionsResponse,
    CompletionsResult,
    InitResponse,
    MessagesRewrittenError,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    OsmosisRolloutError,
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    ToolArgumentError,
    ToolExecutionError,
    create_tool_error_result,
    create_tool_result,
    execute_tool_calls,
    get_tool_call_info,
    parse_tool_arguments,
    serialize_tool_result,
)

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


class Scripted:
    """A model that always gives the same reply."""

    def __init__(self, usage: Any = None) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.params: list[dict[str, Any]] = []
        self._usage = usage

    async def chat_completions(self, messages: list[dict[str, Any]], **params: Any) -> CompletionsResult:
        self.asked.append(messages)
        self.params.append(params)
        return CompletionsResult({"role": "assistant", "content": "hi"}, usage=self._usage)


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest(**{"rollout_id": "r", "server_url": "http://127.0.0.1:1", "messages": HELLO, **fields})


# The base class.


def test_a_loop_without_a_name_is_an_error_when_its_class_is_made() -> None:
    with pytest.raises(TypeError, match=r'Nameless is an agent loop without a name: add `name = "…"` to the class'):

        class Nameless(RolloutAgentLoop):
            def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
                return []

            async def run(self, ctx: RolloutContext) -> RolloutResult:
                return ctx.complete([])


def test_an_abstract_base_of_several_loops_needs_no_name_but_they_do() -> None:
    class Base(RolloutAgentLoop):
        def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
            return []

    class Named(Base):
        name = "named"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            return ctx.complete([])

    assert Named().name == "named"
    with pytest.raises(TypeError, match="without a name"):

        class Nameless(Base):
            async def run(self, ctx: RolloutContext) -> RolloutResult:
                return ctx.complete([])

    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]


def test_the_default_tools_are_those_of_a_request_about_which_nothing_is_known() -> None:
    seen: list[RolloutRequest] = []

    class Loop(RolloutAgentLoop):
        name = "loop"

        def get_tools(self, request: RolloutRequest) -> Any:
            seen.append(request)
            return [ADD]

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            return ctx.complete([])

    assert Loop().get_default_tools() == [ADD]
    assert (seen[0].messages, seen[0].metadata) == ([], {})


# The context.


async def test_chat_passes_parameters_on_and_measures() -> None:
    model = Scripted({"prompt_tokens": 10, "completion_tokens": 5})
    ctx = RolloutContext(request(), [ADD], model)
    messages = list(ctx.request.messages)
    for turn in range(2):
        result = await ctx.chat(messages, temperature=turn)
        messages += [result.message, {"role": "user", "content": "and?"}]
    ctx.record_tool_call(latency_ms=3)
    ctx.record_tool_call()
    result = ctx.complete(messages, "length", reward=0.5)

    assert model.params == [{"temperature": 0}, {"temperature": 1}]
    assert [len(asked) for asked in model.asked] == [1, 3]
    assert (result.status, result.finish_reason, result.reward) == ("COMPLETED", "length", 0.5)
    assert result.final_messages is messages
    metrics = result.metrics
    assert metrics is not None
    assert (metrics.num_llm_calls, metrics.num_tool_calls, metrics.tool_latency_ms) == (2, 2, 3.0)
    assert (metrics.prompt_tokens, metrics.response_tokens, metrics.max_context_tokens) == (20, 10, 15)
    assert ctx.tools == [ADD]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": "5"}])
async def test_usage_that_isnt_known_counts_as_none(usage: Any) -> None:
    ctx = RolloutContext(request(), [], Scripted(usage))
    await ctx.chat(HELLO)
    assert (ctx.metrics.prompt_tokens, ctx.metrics.max_context_tokens, ctx.metrics.num_llm_calls) == (0, 0, 1)


async def test_an_error_keeps_what_there_is() -> None:
    ctx = RolloutContext(request(), [], Scripted())
    result = ctx.error("too hard", HELLO)
    assert (result.status, result.finish_reason, result.error_message) == ("ERROR", "error", "too hard")
    assert result.final_messages == HELLO
    assert ctx.error("too hard").final_messages == []


@pytest.mark.parametrize(
    ("second", "index"),
    [
        ([{"role": "user", "content": "b"}, {"role": "assistant", "content": "hi"}], 0),
        ([HELLO[0], {"role": "assistant", "content": "edited"}], 1),
        ([HELLO[0]], 1),
        ([], 0),
        ([{"role": "system", "content": "new"}, HELLO[0], {"role": "assistant", "content": "hi"}], 0),
        ([HELLO[0], {"role": "assistant", "content": "hi", "extra": None}], 1),
    ],
)
async def test_messages_that_were_sent_stay_as_they_were(second: list[dict[str, Any]], index: int) -> None:
    model = Scripted()
    ctx = RolloutContext(request(), [], model)
    await ctx.chat([HELLO[0], {"role": "assistant", "content": "hi"}])
    with pytest.raises(MessagesRewrittenError, match=f"message {index} ") as caught:
        await ctx.chat(second)
    assert caught.value.index == index
    assert len(model.asked) == 1
    # The conversation so far is still good to go on with.
    await ctx.chat([HELLO[0], {"role": "assistant", "content": "hi"}, HELLO[0]])


async def test_equal_messages_in_another_order_of_keys_are_the_same() -> None:
    ctx = RolloutContext(request(), [], Scripted())
    await ctx.chat([{"role": "user", "content": "a\ud800"}])
    await ctx.chat([{"content": "a\ud800", "role": "user"}])
    await ctx.chat([{"content": "a\ud800", "role": "user"}, {"role": "user", "content": "b"}])


async def test_a_message_changed_in_place_is_seen() -> None:
    ctx = RolloutContext(request(), [], Scripted())
    messages = [{"role": "user", "content": ["a"]}]
    await ctx.chat(messages)
    messages[0]["content"].append("b")  # type: ignore[union-attr,attr-defined]
    with pytest.raises(MessagesRewrittenError):
        await ctx.chat(messages)


async def test_rewriting_may_be_allowed() -> None:
    ctx = RolloutContext(request(), [], Scripted(), allow_rewrites=True)
    await ctx.chat([{"role": "user", "content": "a"}])
    await ctx.chat([{"role": "user", "content": "b"}])


async def test_what_the_loop_does_to_its_list_doesnt_change_the_conversation_kept() -> None:
    ctx = RolloutContext(request(), [], Scripted())
    messages = list(HELLO)
    await ctx.chat(messages)
    messages.clear()
    assert ctx.conversation == [*HELLO, {"role": "assistant", "content": "hi"}]


def test_events_go_to_a_file_per_rollout_and_nowhere_without_a_folder(tmp_path: Path) -> None:
    RolloutContext(request(), [], Scripted()).log_event("begin")
    for rollout_id in ("a", "a/b", "a:b", "..", "x" * 256, "ä"):
        ctx = RolloutContext(
            request(rollout_id=rollout_id, api_key='se"cret'), [], Scripted(), debug_dir=tmp_path / "d"
        )
        ctx.log_event("begin", text='ü se"cret', path=tmp_path)
        ctx.log_event("end")
    files = list((tmp_path / "d").iterdir())
    assert len(files) == 6
    assert tmp_path / "d" / "a.jsonl" in files
    for file in files:
        begin, end = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
        assert (begin["event_type"], begin["text"], begin["path"]) == ("begin", "ü [masked]", str(tmp_path))
        assert end["rollout_id"] == begin["rollout_id"]
        assert begin["time"] <= end["time"]
    assert list(tmp_path.iterdir()) == [tmp_path / "d"]


@pytest.mark.parametrize("key", ["s", ":"])
def test_no_key_breaks_a_debug_files_lines(key: str, tmp_path: Path) -> None:
    ctx = RolloutContext(request(rollout_id="a", api_key=key), [], Scripted(), debug_dir=tmp_path)
    ctx.log_event("steps", text="is: this")
    (line,) = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(line)["event_type"], json.loads(line)["text"]) == ("steps", "is: this")


def test_a_debug_file_that_cant_be_written_doesnt_cost_the_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    ctx = RolloutContext(request(), [], Scripted(), debug_dir=tmp_path / "file")
    ctx.log_event("begin")
    ctx.log_event("end")
    assert len(caplog.records) == 1


# The schemas.


def test_a_request_has_the_documented_defaults_and_never_shows_its_key() -> None:
    found = request(api_key="secret", unknown="field", metadata=None, completion_params=None)
    assert (found.max_turns, found.max_tokens_total, found.metadata, found.completion_params) == (10, 8192, {}, {})
    assert (found.tool_server_url, found.idempotency_key) == (None, None)
    assert "secret" not in repr(found)
    assert "secret" not in str(found)
    assert found.api_key == "secret"
    assert not hasattr(found, "unknown")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://trainer.example/base//", "https://trainer.example/base"),
        ("HTTP://[::1]:80", "HTTP://[::1]:80"),
    ],
)
def test_a_trainers_address_loses_its_last_slash(given: str, kept: str) -> None:
    assert request(server_url=given).server_url == kept


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": "y" * 1024 * 1024}])
def test_metadata_that_is_not_json_or_too_large_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="metadata"):
        request(metadata=metadata)
    request(metadata={"x": "y" * (1024 * 1024 - 100)})


def test_a_tools_schema_keeps_what_it_was_given_and_adds_nothing() -> None:
    assert OpenAIFunctionToolSchema.model_validate(ADD).model_dump() == ADD
    assert json.loads(OpenAIFunctionToolSchema.model_validate(ADD).model_dump_json()) == ADD
    written = OpenAIFunctionToolSchema(
        type="function",
        function=OpenAIFunctionSchema(
            name="find",
            parameters=OpenAIFunctionParametersSchema(
                type="object",
                properties={
                    "kind": OpenAIFunctionPropertySchema(type="string", enum=["a", "b"], default=None),
                    "limit": OpenAIFunctionPropertySchema(type=["integer", "null"], minimum=1),
                    "anything": True,
                },
                required=["kind"],
                additionalProperties=False,
            ),
        ),
    )
    assert written.model_dump() == {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": ["a", "b"], "default": None},
                    "limit": {"type": ["integer", "null"], "minimum": 1},
                    "anything": True,
                },
                "required": ["kind"],
                "additionalProperties": False,
            },
        },
    }
    assert InitResponse(rollout_id="r", tools=[written]).model_dump()["tools"] == [written.model_dump()]


def test_completions_have_the_protocols_defaults_and_tolerate_what_is_unknown() -> None:
    sent = CompletionsRequest(messages=HELLO, rollout_id="r", seed=1).model_dump()
    assert sent == {
        "model": "default",
        "messages": HELLO,
        "rollout_id": "r",
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 512,
        "stop": None,
        "logprobs": True,
        "seed": 1,
    }
    reply = CompletionsResponse.model_validate({"choices": [{"message": {"content": "hi"}}], "new": 1})
    assert reply.choices[0].message == {"content": "hi"}


# Tools.


def test_results_are_tool_messages() -> None:
    assert create_tool_result("c1", "3") == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert create_tool_error_result("c1", "no") == {"role": "tool", "content": "Error: no", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as is", "as is"),
        (3, "3"),
        (2.5, "2.5"),
        (10**30, str(10**30)),
        (True, "true"),
        (None, "null"),
        ([1, "ä"], '[1, "ä"]'),
        ({"a": None}, '{"a": null}'),
        ({"path": Path("x")}, '{"path": "x"}'),
    ],
)
def test_a_tools_value_becomes_text(value: Any, text: str) -> None:
    assert serialize_tool_result(value) == text


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), ("  ", {}), (None, {}), ("{}", {})],
)
def test_arguments_are_parsed(arguments: Any, parsed: dict[str, Any]) -> None:
    assert parse_tool_arguments(arguments) == parsed
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    assert get_tool_call_info(call) == ("c1", "add", parsed)


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", '"text"', "[" * 100_000, 5])
def test_arguments_that_are_no_object_are_an_error_with_the_call(arguments: Any) -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(ToolArgumentError, match="the arguments") as caught:
        get_tool_call_info(call)
    assert (caught.value.tool_call_id, caught.value.tool_name) == ("c1", "add")


@pytest.mark.parametrize(
    ("call", "call_id"),
    [({}, "unknown"), ({"id": 5}, "5"), ({"id": "c", "function": "add"}, "c"), ({"id": "c", "function": {}}, "c")],
)
def test_a_call_without_a_function_is_an_error(call: dict[str, Any], call_id: str) -> None:
    with pytest.raises(ToolArgumentError, match="names no function") as caught:
        get_tool_call_info(call)
    assert caught.value.tool_call_id == call_id


async def test_calls_run_at_once_and_their_results_are_in_order() -> None:
    import anyio

    second_has_begun = anyio.Event()

    async def execute(call: dict[str, Any]) -> dict[str, Any]:
        if call["id"] == "second":
            second_has_begun.set()
            raise ValueError
        if call["id"] == "third":
            raise ToolExecutionError("broken", call["id"], "tool")
        await second_has_begun.wait()
        return create_tool_result(call["id"], "done")

    with anyio.fail_after(5):
        results = await execute_tool_calls([{"id": name} for name in ("first", "second", "third")], execute)
    assert [result["tool_call_id"] for result in results] == ["first", "second", "third"]
    assert [result["content"] for result in results] == ["done", "Error: ValueError", "Error: broken"]
    assert await execute_tool_calls([], execute) == []


# Errors.


def test_the_errors_have_one_root_and_say_what_they_know() -> None:
    from osmosis_ai.rollout.core import exceptions

    for name in exceptions.__all__:
        kind = getattr(exceptions, name)
        assert issubclass(kind, OsmosisRolloutError)
        assert issubclass(kind, OsmosisError)
    error = AgentLoopNotFoundError("calc", ["a", "b"])
    assert str(error) == "no agent loop is named 'calc'; the known ones are: a, b"
    assert issubclass(ToolArgumentError, ToolExecutionError)
    assert ToolExecutionError("broken").tool_call_id is None
    assert loop_that(lambda ctx: None).name == "made"
