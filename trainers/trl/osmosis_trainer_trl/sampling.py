"""Sample the model for requests with different lengths, parameters and seeds in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList


@dataclass(frozen=True)
class SamplingRequest:
    prompt: list[int]
    max_tokens: int
    temperature: float  # 0 takes the likeliest token
    top_p: float
    stops: frozenset[int]
    seed: int


@dataclass(frozen=True)
class Sampled:
    """Tokens, including the stop token, and their log probabilities at the request's temperature, before `top_p`."""

    tokens: list[int]
    logprobs: list[float]


@torch.no_grad()
def sample(model: Any, requests: list[SamplingRequest], pad_token: int) -> list[Sampled]:
    width = max(len(request.prompt) for request in requests)
    padding = [width - len(request.prompt) for request in requests]
    choice = _Choice(requests, model.device)
    model.generate(
        input_ids=torch.tensor(
            [[pad_token] * pad + request.prompt for pad, request in zip(padding, requests, strict=True)],
            device=model.device,
        ),
        attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=model.device),
        max_new_tokens=max(request.max_tokens for request in requests),
        do_sample=False,
        use_cache=True,
        pad_token_id=pad_token,
        logits_processor=LogitsProcessorList([choice]),
        stopping_criteria=StoppingCriteriaList([_Ended(choice)]),
    )
    return choice.sampled()


class _Choice(LogitsProcessor):
    """Samples each row's next token with that row's parameters, inside a greedy `generate`.

    This is the Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of their distribution. Each row has
    its own noise generator, so its tokens don't depend on the other requests in the batch.
    """

    def __init__(self, requests: list[SamplingRequest], device: torch.device) -> None:
        self._requests = requests
        self._temperature = torch.tensor([[request.temperature or 1.0] for request in requests], device=device)
        self._top_p = torch.tensor([[request.top_p] for request in requests], device=device)
        self._cuts = any(request.top_p < 1 for request in requests)
        self._noise = [
            torch.Generator(device).manual_seed(request.seed) if request.temperature else None for request in requests
        ]
        stops = max(len(request.stops) for request in requests)
        self._stops = torch.tensor(
            [[*request.stops, *[-1] * (stops - len(request.stops))] for request in requests],
            dtype=torch.long,
            device=device,
        )
        self._left = torch.tensor([request.max_tokens for request in requests], device=device)
        self.ended = torch.zeros(len(requests), dtype=torch.bool, device=device)
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        logits = scores.float() / self._temperature
        ranked = _within_top_p(logits, self._top_p) if self._cuts else logits.clone()
        for row, generator in enumerate(self._noise):
            if generator is not None:
                waits = torch.empty_like(ranked[row]).exponential_(generator=generator)
                ranked[row] -= waits.clamp_min(torch.finfo(waits.dtype).tiny).log()
        tokens = ranked.argmax(-1)
        self._tokens.append(tokens)
        self._logprobs.append(torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])
        self._left -= 1
        self.ended |= (tokens[:, None] == self._stops).any(1) | (self._left <= 0)
        return ranked

    def sampled(self) -> list[Sampled]:
        tokens, logprobs = torch.stack(self._tokens, 1).tolist(), torch.stack(self._logprobs, 1).tolist()
        result = []
        for request, ids, values in zip(self._requests, tokens, logprobs, strict=True):
            ends = (at + 1 for at, token in enumerate(ids) if token in request.stops)
            length = min(next(ends, len(ids)), request.max_tokens)
            result.append(Sampled(ids[:length], values[:length]))
        return result


class _Ended(StoppingCriteria):
    def __init__(self, choice: _Choice) -> None:
        self._choice = choice

    def __call__(self, input_ids: torch.LongTensor, scores: object, **kwargs: object) -> torch.BoolTensor:
        return self._choice.ended  # type: ignore[return-value]  # a bool tensor has no type of its own


def _within_top_p(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the logits of the smallest set of likeliest tokens whose total probability reaches `top_p`."""
    ordered, places = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    ordered = ordered.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, places, ordered)
