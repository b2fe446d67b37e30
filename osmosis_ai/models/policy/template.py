"""Render conversations as tokens with a model's own chat template and tokenizer.

Both come from a model folder as Transformers saves it, but Transformers isn't imported. The template is code that comes
with the model, so it runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from osmosis_ai.errors import ModelStartError, OsmosisError
from osmosis_ai.folders import UnreadableError, read_bounded
from osmosis_ai.records import JsonObject, Message, Tool
from osmosis_ai.wire_json import decode_json

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from tokenizers import Tokenizer

__all__ = ["ChatTemplate", "ChatTemplateError", "load_template"]

MAX_CONFIG_BYTES = 16 * 1024 * 1024
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_SAMPLE = "x"
_USER: Message = {"role": "user", "content": _SAMPLE}
_PARAMETERS: JsonObject = {"type": "object", "properties": {_SAMPLE: {"type": "string"}}}
_TOOL: Tool = {"type": "function", "function": {"name": "tool", "description": "A tool.", "parameters": _PARAMETERS}}
_CALL: JsonObject = {"id": "call_1", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
_ANSWERING: Message = {"role": "assistant", "content": _SAMPLE}
_CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class ChatTemplateError(OsmosisError):
    """The template can't render a conversation; the message is the template's own, or says what is missing."""


class ChatTemplate:
    """Renders conversations as tokens.

    Attributes:
        stop_ids: The tokens that end a reply.
        source: The template's source.
        shows_tools: True if the template renders tools into the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, names: JsonObject, stop_ids: Sequence[int]) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._names = names
        self._special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        # The options and names that Transformers gives templates: other white space would make other tokens.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._objects = self._takes_objects()
        self.shows_tools = self.render([_USER], [_TOOL]) != self.render([_USER], ())
        # Some models end a reply with tool calls differently from an answer.
        endings = [self._ending(self.render([_USER, reply], (), generate=False)) for reply in self._replies()]
        self.stop_ids = sorted({*stop_ids, *(token for ending in endings for token in ending[:1])})
        if not self.stop_ids:
            raise ChatTemplateError(
                "neither the chat template nor generation_config.json names a token that ends a reply"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool = True) -> list[int]:
        """Return a conversation's tokens, plus the opening of the next reply if `generate`; raise ChatTemplateError."""
        try:
            text = self._template.render(
                messages=[_for_template(message, objects=self._objects) for message in messages],
                # None instead of an empty list or nothing at all, because templates test `tools is not none`.
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                **self._names,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as error:
            # A template runs like any code, and fails in these ways on a conversation that it doesn't expect.
            raise ChatTemplateError(f"the chat template can't render the conversation: {error}") from error
        # The template writes the special tokens itself; the tokenizer would add a second BOS.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def after(self, reply: Message, last: int, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between a sampled reply and the next one, which render the messages between them.

        They are cut out of the rendering of a short dummy conversation that ends with these messages, so the real
        conversation, and above all the reply, is never rendered again. (TRL does the same for tool messages.)

        Args:
            reply: The reply's message; the template sees only its tool names and call ids.
            last: The reply's last token. If it isn't a stop token, the result starts with one.
            messages: The messages after the reply.

        Raises:
            ChatTemplateError: The template can't render the messages after a reply.
        """
        bare = _ANSWERING
        if calls := reply.get("tool_calls"):
            bare = {"role": "assistant", "content": "", "tool_calls": [_bare(call) for call in calls]}
        alone = self.render([_USER, bare], (), generate=False)
        whole = self.render([_USER, bare, *messages], ())
        ending = self._ending(alone)
        if not ending:
            # Such a template has no end token: the token that opens the next message also ends the reply.
            if whole[: len(alone)] != alone:
                raise ChatTemplateError("the chat template renders a reply differently when messages follow it")
            rest = whole[len(alone) :]
            return rest[1:] if rest[:1] == [last] else rest
        # A template may render the last reply differently, for example with empty reasoning, so count end tokens
        # instead of comparing prefixes.
        end = _nth(whole, ending[0], alone.count(ending[0]))
        if last in ending and whole.count(last) >= alone.count(last):
            return whole[_nth(whole, last, alone.count(last)) + 1 :]
        return whole[end + 1 :] if last in self.stop_ids else whole[end:]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a reply's tokens, including special tokens, except the stop token at the end."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token(self, number: int) -> str:
        """Return a token's text, with � for a partial character."""
        text: str = self._tokenizer.decode([number], skip_special_tokens=False)
        return text

    def _ending(self, rendered: Sequence[int]) -> list[int]:
        """Return the special tokens at the end of a rendered conversation, ignoring white space between them."""
        found: list[int] = []
        for token in reversed(rendered):
            if token in self._special:
                found.insert(0, token)
            elif self.token(token).strip():
                break
        return found

    def _takes_objects(self) -> bool:
        """Return True if the template accepts tool-call arguments as objects; some accept only text."""
        self._objects = True
        return self._renders(_CALLING)

    def _replies(self) -> list[Message]:
        return [_ANSWERING, *([_CALLING] if self._renders(_CALLING) else [])]

    def _renders(self, reply: Message) -> bool:
        try:
            self.render([_USER, reply], ())
        except ChatTemplateError:
            return False
        return True


# Forked workers inherit what `preload` has loaded.
@lru_cache(maxsize=4)
def load_template(folder: str) -> ChatTemplate:
    """Read a model folder's tokenizer and chat template; raise ModelStartError if one is missing or unusable."""
    # Workers are forked from a process that has loaded the tokenizer, whose thread pool doesn't survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    root = Path(folder)
    file = root / "tokenizer.json"
    if not file.is_file():
        raise ModelStartError(
            f"{folder} has no tokenizer.json. Name a model folder as Transformers saves it, with tokenizer.json, "
            "tokenizer_config.json and a chat template."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ModelStartError(f"{file} can't be read: {error}") from error
    # tokenizer.json may have saved the padding and truncation of the model's training.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _json(root / "tokenizer_config.json")
    for number, token in config.get("added_tokens_decoder", {}).items():
        if tokenizer.token_to_id(token["content"]) != int(number):
            raise ModelStartError(
                f"{file} lacks the token {token['content']!r} of tokenizer_config.json; save the tokenizer again"
            )
    names = {name: _content(config[name]) for name in SPECIAL if config.get(name) is not None}
    try:
        return ChatTemplate(tokenizer, _source(root, config), names, _stop_ids(root, tokenizer, names))
    except (TemplateError, ChatTemplateError) as error:
        raise ModelStartError(f"the chat template of {folder} can't be used: {error}") from error


def _source(root: Path, config: JsonObject) -> str:
    file = root / "chat_template.jinja"
    if file.is_file():
        return _read(file).decode("utf-8")
    given = config.get("chat_template")
    # A model may have several templates, by name.
    if isinstance(given, list):
        named = {one["name"]: one["template"] for one in given}
        given = named.get("tool_use") or named.get("default")
    if not isinstance(given, str):
        raise ModelStartError(f"{root} has no chat template; is it a base model? Save a template as {file}.")
    return given


def _stop_ids(root: Path, tokenizer: Tokenizer, names: JsonObject) -> list[int]:
    found: set[int] = set()
    file = root / "generation_config.json"
    if file.is_file():
        given = _json(file).get("eos_token_id")
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    if (end := names.get("eos_token")) is not None and (number := tokenizer.token_to_id(end)) is not None:
        found.add(number)
    return sorted(found)


def _json(file: Path) -> JsonObject:
    try:
        found = json.loads(_read(file))
    except ValueError as error:
        raise ModelStartError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelStartError(f"{file} is not a JSON object")
    return found


def _read(file: Path) -> bytes:
    try:
        return read_bounded(file, MAX_CONFIG_BYTES, f"larger than {MAX_CONFIG_BYTES >> 20} MiB")
    except UnreadableError as error:
        raise ModelStartError(f"{file}: {error.message}") from error


def _content(token: object) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _nth(ids: Sequence[int], token: int, count: int) -> int:
    """Return the position of the `count`-th occurrence of a token, counting from 1; raise ChatTemplateError."""
    position = -1
    for _ in range(count):
        if token not in ids[position + 1 :]:
            raise ChatTemplateError("the chat template ends a reply differently when messages follow it")
        position = ids.index(token, position + 1)
    return position


def _bare(call: JsonObject) -> JsonObject:
    return {**call, "function": {"name": call["function"]["name"], "arguments": "{}"}}


def _for_template(message: Message, *, objects: bool) -> Message:
    """Return a message as templates expect it: content as text and, with `objects`, arguments parsed if possible."""
    shown = {**message, "content": _text(message.get("content"))}
    if objects and (calls := message.get("tool_calls")):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in calls
        ]
    return shown


def _text(content: Any) -> str:
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                raise ChatTemplateError(
                    "a message has a part that isn't text, such as an image; only text is supported with --tokenizer"
                )
        return "".join(part["text"] for part in content)
    return "" if content is None else str(content)


def _arguments(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        found = decode_json(text or "{}")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Write JSON as Transformers does in templates: without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` blocks, which mark replies in training templates; they render their content unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
