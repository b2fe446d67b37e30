"""Convert log probabilities and token ids from the endpoints' forms to records.

OpenAI, vLLM and SGLang return `logprobs` as `{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`, older
endpoints as two parallel lists. vLLM returns `prompt_token_ids` and `token_ids` as lists of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from osmosis_ai.records import Completion, JsonObject, Logprobs, TokenId, TokenIds, Turn

__all__ = ["TokenData", "from_older_form", "token_data"]

T = TypeVar("T")
Told = TypeVar("Told", Completion, Turn)


class TokenData(NamedTuple):
    """An endpoint's data about a reply's tokens. `left_out` gives the reason, by name, for each part not kept."""

    logprobs: Logprobs | None
    token_ids: TokenIds | None
    left_out: dict[str, str]


def token_data(given: Mapping[str, object]) -> TokenData:
    """Read `logprobs`, `prompt_token_ids` and `token_ids`; leave out parts in another form."""
    left_out: dict[str, str] = {}

    def read(name: str, value: object, kind: type[T]) -> T | None:
        try:
            return None if value is None else msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            left_out[name] = str(error)
            return None

    logprobs = read("logprobs", _by_token(given.get("logprobs")), Logprobs)
    prompt_token_ids, token_ids = (read(name, given.get(name), list[TokenId]) for name in TokenIds.__struct_fields__)
    ids = None if prompt_token_ids is None and token_ids is None else TokenIds(prompt_token_ids, token_ids)
    return TokenData(logprobs, ids, left_out)


def from_older_form(stored: JsonObject, kind: type[Told]) -> Told:
    """Read a completion or a turn stored by an earlier version, which kept token data in the endpoint's form.

    Raises:
        msgspec.ValidationError: Another part doesn't fit.
    """
    ids = stored.get("token_ids")
    by_name = ids if isinstance(ids, dict) else {"token_ids": ids}
    data = token_data({**by_name, "logprobs": stored.get("logprobs")})
    rest = {name: value for name, value in stored.items() if name not in data._fields}
    return msgspec.structs.replace(msgspec.convert(rest, kind), **data._asdict())


def _by_token(logprobs: object) -> object:
    """Convert the older form, `{"tokens": […], "token_logprobs": […]}`, to the current one."""
    if isinstance(logprobs, dict) and "content" not in logprobs:
        tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
        if isinstance(tokens, list) and isinstance(values, list) and len(tokens) == len(values):
            pairs = zip(tokens, values, strict=True)
            return {"content": [{"token": token, "logprob": value} for token, value in pairs]}
    return logprobs
