"""A scripted model behind a real OpenAI-compatible HTTP endpoint on loopback.

A test scripts the model's replies and runs the real client, the real loop or the installed command against them:

    async with ScriptedEndpoint([tool_call("add", a=1, b=2), text("#### 3")]) as endpoint:
        ...  # endpoint.url is the base URL; endpoint.requests lists the requests

    with ScriptedEndpoint(by_turn(tool_call("add", a=1, b=2), text("#### 3"))).run_in_thread() as endpoint:
        subprocess.run(["osmosis", "test", "--base-url", endpoint.url, "--model", "scripted"])

A script is a sequence of replies, consumed in order, or a function from a `Request` to its reply. Use a function for
concurrent rollouts, because it doesn't depend on which of them asks first. As a command, this module serves a JSON
script:

    python -m osmosis_ai.testing.endpoint --script FILE --port-file FILE
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import signal
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
from aiohttp import web
from anyio.from_thread import start_blocking_portal

from osmosis_ai.collector import calm_collector

__all__ = [
    "Gate",
    "Reply",
    "Request",
    "Script",
    "ScriptedEndpoint",
    "broken_json",
    "by_turn",
    "drop",
    "hang",
    "raw_json",
    "status",
    "text",
    "tool_call",
    "tool_calls",
]

JSON = "application/json"
HTML = "text/html; charset=utf-8"


class Gate:
    """Holds replies back until the test opens it; usable from any thread.

    `reached` is set once a request waits at the gate, so a test can wait for that instead of sleeping.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._is_open = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def open(self) -> None:
        """Let every waiting and every later reply through."""
        with self._lock:
            self._is_open = True
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            # The waiter's loop may run in another thread.
            # A closed loop has no waiters left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Return when the gate is open."""
        with self._lock:
            if self._is_open:
                self.reached.set()
                return
            event = asyncio.Event()
            self._waiters.append((asyncio.get_running_loop(), event))
        self.reached.set()
        await event.wait()


@dataclasses.dataclass(frozen=True)
class Reply:
    """The endpoint's reaction to one request.

    Args:
        body: Body of the reply, as bytes.
        status: HTTP status.
        headers: Headers other than `Content-Type` and `Content-Length`.
        content_type: The `Content-Type` header.
        action: `send` the reply; `hang` until the endpoint closes; `drop` the connection halfway through the body.
        hold: Seconds to wait before sending the reply, or a gate to wait at.
    """

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    content_type: str = JSON
    action: Literal["send", "hang", "drop"] = "send"
    hold: float | Gate | None = None

    def after(self, hold: float | Gate) -> Reply:
        """Return the same reply, held back for `hold` seconds or until the gate opens."""
        return dataclasses.replace(self, hold=hold)


class _Role(msgspec.Struct):
    role: str = ""


class _Roles(msgspec.Struct):
    messages: list[_Role] = []


# Decodes nothing else of a conversation, which may be long.
_decode_roles = msgspec.json.Decoder(_Roles).decode


