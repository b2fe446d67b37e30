"""The served policy: its tokens and log probabilities are the model's, whatever they are sampled together with."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fake_runtime import TOKEN, post
from osmosis_trainer_trl.policy import MAX_BODY_BYTES, PolicyServer
from osmosis_trainer_trl.sampling import SamplingRequest, sample

PROMPTS = [[7], [12, 40, 41, 90], [3] * 17, [200, 5]]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 0.2  # several tokens are likely
    return model.train()


@pytest.fixture(scope="module")
def server(model: Any, tokenizer: Any) -> Iterator[PolicyServer]:
    with PolicyServer(TOKEN, 0, model, tokenizer) as server:
        yield server


@pytest.fixture
def policy(server: PolicyServer) -> Iterator[str]:
    with server.sampling(1):
        yield f"{server.url}/completions"


def complete(url: str, prompt: list[int], **parameters: Any) -> Any:
    body = {"model": "policy", "prompt": prompt, "max_tokens": 12, "logprobs": 0, "return_token_ids": True}
    return post(url, body | parameters)["choices"][0]


def tokens(choice: Any) -> list[int]:
    return list(choice["token_ids"])


def refused(url: str, body: object, token: str = TOKEN) -> tuple[int, str]:
    with pytest.raises(HTTPError) as raised:
        post(url, body, token)
    return raised.value.code, json.load(raised.value)["error"]["message"]


def request(prompt: list[int], seed: int = 0, **parameters: Any) -> SamplingRequest:
    defaults: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "stops": frozenset()}
    return SamplingRequest(prompt=prompt, seed=seed, **defaults | parameters)


def forward_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    model.train()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_requests_of_different_lengths_share_a_batch_and_get_their_own_tokens(policy: str) -> None:
    alone = [tokens(complete(policy, prompt, temperature=0)) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: tokens(complete(policy, prompt, temperature=0)), PROMPTS))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)


def test_a_batch_holds_what_was_asked_for_with_other_parameters(model: Any) -> None:
    asked = [
        request([7], 1, max_tokens=9),
        request([12, 40], 2, max_tokens=3, temperature=0.3),
        request([3] * 17, 3, max_tokens=6, top_p=0.4),
        request([200, 5], 4, max_tokens=12, temperature=0),
    ]
    together = sample(model, asked, 0)
    for one, result in zip(asked, together, strict=True):
        alone = sample(model, [one], 0)[0]
        assert result.tokens == alone.tokens
        assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert len(result.tokens) == one.max_tokens


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.5}])
def test_logprobs_are_the_model_s_at_the_temperature(policy: str, model: Any, parameters: dict[str, float]) -> None:
    choice = complete(policy, [12, 40, 41], max_tokens=20, **parameters)
    expected = forward_logprobs(model, [12, 40, 41], tokens(choice), parameters["temperature"])
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4, rtol=1e-4)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens(choice)]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_samples_have_the_distribution_that_was_asked_for(model: Any, temperature: float, top_p: float) -> None:
    count = 4000
    asked = [request([12, 40], seed, temperature=temperature, top_p=top_p) for seed in range(count)]
    drawn = Counter(
        result.tokens[0] for at in range(0, count, 500) for result in sample(model, asked[at : at + 500], 0)
    )

    probabilities = forward_probabilities(model, [12, 40], temperature)
    ordered = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    nucleus: list[int] = []
    for token in ordered:
        if sum(probabilities[kept] for kept in nucleus) >= top_p:
            break
        nucleus.append(token)
    mass = sum(probabilities[token] for token in nucleus)
    assert set(drawn) <= set(nucleus)
    assert len(nucleus) > 2
    for token in nucleus[:5]:
        share = probabilities[token] / mass
        error = 5 * (share * (1 - share) / count) ** 0.5
        assert drawn[token] / count == pytest.approx(share, abs=error)


def forward_probabilities(model: Any, prompt: list[int], temperature: float) -> list[float]:
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    model.train()
    return [float(value) for value in (logits / temperature).softmax(-1)]


def test_the_seed_of_a_run_determines_its_samples(model: Any, tokenizer: Any) -> None:
    """The nth request with a prompt gets the same tokens in each run, whatever it is sampled together with."""

    def answers(seed: int, step: int, others: list[list[int]]) -> set[tuple[int, ...]]:
        with PolicyServer(TOKEN, seed, model, tokenizer) as server, server.sampling(step):
            url = f"{server.url}/completions"
            with ThreadPoolExecutor(8) as pool:
                extra = [pool.submit(complete, url, prompt) for prompt in others]
                same = [pool.submit(complete, url, [12, 40]) for _ in range(4)]
            assert all(future.result() for future in extra)
            return {tuple(tokens(future.result())) for future in same}

    first = answers(1, 1, [])
    assert len(first) == 4
    assert answers(1, 1, [[9] * 20, [8, 8]]) == first
    assert answers(1, 2, []).isdisjoint(first)
    assert answers(2, 1, []).isdisjoint(first)


def test_a_seed_in_the_request_is_taken(policy: str) -> None:
    first, second, other = (complete(policy, [12, 40], seed=seed) for seed in (5, 5, 6))
    assert tokens(first) == tokens(second) != tokens(other)


def test_stop_tokens_and_max_tokens_end_a_completion(policy: str, tokenizer: Any) -> None:
    whole = complete(policy, [12, 40], temperature=0)
    assert whole["finish_reason"] == "length"
    assert len(tokens(whole)) == 12
    stop = tokens(whole)[4]
    cut = complete(policy, [12, 40], temperature=0, stop_token_ids=[stop, 250])
    assert cut["finish_reason"] == "stop"
    assert tokens(cut) == tokens(whole)[: tokens(whole).index(stop) + 1]
    assert len(cut["logprobs"]["token_logprobs"]) == len(tokens(cut))


def test_the_end_token_stops_unasked(model: Any, tokenizer: Any) -> None:
    with PolicyServer(TOKEN, 0, model, tokenizer) as server, server.sampling(1):
        url = f"{server.url}/completions"
        seen = [complete(url, [12, 40], temperature=3, max_tokens=300) for _ in range(4)]
    stopped = [choice for choice in seen if choice["finish_reason"] == "stop"]
    assert stopped
    assert all(tokens(choice).index(tokenizer.eos_token_id) == len(tokens(choice)) - 1 for choice in stopped)


def test_the_answer_has_the_shape_of_vllm_s(policy: str) -> None:
    body = {"model": "policy", "prompt": [12, 40], "max_tokens": 2, "temperature": 0}
    answer = post(policy, body)
    ids = answer["choices"][0]["token_ids"]
    assert answer == {
        "object": "text_completion",
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "text": "",
                "finish_reason": "length",
                "token_ids": ids,
                "prompt_token_ids": [12, 40],
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }


def test_a_model_s_own_defaults_change_nothing(model: Any, server: PolicyServer) -> None:
    url = f"{server.url}/completions"
    with server.sampling(1):
        plain = tokens(complete(url, [12, 40], temperature=0))
    defaults = model.generation_config
    defaults.repetition_penalty, defaults.min_new_tokens, defaults.suppress_tokens = 5.0, 12, plain[:1]
    try:
        with server.sampling(1):
            assert tokens(complete(url, [12, 40], temperature=0)) == plain
        assert model.generation_config is defaults
        assert model.training
    finally:
        defaults.repetition_penalty = defaults.min_new_tokens = defaults.suppress_tokens = None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "length >= 1"),
        ({"prompt": [5000]}, "token 5000 isn't in the model's vocabulary"),
        ({"prompt": [-1]}, ">= 0"),
        ({"prompt": "text"}, "Expected `array`, got `str`"),
        ({"max_tokens": 0}, ">= 1"),
        ({"max_tokens": 1024}, "exceed the model's context of 1024"),
        ({"temperature": -0.1}, ">= 0"),
        ({"top_p": 0}, "> 0"),
        ({"min_p": 0.1}, "unknown field `min_p`"),
        ({"stream": True}, "unknown field `stream`"),
    ],
)
def test_what_it_can_t_do_is_refused(policy: str, changes: dict[str, Any], message: str) -> None:
    status, text = refused(policy, {"model": "policy", "prompt": [12], "max_tokens": 4} | changes)
    assert status == 400
    assert message in text


def test_only_the_runtime_is_answered(policy: str) -> None:
    assert refused(policy, {}, token="another")[0] == 401
    assert refused(policy.replace("completions", "models"), {})[0] == 405
    assert refused(policy, {"prompt": [1] * (MAX_BODY_BYTES // 2)})[0] == 413


def test_outside_of_sampling_the_policy_is_closed(server: PolicyServer, model: Any) -> None:
    status, text = refused(f"{server.url}/completions", {"prompt": [12], "max_tokens": 4})
    assert status == 503
    assert "being updated" in text


def test_the_weights_are_free_only_when_sampling_has_ended(server: PolicyServer, model: Any) -> None:
    """A rollout that nobody waits for any more doesn't sample from a model that is being trained."""
    sampled = threading.Event()

    def observe(*_: object) -> None:
        assert not model.training
        sampled.set()

    hook = model.register_forward_hook(observe)
    url = f"{server.url}/completions"
    with ThreadPoolExecutor(1) as pool:
        with server.sampling(1):
            straggler = pool.submit(complete, url, [12, 40], max_tokens=200, temperature=0)
            assert sampled.wait(30)
        hook.remove()
        assert model.training
        assert len(tokens(straggler.result())) == 200


def test_many_requests_at_once(policy: str) -> None:
    with ThreadPoolExecutor(100) as pool:
        results = list(pool.map(lambda number: complete(policy, [12, 40, number], temperature=0), range(3, 203)))
    assert all(choice["prompt_token_ids"] == [12, 40, number] for number, choice in enumerate(results, 3))
    one = complete(policy, [12, 40, 100], temperature=0)
    assert tokens(one) == tokens(results[97])
