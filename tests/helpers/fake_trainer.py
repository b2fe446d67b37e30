"""A trainer that learns nothing: it speaks the protocol, and serves a policy whose replies depend on the step.

FAKE_TRAINER, a JSON object, says how it misbehaves: `fail_at`, `hang_at` and `drift_at` name a step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tokenizers import Tokenizer

TOKEN = os.environ["OSMOSIS_TRAINER_TOKEN"]
JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
FAULTS = json.loads(os.environ.get("FAKE_TRAINER", "{}"))
TOKENIZER = Tokenizer.from_file(f"{JOB['model']}/tokenizer.json")
state = {"step": 0}


def reply_to(prompt: str, draw: random.Random) -> str:
    """Call one of two equivalent tools, `add` more often in later steps, and then answer."""
    if "<tool_response>" in prompt:
        return "done<|im_end|>"
    tool = "add" if draw.random() < 0.3 + 0.1 * state["step"] else "plus"
    return f'<tool_call>{{"name": "{tool}", "arguments": {{"a": 1, "b": 2}}}}</tool_call><|im_end|>'


class Policy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    draw = random.Random(JOB["seed"])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer(401, {"error": {"message": "wrong token"}})
        prompt = body["prompt"]
        text = reply_to(TOKENIZER.decode(prompt, skip_special_tokens=False), self.draw)
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids[: body["max_tokens"]]
        if FAULTS.get("drift_at") == state["step"]:
            prompt = prompt[1:]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": [-1.0] * len(ids)},
        }
        return self.answer(200, {"model": "policy", "choices": [choice]})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    request = Request(JOB["runtime_url"] + path, json.dumps(body).encode(), headers)
    try:
        with urlopen(request) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        print(json.loads(error.read())["error"]["message"], flush=True)
        sys.exit(1)


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", JOB["policy_port"]), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    print(f"a trainer that learns nothing, with the token {TOKEN}", flush=True)
    if JOB["mode"] == "serve":
        post("/v1/ready", {"policy_url": url})
        signal.pause()
    resumed = JOB["resume_from"]
    first = json.loads(Path(resumed, "step.json").read_text(encoding="utf-8")) if resumed else 0
    samples, size = JOB["training"]["n_samples_per_prompt"], JOB["training"]["rollout_batch_size"]
    batches = [JOB["rows"][start : start + size] for start in range(0, len(JOB["rows"]) - size + 1, size)]
    steps = batches * JOB["training"]["total_epochs"]
    for step, rows in enumerate(steps[first:], first + 1):
        state["step"] = step
        batch = post("/v1/batches", {"step": step, "rows": rows, "samples": samples, "policy_url": url})
        assert [group["row"] for group in batch["groups"]] == rows
        for sample in (sample for group in batch["groups"] for sample in group["samples"]):
            if sample["reward"] is not None:
                lengths = {len(sample[name]) for name in ("completion_ids", "mask", "logprobs")}
                assert len(lengths) == 1
                assert sample["mask"][0] == sample["mask"][-1] == 1
        if FAULTS.get("fail_at") == step:
            print("out of memory", flush=True)
            sys.exit(3)
        if FAULTS.get("hang_at") == step:
            signal.pause()
        post("/v1/metrics", {"step": step, "metrics": {"loss": 1 / step, "step_time": 0.5}})
        if step % (JOB["checkpoints"]["eval_interval"] or len(steps) + 1) == 0:
            post("/v1/evaluations", {"step": step, "policy_url": url})
        if step % JOB["checkpoints"]["checkpoint_save_freq"] == 0 or step == len(steps):
            folder = Path(JOB["output"], f"checkpoint-{step}")
            folder.mkdir(exist_ok=True)
            (folder / "step.json").write_text(str(step), encoding="utf-8")
            post("/v1/checkpoints", {"step": step, "path": str(folder), "kind": "lora"})


main()
