"""Models without weights: folders with a tokenizer and a chat template, and an endpoint that takes and gives tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from osmosis_ai.rollout.testing import serve_app

END = "<|im_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, "<|stop|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_OPENING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nCall one as EXAMPLE<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\nLAST' + message.content }}
{%- for call in message.tool_calls or [] %}
CALL
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_JSON_CALL = """{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}</tool_call>' }}"""
_TAGGED_CALL = """{{- '<tool_call><function=' + call.function.name + '>' }}
{%- for name, value in call.function.arguments.items() %}
{{- '\\n<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>' }}
{%- endfor %}
{{- '\\n</function></tool_call>' }}"""


def _template(example: str, call: str, last: str = "") -> str:
    return _OPENING.replace("EXAMPLE", example).replace("CALL", call).replace("LAST", last)


TEMPLATES = {
    "json": _template("<tool_call>JSON</tool_call>", _JSON_CALL),
    "tags": _template("<tool_call><function=NAME>…</function></tool_call>", _TAGGED_CALL),
    # Renders only the last reply with (empty) reasoning, as some models' own templates do.
    "last": _template(
        "<tool_call>JSON</tool_call>", _JSON_CALL, "' + ('<think>\\n\\n</think>\\n\\n' if loop.last else '') + '"
    ),
}
"""Chat templates by what is special about them. In `json` and `tags`, what was rendered stays a prefix."""


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer with one token per byte, and the special tokens of the templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return tokenizer


def write_model(folder: Path, template: str = "json") -> Path:
    """Write a model's folder, but for its weights, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": END, "special": True}, "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATES[template], encoding="utf-8")
    return folder


class TokenRequest(NamedTuple):
    """A request to the endpoint, and the tokens that it answered with."""

    body: dict[str, Any]
    prompt: list[int]
    reply: list[int]


class TokenEndpoint:
    """A completions endpoint that takes and gives tokens, as vLLM's does.

    Args:
        script: Returns the text of the reply to a request, given the text of its prompt. A text that doesn't end with a
            special token was cut off.
        spoil: Changes the answer, for tests of wrong ones.
        token: What requests must bring, None for none.

    Attributes:
        requests: Every request but probes, in the order of their answers.
    """

    def __init__(
        self,
        script: Callable[[str], str],
        *,
        spoil: Callable[[dict[str, Any]], None] = lambda _: None,
        token: str | None = None,
    ) -> None:
        self.requests: list[TokenRequest] = []
        self._tokenizer = make_tokenizer()
        self._script = script
        self._spoil = spoil
        self._token = token

    @contextmanager
    def run(self) -> Iterator[str]:
        """Serve on loopback during the block; yield the base URL."""
        with serve_app(Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])) as url:
            yield f"{url}/v1"

    async def _complete(self, request: Request) -> Response:
        if self._token is not None and request.headers.get("authorization") != f"Bearer {self._token}":
            return JSONResponse({"error": {"message": "wrong token"}}, 401)
        body = await request.json()
        prompt = body["prompt"]
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        reply = self._tokenizer.encode(self._script(text), add_special_tokens=False).ids[: body["max_tokens"]]
        if "ping<|im_end|>" not in text:
            self.requests.append(TokenRequest(body, prompt, reply))
        ended = bool(reply) and reply[-1] in body["stop_token_ids"]
        answer = {
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "finish_reason": "stop" if ended else "length",
                    "token_ids": reply,
                    "prompt_token_ids": prompt,
                    "logprobs": {
                        "tokens": [f"token_id:{number}" for number in reply],
                        "token_logprobs": [-0.5 - number / 1000 for number in reply],
                    },
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(reply)},
        }
        self._spoil(answer)
        return JSONResponse(answer)
