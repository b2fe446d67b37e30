"""Log probabilities and token ids in the forms that endpoints give, and in others."""

from __future__ import annotations

import pytest

from osmosis_ai.records import Logprobs, TokenIds, TokenLogprob, TopLogprob
from osmosis_ai.token_data import token_data


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        ({"content": None, "refusal": None}, Logprobs()),
        (
            {
                "content": [
                    {"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -2.5}]},
                    {"token": "token_id:7", "logprob": -9999.0, "bytes": None, "top_logprobs": []},
                ],
                "x_more": 1,
            },
            Logprobs([TokenLogprob("a", -1.0, [97], [TopLogprob("b", -2.5)]), TokenLogprob("token_id:7", -9999.0)]),
        ),
        (
            {"tokens": ["a", "b"], "token_logprobs": [-1, -2]},
            Logprobs([TokenLogprob("a", -1.0), TokenLogprob("b", -2.0)]),
        ),
    ],
)
def test_log_probabilities_are_read(given: object, read: Logprobs | None) -> None:
    assert token_data({"logprobs": given}) == (read, None, {})


@pytest.mark.parametrize(
    "given", ["text", 5, [-0.5, -0.25], {"content": "a"}, {"content": [{"token": "a"}]}, {"content": [[1]]}]
)
def test_what_are_no_log_probabilities_is_left_out_with_the_reason(given: object) -> None:
    found = token_data({"logprobs": given, "token_ids": [1]})
    assert (found.logprobs, found.token_ids, list(found.left_out)) == (None, TokenIds(token_ids=[1]), ["logprobs"])
    assert found.left_out["logprobs"].startswith(("Expected", "Object missing required field"))


@pytest.mark.parametrize("given", [[1.5], ["1"], [-1], [2**63], {"ids": []}, "1 2"])
def test_what_are_no_token_ids_is_left_out(given: object) -> None:
    found = token_data({"prompt_token_ids": [1, 2], "token_ids": given})
    assert (found.token_ids, list(found.left_out)) == (TokenIds([1, 2]), ["token_ids"])