class Request:
    """One request as it arrived. The body is decoded on first use.

    Attributes:
        method, path: HTTP method, and path of the URL.
        headers: Header names in lower case.
        raw: The bytes of the body.
        time: `time.monotonic()` of its arrival, in seconds.
    """

    def __init__(self, method: str, path: str, headers: Mapping[str, str], raw: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.raw = raw
        self.time = time.monotonic()

    @functools.cached_property
    def body(self) -> dict[str, Any]:
        return cast("dict[str, Any]", msgspec.json.decode(self.raw))

    @property
    def model(self) -> str | None:
        return self.body.get("model")

    @property
    def messages(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self.body.get("messages", []))

    @property
    def tools(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", self.body.get("tools", []))

    @property
    def turn(self) -> int:
        """Number of replies already in the conversation: 0 for its first model call."""
        return sum(message.role == "assistant" for message in _decode_roles(self.raw).messages)

    @property
    def is_probe(self) -> bool:
        """True for the small request that checks before a run that the model answers."""
        # Cheap tests first, because decoding a long conversation takes time.
        if len(self.raw) > 4096 or b"ping" not in self.raw:
            return False
        return self.body.get("messages") == [{"role": "user", "content": "ping"}] and "tools" not in self.body


Script = Callable[[Request], Reply]


def raw_json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a reply with exactly this JSON body.

    Args:
        value: The body, to be encoded as JSON.
        status: The HTTP status.
        headers: Further HTTP headers.
    """
    return Reply(msgspec.json.encode(value), status, headers or {})


def _chat_reply(choice: dict[str, Any], model: str, usage: tuple[int, int]) -> Reply:
    prompt, completion = usage
    return raw_json(
        {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [{"index": 0, **choice}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        }
    )


def text(
    content: str,
    *,
    prompt_tokens: int = 10,
    completion_tokens: int = 5,
    finish_reason: str = "stop",
    model: str = "scripted",
    message: Mapping[str, Any] | None = None,
    choice: Mapping[str, Any] | None = None,
) -> Reply:
    """Return an assistant message with this content.

    Args:
        content: The text.
        prompt_tokens, completion_tokens: The reply's usage.
        finish_reason: As in the chat-completions format.
        model: Model name in the reply.
        message: Further fields of the message (`reasoning_content`, …).
        choice: Further fields of the choice (`logprobs`, `token_ids`, …).
    """
    body = {"role": "assistant", "content": content, **(message or {})}
    first = {"message": body, "finish_reason": finish_reason, **(choice or {})}
    return _chat_reply(first, model, (prompt_tokens, completion_tokens))


def tool_calls(
    calls: Iterable[tuple[str, Mapping[str, Any] | str]],
    *,
    content: str | None = None,
    prompt_tokens: int = 10,
    completion_tokens: int = 5,
    model: str = "scripted",
) -> Reply:
    """Return an assistant message that calls tools.

    Args:
        calls: Name and arguments of each call; a string of arguments is sent as is, valid JSON or not.
        content: The text beside the calls.
        prompt_tokens, completion_tokens: The reply's usage.
        model: Model name in the reply.
    """
    items = []
    for index, (name, arguments) in enumerate(calls):
        written = arguments if isinstance(arguments, str) else msgspec.json.encode(dict(arguments)).decode()
        # Derived from the call itself, so that a script always sends the same ids.
        call_id = f"call_{zlib.crc32(f'{name} {written}'.encode()):08x}_{index}"
        items.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": written}})
    message = {"role": "assistant", "content": content, "tool_calls": items}
    first = {"message": message, "finish_reason": "tool_calls"}
    return _chat_reply(first, model, (prompt_tokens, completion_tokens))


def tool_call(name: str, /, **arguments: Any) -> Reply:
    """Return an assistant message that calls one tool, such as `tool_call("add", a=1, b=2)`."""
    return tool_calls([(name, arguments)])


def status(code: int, *, headers: Mapping[str, str] | None = None, body: Any = None) -> Reply:
    """Return an HTTP error.

    Args:
        code: The HTTP status.
        headers: For example `{"Retry-After": "1"}` or `{"Location": …}`.
        body: A string is sent as an HTML page, anything else as JSON; the default is an OpenAI error object.
    """
    if isinstance(body, str):
        return Reply(body.encode(), code, headers or {}, HTML)
    if body is None:
        body = {"error": {"message": f"scripted {code}", "type": "scripted", "code": code}}
    return raw_json(body, status=code, headers=headers)


def broken_json() -> Reply:
    """Return a complete HTTP reply with a body that stops in the middle of the JSON."""
    return Reply(text("unfinished").body[:-20])


def hang() -> Reply:
    """Return a reply that never comes: the request hangs until the endpoint closes."""
    return Reply(action="hang")


def drop() -> Reply:
    """Return a reply that closes the connection halfway through the body."""
    return dataclasses.replace(text("you never read the end of this"), action="drop")


def by_turn(*replies: Reply) -> Script:
    """Return a script that gives every conversation these replies in order; the last one repeats."""
    if not replies:
        raise ValueError("by_turn needs at least one reply")
    last = len(replies) - 1
    return lambda request: replies[min(request.turn, last)]


def as_script(script: Sequence[Reply] | Script, exhausted: Callable[[], Reply]) -> Script:
    """Convert a script to a function; `exhausted` answers beyond the end of a sequence."""
    if callable(script):
        return script
    replies = iter(tuple(script))
    return lambda request: next(replies, None) or exhausted()


_Endpoint = TypeVar("_Endpoint", bound="ScriptedEndpoint")


class ScriptedEndpoint:
    """An OpenAI-compatible server on 127.0.0.1 that answers `POST /v1/chat/completions` and `GET /v1/models`.

    Args:
        script: Replies consumed in order (a request beyond them gets a 400 that says so), or a function of the request.
        api_key: If set, requests without it get a 401.
        models: If set, the only model names served; others get a 404. By default, any name is served.
        probe: Reply to the small request that precedes a run; None lets the script answer it too.
        record: Keep the requests in `requests`; benchmarks turn it off.

    Attributes:
        requests: Every chat request, probes included, in order of arrival.
    """

    def __init__(
        self,
        script: Sequence[Reply] | Script = (),
        *,
        api_key: str | None = None,
        models: Sequence[str] | None = None,
        probe: Reply | None = text("pong", prompt_tokens=1, completion_tokens=1),  # noqa: B008  a frozen value
        record: bool = True,
    ) -> None:
        self.requests: list[Request] = []
        self._script = as_script(script, self._exhausted)
        self._api_key = api_key
        self._models = models
        self._probe = probe
        self._record = record
        # For threads, because the endpoint may run in another one than the test.
        self._arrived = threading.Condition()
        self._port: int | None = None
        self._closing = asyncio.Event()
        self._pauses: set[asyncio.Future[None]] = set()
        self._stack = contextlib.AsyncExitStack()

    @property
    def port(self) -> int:
        """The port; raises RuntimeError if the endpoint isn't running."""
        if self._port is None:
            raise RuntimeError("the endpoint is not running")
        return self._port

    @property
    def url(self) -> str:
        """The base URL, `http://127.0.0.1:PORT/v1`."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def chats(self) -> list[Request]:
        """The requests of rollouts: all but the probes."""
        return [request for request in self.requests if not request.is_probe]

    def wait_for_requests(self, count: int, timeout: float = 30.0) -> None:
        """Block the calling thread until `count` chat requests have arrived; raise TimeoutError after `timeout` s."""
        self._wait_for(self.requests, count, "requests", timeout)

    def _wait_for(self, items: Sequence[object], count: int, what: str, timeout: float) -> None:
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(items) >= count, timeout):
                raise TimeoutError(f"{len(items)} of {count} {what} arrived within {timeout:g} s")

    async def __aenter__(self: _Endpoint) -> _Endpoint:
        await self._stack.enter_async_context(self._serve())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @contextlib.asynccontextmanager
    async def _serve(self) -> AsyncIterator[None]:
        # A new one, because an endpoint may be started again.
        self._closing = asyncio.Event()
        # The bare server without a router or access log: benchmarks count its CPU time too.
        runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=1.0)
        await runner.setup()
        try:
            # A thousand rollouts may connect at the same moment.
            site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
            await site.start()
            self._port = runner.addresses[0][1]
            yield
        finally:
            self._closing.set()
            for pause in self._pauses:
                _end_pause(pause)
            self._port = None
            await runner.cleanup()

    @contextlib.contextmanager
    def run_in_thread(self: _Endpoint) -> Iterator[_Endpoint]:
        """Serve from a thread, for tests that aren't async or that run a command."""
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self):
            yield self

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        # Read from the stream, because `http.read()` refuses bodies over 1 MiB.
        request = Request(http.method, http.path, http.headers, await http.content.read())
        reply = self.reply_to(request)
        if isinstance(reply.hold, Gate):
            await self._unless_closing(reply.hold.wait())
        elif reply.hold is not None:
            await self._pause(reply.hold)
        elif reply.action == "hang":
            await self._closing.wait()
        if self._closing.is_set():
            return self._cut(http)
        if reply.action == "drop":
            partial = web.StreamResponse(status=reply.status, headers={"Content-Length": str(len(reply.body))})
            await partial.prepare(http)
            await partial.write(reply.body[: len(reply.body) // 2])
            return self._cut(http, partial)
        headers = {"Content-Type": reply.content_type, **reply.headers}
        return web.Response(body=reply.body, status=reply.status, headers=headers)

    async def _pause(self, seconds: float) -> None:
        if self._closing.is_set():
            return
        # Benchmarks have a thousand replies wait at a time: a future and a timer each, no task and no cancel scope.
        loop = asyncio.get_running_loop()
        pause = loop.create_future()
        self._pauses.add(pause)
        timer = loop.call_later(seconds, _end_pause, pause)
        try:
            await pause
        finally:
            timer.cancel()
            self._pauses.discard(pause)

    async def _unless_closing(self, wait: Any) -> None:
        # A request held at a gate must not keep the endpoint from closing.
        waiting = asyncio.ensure_future(wait)
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({waiting, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            closing.cancel()

    @staticmethod
    def _cut(http: web.BaseRequest, reply: web.StreamResponse | None = None) -> web.StreamResponse:
        if http.transport is not None:
            http.transport.close()
        # aiohttp wants a response even for a connection that is closed.
        return reply or web.Response()

    def reply_to(self, request: Request) -> Reply:
        """Return the reply to a request; a subclass may serve further paths."""
        path = request.path.rstrip("/")
        if path not in {"/v1/chat/completions", "/v1/models"}:
            return status(404, body={"error": {"message": f"no such path: {request.path}"}})
        is_chat = path == "/v1/chat/completions"
        if request.method != ("POST" if is_chat else "GET"):
            return status(405)
        if is_chat and self._record:
            with self._arrived:
                self.requests.append(request)
                self._arrived.notify_all()
        refusal = self.refusal(request)
        if refusal is not None:
            return refusal
        if not is_chat:
            served = self._models or ("scripted",)
            return raw_json({"object": "list", "data": [{"id": name, "object": "model"} for name in served]})
        if self._models is not None and request.model not in self._models:
            message = f"The model `{request.model}` does not exist."
            return status(404, body={"error": {"message": message, "code": "model_not_found"}})
        if self._probe is not None and request.is_probe:
            return self._probe
        return self._script(request)

    def _exhausted(self) -> Reply:
        message = f"the script has no reply left for request {len(self.requests)}"
        # Not a 5xx, which clients would retry.
        return status(400, body={"error": {"message": message}})

    def refusal(self, request: Request) -> Reply | None:
        """Return the reply to a request without the right key; None if it has the key, or no key is required."""
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is None or sent == self._api_key:
            return None
        # Real endpoints echo the key they refuse; clients must cope with that.
        message = f"Incorrect API key provided: {sent}" if sent else "You didn't provide an API key."
        return status(401, body={"error": {"message": message, "code": "invalid_api_key"}})


def _reply_from(item: Mapping[str, Any]) -> Reply:
    usage = {key: item[key] for key in ("prompt_tokens", "completion_tokens") if key in item}
    if "text" in item:
        reply = text(item["text"], **usage)
    elif "tool_calls" in item:
        reply = tool_calls([(call.get("name", ""), call.get("arguments", {})) for call in item["tool_calls"]], **usage)
    elif "raw" in item:
        reply = raw_json(item["raw"])
    elif "status" in item:
        reply = status(item["status"], headers=item.get("headers"), body=item.get("body"))
    elif item.get("action") in {"hang", "drop", "broken_json"}:
        reply = {"hang": hang, "drop": drop, "broken_json": broken_json}[item["action"]]()
    else:
        raise ValueError(f"a reply needs text, tool_calls, raw, status or action; this one has {sorted(item)}")
    return reply.after(item["delay"]) if "delay" in item else reply


class _ScriptFile(msgspec.Struct):
    replies: list[dict[str, Any]] | None = None
    turns: list[dict[str, Any]] | None = None
    api_key: str | None = None
    models: list[str] | None = None
    record: bool = False


def load_script(path: Path) -> ScriptedEndpoint:
    """Create the endpoint that a script file describes.

    The file is a JSON object with `replies` (consumed in order) or `turns` (every conversation gets them in order, and
    the last one repeats), and optionally `api_key`, `models` and `record` (false by default). A reply is
    `{"text": …}`, `{"tool_calls": [{"name", "arguments"}]}`, `{"raw": …}`, `{"status", "headers", "body"}` or
    `{"action": "hang" | "drop" | "broken_json"}`. Each takes an optional `delay` in seconds; the first two also take
    `prompt_tokens` and `completion_tokens`.

    Raises:
        OSError: The file can't be read.
        msgspec.DecodeError: The file isn't JSON, or lacks this form.
        ValueError: A reply lacks this form.
    """
    script = msgspec.json.decode(path.read_bytes(), type=_ScriptFile)
    if (script.replies is None) == (script.turns is None):
        raise ValueError("a script has either `replies` or `turns`")
    replies = [_reply_from(item) for item in script.replies or script.turns or ()]
    return ScriptedEndpoint(
        replies if script.turns is None else by_turn(*replies),
        api_key=script.api_key,
        models=script.models,
        record=script.record,
    )


def _end_pause(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


async def _serve_until_stopped(endpoint: ScriptedEndpoint, port_file: Path) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with endpoint:
        # Renamed into place, so that a waiting process never reads half a number.
        temporary = port_file.with_name(port_file.name + ".tmp")
        temporary.write_text(f"{endpoint.port}\n", encoding="utf-8")
        temporary.replace(port_file)
        await stop.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a script file until SIGINT or SIGTERM. Once it listens, write the port to the port file."""
    parser = argparse.ArgumentParser(prog="python -m osmosis_ai.testing.endpoint", description=main.__doc__)
    parser.add_argument("--script", type=Path, required=True, help="JSON file: see load_script")
    parser.add_argument("--port-file", type=Path, required=True, help="file that receives the port number")
    options = parser.parse_args(arguments)
    try:
        endpoint = load_script(options.script)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        parser.error(f"{options.script}: {error}")
    calm_collector()
    asyncio.run(_serve_until_stopped(endpoint, options.port_file))


if __name__ == "__main__":
    main()
