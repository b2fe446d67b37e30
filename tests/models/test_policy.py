"""The engine that calls a policy with tokens: what is recorded is what the model read and sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osmosis_ai.errors import ModelError, ModelStartError
from osmosis_ai.exports.tokens import Sequences
from osmosis_ai.models.host import HostOptions, create_model
from osmosis_ai.models.policy.engine import MAX_RESPONSE, REPLY_FORM
from osmosis_ai.models.policy.replies import FORMS, read_reply
from osmosis_ai.models.policy.template import load_template
from osmosis_ai.records import Completion, Message, ModelSpec, Row
from token_models import END, TEMPLATES, TokenEndpoint, write_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "word": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
USER: list[Message] = [{"role": "user", "content": "go"}]
ROW = Row("row", 0, "", "go")


def spec_of(url: str, folder: Path, **params: Any) -> ModelSpec:
    return ModelSpec("m", "policy", "m", url, params=params, tokenizer=str(folder))


def talk(
    endpoint: TokenEndpoint, folder: Path, conversation: Callable[[Any], Any], tools: list[Any] = TOOLS, **params: Any
) -> Any:
    """Run a conversation with the model of one rollout."""

    async def run(url: str) -> Any:
        host = create_model(spec_of(url, folder, **params), HostOptions())
        try:
            model = host.for_rollout(ROW, 0)

            async def ask(messages: list[Message], **more: Any) -> Completion:
                return await model.complete(messages, tools, more)

            return await conversation(ask)
        finally:
            await host.aclose()

    with endpoint.run() as url:
        return asyncio.run(run(url))


def scripted(*texts: str) -> TokenEndpoint:
    """Return an endpoint that answers with these texts in order."""
    left = list(texts)
    return TokenEndpoint(lambda _: left.pop(0))


def results(reply: Message, text: str = "3") -> list[Message]:
    """Return a result for each call of a reply, else a question."""
    if calls := reply.get("tool_calls"):
        return [{"role": "tool", "tool_call_id": call["id"], "name": "add", "content": text} for call in calls]
    return [{"role": "user", "content": text}]


# Odd texts: special tokens' texts, broken calls, characters of several bytes, nothing at all.
TEXT = st.text(alphabet='ab{}"<>\n€🙂', max_size=12)
REPLY = st.lists(
    st.sampled_from([CALL, "<tool_call>{broken</tool_call>", "<think>hm</think>", "text", "é", ""]) | TEXT, max_size=3
).map("".join)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    replies=st.lists(st.tuples(REPLY, st.sampled_from([END, END, ""]), TEXT), min_size=1, max_size=4),
    template=st.sampled_from(sorted(TEMPLATES)),
)
def test_turns_make_one_sequence_of_exactly_the_tokens_read_and_sampled(
    tmp_path: Path, replies: list[tuple[str, str, str]], template: str
) -> None:
    endpoint = scripted(*(text + end for text, end, _ in replies))
    folder = write_model(tmp_path / template, template)

    async def conversation(ask: Any) -> list[Completion]:
        messages, found = list(USER), []
        for _, _, answer in replies:
            found.append(await ask(list(messages)))
            messages += [found[-1].message, *results(found[-1].message, answer)]
        return found

    turns = talk(endpoint, folder, conversation)
    sequences = Sequences()
    for turn, request in zip(turns, endpoint.requests, strict=True):
        assert (turn.token_ids.prompt_token_ids, turn.token_ids.token_ids) == (request.prompt, request.reply)
        sequences.add(request.prompt, request.reply, [one.logprob for one in turn.logprobs.content])
    (sequence,) = sequences.all
    assert sequences.transitions == {"clean": len(turns) - 1, "realign": 0, "fork": 0}
    assert sequence.ids == [*endpoint.requests[-1].prompt, *endpoint.requests[-1].reply]
    assert sum(sequence.mask) == sum(len(request.reply) for request in endpoint.requests)


@pytest.mark.parametrize("template", ["json", "tags"])
def test_tokens_between_replies_equal_the_template_s_rendering(tmp_path: Path, template: str) -> None:
    whole = load_template(str(write_model(tmp_path / template, template)))
    reply = read_reply(CALL, FORMS["tool-call-json"], TOOLS, 1)
    before = whole.render([*USER, reply], TOOLS, generate=False)
    between = [*results(reply), {"role": "tool", "tool_call_id": "x", "content": "4"}]
    stop = whole.stop_ids[0]
    sampled = before[: len(before) - before[::-1].index(stop)]
    assert sampled + whole.after(reply, stop, between) == whole.render([*USER, reply, *between], TOOLS)


def test_a_truncated_reply_gets_its_end_token_as_context(tmp_path: Path) -> None:
    endpoint = scripted("half", f"whole{END}")

    async def conversation(ask: Any) -> list[Completion]:
        first = await ask(USER)
        return [first, await ask([*USER, first.message, {"role": "user", "content": "on"}])]

    first, second = talk(endpoint, write_model(tmp_path), conversation)
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    template = load_template(str(tmp_path))
    added = second.token_ids.prompt_token_ids[len(endpoint.requests[0].prompt) + len(endpoint.requests[0].reply) :]
    assert template.text(added).startswith(f"{END}\n<|im_start|>user\non")


def test_a_rewritten_conversation_starts_over_and_a_branch_keeps_its_prefix(tmp_path: Path) -> None:
    endpoint = scripted(*(f"{number}{END}" for number in range(4)))

    async def conversation(ask: Any) -> None:
        first = await ask(USER)
        beginning = [*USER, first.message]
        await ask([*beginning, {"role": "user", "content": "left"}])
        await ask([*beginning, {"role": "user", "content": "right"}])
        await ask([{"role": "user", "content": "other"}, first.message, {"role": "user", "content": "on"}])

    talk(endpoint, write_model(tmp_path), conversation)
    first, left, right, other = endpoint.requests
    beginning = [*first.prompt, *first.reply]
    assert left.prompt[: len(beginning)] == right.prompt[: len(beginning)] == beginning
    assert other.prompt[: len(beginning)] != beginning


def test_clients_may_drop_empty_fields_and_reasoning(tmp_path: Path) -> None:
    endpoint = scripted(f"<think>hm</think>{CALL}{END}", f"done{END}")

    async def conversation(ask: Any) -> Completion:
        first = await ask(USER)
        assert first.message["reasoning_content"] == "hm"
        sent = {"role": "assistant", "tool_calls": first.message["tool_calls"]}
        return await ask([*USER, sent, *results(first.message)])

    talk(endpoint, write_model(tmp_path), conversation)
    first, second = endpoint.requests
    assert second.prompt[: len(first.prompt) + len(first.reply)] == [*first.prompt, *first.reply]


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["choices"][0].pop(name)


def _other_prompt(answer: dict[str, Any]) -> None:
    answer["choices"][0]["prompt_token_ids"] = answer["choices"][0]["prompt_token_ids"][1:]


def _fewer_logprobs(answer: dict[str, Any]) -> None:
    answer["choices"][0]["logprobs"]["token_logprobs"].pop()


def _no_choice(answer: dict[str, Any]) -> None:
    answer["choices"] = []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_other_prompt, "prompt tokens that differ from those it was sent"),
        (_without("token_ids"), "no token ids; it must support `return_token_ids`"),
        (_without("prompt_token_ids"), "no token ids"),
        (_fewer_logprobs, "more or fewer log probabilities than sampled tokens"),
        (_no_choice, "isn't a completion"),
    ],
)
def test_a_reply_whose_tokens_cannot_be_trusted_fails(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as failed:
        talk(TokenEndpoint(lambda _: f"x{END}", spoil=spoil), write_model(tmp_path), lambda ask: ask(USER))
    assert failed.value.kind == "bad_reply"


def test_tool_results_count_towards_the_response(tmp_path: Path) -> None:
    endpoint = scripted(f"{CALL}{END}", "x" * 500)

    async def conversation(ask: Any) -> tuple[Completion, Completion]:
        first = await ask(USER)
        messages = [*USER, first.message, *results(first.message)]
        second = await ask(messages)
        third = await ask([*messages, second.message, {"role": "user", "content": "on"}])
        return second, third

    second, third = talk(endpoint, write_model(tmp_path), conversation, **{MAX_RESPONSE: 150})
    opening = len(endpoint.requests[0].prompt)
    # The template's tokens between the two replies count, too.
    assert len(endpoint.requests[1].prompt) - opening + len(endpoint.requests[1].reply) == 150
    assert (second.finish_reason, len(endpoint.requests)) == ("length", 2)
    assert (third.finish_reason, third.message["content"], third.token_ids.token_ids) == ("length", "", [])


def test_parameters_of_chat_endpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="response_format isn't supported"):
        talk(scripted(), write_model(tmp_path), lambda ask: ask(USER, response_format={"type": "json_object"}))


@pytest.mark.parametrize("params", [{"temperature": 0.7, "top_p": 0.9, "max_tokens": 7, "seed": None}])
def test_sampling_parameters_are_sent_on(tmp_path: Path, params: dict[str, Any]) -> None:
    endpoint = scripted(f"x{END}")
    talk(endpoint, write_model(tmp_path), lambda ask: ask(USER, **params))
    body = endpoint.requests[0].body
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 7,
    }
    assert "seed" not in body


def test_a_template_without_tools_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", encoding="utf-8"
    )
    with pytest.raises(ModelError, match="doesn't show tools, or has no known form"):
        talk(scripted(), folder, lambda ask: ask(USER))


@pytest.mark.parametrize(
    ("form", "text", "calls", "content"),
    [
        ("tool-call-json", f"Well.\n{CALL}", [("add", {"a": 1})], "Well."),
        ("tool-call-json", f"{CALL}\n{CALL}", [("add", {"a": 1})] * 2, None),
        ("tool-call-json", "<tool_call>{broken</tool_call>", [], "<tool_call>{broken</tool_call>"),
        ("tool-call-json", '<tool_call>{"name": 1}</tool_call>', [], '<tool_call>{"name": 1}</tool_call>'),
        ("tool-call-json", '<tool_call>{"name": "add"', [], '<tool_call>{"name": "add"'),
        (
            "function-tags",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=word>\n1\n</parameter>\n"
            "</function>\n</tool_call>",
            [("add", {"a": 1, "word": "1"})],
            None,
        ),
        (
            "argument-tags",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            [("add", {"a": 1})],
            None,
        ),
        ("bare-json", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], None),
        ("bare-json", 'It is {"a": 1}.', [], 'It is {"a": 1}.'),
    ],
)
def test_forms_of_tool_calls(form: str, text: str, calls: list[tuple[str, Any]], content: str | None) -> None:
    message = read_reply(text, FORMS[form], TOOLS, 3)
    found = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", [])
    ]
    assert (found, message["content"]) == (calls, content)
    assert [call["id"] for call in message.get("tool_calls", [])] == [
        f"call_3_{number}" for number in range(len(calls))
    ]


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")


def _reaching_out(folder: Path) -> None:
    text = "{{ messages.__class__.__mro__[1].__subclasses__() }}<|im_end|>"
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


def _no_end(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_tokenizer, "has no tokenizer.json"),
        (_broken_tokenizer, "can't be read"),
        (_no_template, "has no chat template; is it a base model"),
        (_broken_template, "chat template of .* can't be used"),
        (_reaching_out, "access to attribute '__class__' .* is unsafe"),
        (_no_end, "names a token that ends a reply"),
    ],
)
def test_an_unusable_model_folder_is_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(write_model(tmp_path))
    with pytest.raises(ModelStartError, match=message):
        create_model(spec_of("http://127.0.0.1:9", tmp_path))


def test_an_unknown_reply_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelStartError, match="reply_form is 'xml'; it must be one of function-tags"):
        create_model(spec_of("http://127.0.0.1:9", write_model(tmp_path), **{REPLY_FORM: "xml"}))
