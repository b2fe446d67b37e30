"""Put a streamed reply together: the chunks of a chat completion become the reply that would have come as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from osmosis_ai.records import JsonObject

__all__ = ["StreamedReply", "data_of"]

DONE = b"[DONE]"


def data_of(line: bytes) -> bytes | None:
    """Return the data in a line of an event stream, None for any other line and for the stream's last word."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    return None if data in (DONE, b"") else data


class StreamedReply:
    """The chunks of one reply.

    Attributes:
        finished: True once a chunk has given the finish reason.
        error: The chunk that reports an error instead, if any.
    """

    def __init__(self) -> None:
        self.finished = False
        self.error: JsonObject | None = None
        self._message: JsonObject = {}
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, JsonObject] = {}
        self._choice: JsonObject = {}
        self._reply: JsonObject = {}

    def add(self, chunk: object) -> Iterator[JsonObject]:
        """Take a chunk, and yield its choice of the first reply, if it has one."""
        if not isinstance(chunk, dict):
            return
        if chunk.get("error"):
            self.error = chunk
            return
        for name in ("model", "usage", "prompt_token_ids"):
            if chunk.get(name) is not None:
                self._reply[name] = chunk[name]
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            # Only the first choice is used, as in a whole reply; some endpoints leave its index out.
            if isinstance(choice, dict) and choice.get("index") in (0, None):
                self._take(choice)
                yield choice

    def reply(self) -> JsonObject:
        """Return the whole reply."""
        message = {**self._message, **{name: "".join(parts) for name, parts in self._texts.items()}}
        if self._calls:
            message["tool_calls"] = [_joined(self._calls[index]) for index in sorted(self._calls)]
        return {**self._reply, "choices": [{**self._choice, "index": 0, "message": message}]}

    def _take(self, choice: JsonObject) -> None:
        if choice.get("finish_reason"):
            self._choice["finish_reason"] = choice["finish_reason"]
            self.finished = True
        for name in ("token_ids", "prompt_token_ids"):
            if isinstance(choice.get(name), list):
                self._choice.setdefault(name, []).extend(choice[name])
        logprobs = choice.get("logprobs")
        for name, tokens in logprobs.items() if isinstance(logprobs, dict) else ():
            if isinstance(tokens, list):
                self._choice.setdefault("logprobs", {}).setdefault(name, []).extend(tokens)
        delta = choice.get("delta")
        for name, value in delta.items() if isinstance(delta, dict) else ():
            if name == "tool_calls":
                for position, call in enumerate(value if isinstance(value, list) else ()):
                    self._take_call(call, position)
            # Some endpoints repeat the role in every chunk; joined, it would be no role.
            elif name != "role" and isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif isinstance(value, list) and isinstance(self._message.get(name), list):
                self._message[name] = [*self._message[name], *value]
            elif value is not None:
                self._message[name] = value

    def _take_call(self, call: object, position: int) -> None:
        if not isinstance(call, dict):
            return
        index = call.get("index")
        # Some endpoints leave the index out of chunks with a single call.
        known = self._calls.setdefault(index if isinstance(index, int) else position, {"arguments": []})
        function = call.get("function")
        if isinstance(function, dict):
            # Names and ids come whole, and some endpoints repeat them in each chunk; arguments come in pieces.
            if function.get("name") and not known.get("name"):
                known["name"] = function["name"]
            arguments = function.get("arguments")
            if arguments:
                # Some endpoints send an object at once.
                known["arguments"].append(arguments if isinstance(arguments, str) else _text(arguments))
        for name in call.keys() - {"index", "function"}:
            if call[name] is not None and not known.get("call", {}).get(name):
                known.setdefault("call", {})[name] = call[name]


def _joined(call: JsonObject) -> JsonObject:
    return {**call.get("call", {}), "function": {"name": call.get("name"), "arguments": "".join(call["arguments"])}}


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
