"""Serve the model in training to the runtime, through the part of vLLM's completions endpoint that works on tokens.

The server runs in its own thread. It answers only while the trainer waits for rollouts (`sampling`), when the weights
don't change; it refuses a later request rather than answer it with an updated policy.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta
from transformers import GenerationConfig

from osmosis_trainer_trl.sampling import Sampled, SamplingRequest, sample

WINDOW_S = 0.02  # how long the first request of a batch waits for others to join it
MAX_BATCH = 64
MAX_BODY_BYTES = 16 * 2**20


class CompletionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The supported part of vLLM's request. Other fields are refused, since ignoring them would change the sampling."""

    prompt: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    model: str = "policy"
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: Literal[0] | None = None
    return_token_ids: bool = True
    return_tokens_as_token_ids: bool = True


class PolicyServer:
    """Serves `model`, a transformers model that may hold LoRA layers; enters `precision` around each generation."""

    def __init__(
        self,
        token: str,
        seed: int,
        model: Any,
        tokenizer: Any,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        port: int = 0,
    ) -> None:
        self._token = token
        self._seed = seed
        self._model = model
        self._precision = precision
        self._port = port
        self._pad_token: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        own = model.generation_config.eos_token_id
        self._stops = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._context: int = model.config.get_text_config().max_position_embeddings
        self._step: int | None = None
        self._asked: Counter[bytes] = Counter()
        self._weights = threading.Lock()  # held while sampling, and to close it: no update starts mid-sample
        self._queue: asyncio.Queue[tuple[SamplingRequest, asyncio.Future[Sampled]]] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy", daemon=True)
        self.url = ""

    def __enter__(self) -> PolicyServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @contextmanager
    def sampling(self, step: int) -> Iterator[None]:
        """Answer requests with the current model during the block."""
        # The model's own defaults, such as a repetition penalty, would override the request's parameters.
        training, defaults = self._model.training, self._model.generation_config
        self._model.eval()
        self._model.generation_config = GenerationConfig(pad_token_id=self._pad_token)  # type: ignore[no-untyped-call]
        self._asked, self._step = Counter(), step
        try:
            yield
        finally:
            with self._weights:
                self._step = None
            self._model.generation_config = defaults
            self._model.train(training)

    def knows(self, tokens: list[int]) -> bool:
        return all(token < self._vocabulary for token in tokens)

    async def _start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        self._batches = asyncio.create_task(self._sample_batches())

    async def _stop(self) -> None:
        self._batches.cancel()
        await asyncio.gather(self._batches, return_exceptions=True)
        await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return _refusal(401, "the bearer token is missing or wrong")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _refusal(error.status, error.text or error.reason)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=CompletionRequest)
        except msgspec.DecodeError as error:
            return _refusal(400, str(error))
        if max(asked.prompt) >= self._vocabulary:
            return _refusal(400, f"token {max(asked.prompt)} isn't in the model's vocabulary of {self._vocabulary}")
        if len(asked.prompt) + asked.max_tokens > self._context:
            return _refusal(
                400,
                f"{len(asked.prompt)} tokens and max_tokens {asked.max_tokens} exceed the model's context of "
                f"{self._context}",
            )
        stops = frozenset(self._stops | set(asked.stop_token_ids))
        result: asyncio.Future[Sampled] = self._loop.create_future()
        job = SamplingRequest(
            asked.prompt, asked.max_tokens, asked.temperature, asked.top_p, stops, self._seed_for(asked)
        )
        self._queue.put_nowait((job, result))
        try:
            sampled = await result
        except PolicyClosedError as error:
            return _refusal(503, str(error))
        except Exception as error:  # noqa: BLE001 - the answer reports whatever the model raises
            return _refusal(500, f"{type(error).__name__}: {error}")
        return web.json_response(_completion(asked, sampled, stops))

    def _seed_for(self, asked: CompletionRequest) -> int:
        """Return the request's seed, or one derived from the run's seed, the step, the prompt and its repetitions.

        The nth request with a prompt in a step gets the same seed in every run, so the run's seed determines the
        samples.
        """
        if asked.seed is not None:
            return asked.seed % 2**63
        prompt = array("q", asked.prompt).tobytes()
        self._asked[prompt] += 1
        name = f"{self._seed}/{self._step}/{self._asked[prompt]}/".encode()
        return int.from_bytes(blake2b(name + prompt, digest_size=8).digest(), "big") % 2**63

    async def _sample_batches(self) -> None:
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(WINDOW_S)
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            outcome: list[Sampled] | Exception
            try:
                outcome = await asyncio.to_thread(self._sample, [job for job, _ in batch])
            except Exception as error:  # noqa: BLE001 - the answer to each request of the batch
                outcome = error
            for number, (_, result) in enumerate(batch):
                if result.done():
                    continue
                if isinstance(outcome, Exception):
                    result.set_exception(outcome)
                else:
                    result.set_result(outcome[number])

    def _sample(self, requests: list[SamplingRequest]) -> list[Sampled]:
        with self._weights, self._precision():
            if self._step is None:
                raise PolicyClosedError("the policy is being updated: it answers while the trainer waits for rollouts")
            return sample(self._model, requests, self._pad_token)


class PolicyClosedError(Exception):
    pass


def _completion(asked: CompletionRequest, sampled: Sampled, stops: frozenset[int]) -> dict[str, object]:
    logprobs = {"tokens": [f"token_id:{token}" for token in sampled.tokens], "token_logprobs": sampled.logprobs}
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "stop" if sampled.tokens[-1] in stops else "length",
        "token_ids": sampled.tokens,
        "prompt_token_ids": asked.prompt,
        "logprobs": None if asked.logprobs is None else logprobs,
    }
    prompt, completion = len(asked.prompt), len(sampled.tokens)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"object": "text_completion", "model": "policy", "choices": [choice], "usage": usage}


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
