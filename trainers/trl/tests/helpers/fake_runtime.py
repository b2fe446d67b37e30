"""A runtime over real HTTP whose task is easy to learn: sample tokens of the upper half of the vocabulary."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

TOKEN = "secret-of-the-run"
COMPLETION_TOKENS = 6
HALF = 137  # of the vocabulary of the model in conftest

Answer = tuple[int, bytes]


def post(url: str, body: object, token: str = TOKEN) -> Any:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


class FakeRuntime:
    """`left_out` names the samples of each group without a reward; `answers` overrides the answers of a path.

    What the trainer sent is in `requests`, as (path, body), in order.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.left_out: set[int] = set()
        self.answers: dict[str, Callable[[dict[str, Any]], Answer]] = {}
        self.url = ""
        self._pool = ThreadPoolExecutor(32)

    @contextmanager
    def served(self) -> Iterator[FakeRuntime]:
        runtime = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.headers["Authorization"] == f"Bearer {TOKEN}"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = runtime.answer(self.path, body)
                with suppress(ConnectionError):  # a trainer that has ended
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))  # seconds until it sees its end
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            self._pool.shutdown()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.requests.append((path, body))
        if path in self.answers:
            return self.answers[path](body)
        answer: dict[str, Any] = {}
        if path == "/v1/batches":
            answer = self.batch(body)
        elif path == "/v1/evaluations":
            samples = self.samples(body["policy_url"], list(range(8)))
            answer = {"step": body["step"], "reward": sum(s["reward"] for s in samples) / 8, "metrics": {}}
        return 200, json.dumps(answer).encode()

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body["samples"]
        samples = self.samples(body["policy_url"], [row for row in body["rows"] for _ in range(count)])
        groups = []
        for number, row in enumerate(body["rows"]):
            group = samples[number * count : (number + 1) * count]
            for sample in self.left_out:
                group[sample] = left_out_sample()
            groups.append({"row": row, "samples": group})
        return {"step": body["step"], "groups": groups, "metrics": {"errors": 0.0}}

    def samples(self, policy_url: str, rows: list[int]) -> list[dict[str, Any]]:
        return list(self._pool.map(lambda row: self._sample(policy_url, row), rows))

    def _sample(self, policy_url: str, row: int) -> dict[str, Any]:
        prompt = [10 + row % 7] * (1 + row % 3)
        body = {"model": "policy", "prompt": prompt, "max_tokens": COMPLETION_TOKENS, "logprobs": 0}
        choice = post(f"{policy_url}/completions", body)["choices"][0]
        tokens = choice["token_ids"]
        return {
            "rollout_id": f"row-{row}",
            "prompt_ids": prompt,
            "completion_ids": tokens,
            "mask": [1] * len(tokens),
            "logprobs": choice["logprobs"]["token_logprobs"],
            "reward": sum(token >= HALF for token in tokens) / len(tokens),
            "left_out": None,
        }

    def sent(self, path: str) -> list[dict[str, Any]]:
        return [body for requested, body in self.requests if requested == path]


def left_out_sample() -> dict[str, Any]:
    return {
        "rollout_id": None,
        "prompt_ids": [],
        "completion_ids": [],
        "mask": [],
        "logprobs": None,
        "reward": None,
        "left_out": "its worker ended",
    }
