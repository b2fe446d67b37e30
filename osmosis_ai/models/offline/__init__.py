"""Stand-ins for a model that need no network and no key. To add one, write a class in `engine` and a line in the table.

They check tools, wiring and rewards; their scores say nothing about a model.
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
"""The banner that every report must show for each; the first one runs if no model is named and no key is set."""


def offline_names() -> tuple[str, ...]:
    """Return the names of the offline models, as `--model` takes them."""
    return tuple(OFFLINE_MODELS)
