"""Stand-ins for a model, which need no network and no key. Another one is a class of `engine`, and a line in the table.

Their scores say nothing about a model: they check tools, wiring and rewards.
"""

from __future__ import annotations

__all__ = ["OFFLINE_MODELS", "offline_names"]

_NO_MODEL = (
    "its scores say nothing about a model. Pass --model, or set OSMOSIS_MODEL or OPENAI_API_KEY, to run a real one."
)

OFFLINE_MODELS: dict[str, str] = {
    "offline/oracle": (
        "offline/oracle is a stand-in, not a model: it plays each row's solution through the tools, or answers with "
        f"its ground truth; {_NO_MODEL}"
    ),
    "offline/smoke": (
        "offline/smoke is a stand-in, not a model: it calls every tool once, with the smallest arguments its schema "
        f"allows, and gives no answer; {_NO_MODEL}"
    ),
    "offline/empty": "offline/empty answers with nothing: a control that must score worst, not a model.",
}
"""What every report must say about each; the first one runs where no other model is named and there is no key."""


def offline_names() -> tuple[str, ...]:
    """The names of the offline models, as `--model` takes them."""
    return tuple(OFFLINE_MODELS)
