"""Whether the judges of a run can be asked, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from osmosis_ai.errors import MissingAPIKeyError, ModelStartError, UsageError
from osmosis_ai.records import FunctionRef
from osmosis_ai.reward_rubric.configs import load_rubric
from osmosis_ai.reward_rubric.judge import has_price
from osmosis_ai.reward_rubric.redirect import current_redirect
from osmosis_ai.reward_rubric.target import DEFAULT_MODEL, DEFAULT_PROVIDER, find_target

__all__ = ["check_judges"]


def check_judges(functions: Iterable[FunctionRef], environ: Mapping[str, str], *, priced: bool) -> None:
    """See that the judges that are known have their keys, and prices if they must. Connects to nothing.

    Which judge an `@osmosis_rubric` function asks is known only where all judge calls are redirected to one model; an
    unpriced one is refused when the function asks it (`redirect.JUDGE_PRICED`). With `priced` this imports LiteLLM.
    Raises ModelStartError.
    """
    redirect = current_redirect(environ)
    for ref in functions:
        if ref.kind != "rubric":
            continue
        if ref.module and not (redirect and redirect.model):
            continue
        try:
            judge = find_target(_model_info(ref), environ)
        except (MissingAPIKeyError, ValueError) as error:
            raise ModelStartError(f"rubric {ref.name}: {error}") from None
        if priced and not has_price(judge):
            raise ModelStartError(
                f"no price is known for the judge {judge.name} of {ref.name}, so --max-cost can't be kept; "
                "leave the option out"
            )


def _model_info(ref: FunctionRef) -> dict[str, Any]:
    if ref.module:
        # Whatever it is: the calls are redirected.
        return {"provider": DEFAULT_PROVIDER, "model": DEFAULT_MODEL}
    try:
        return load_rubric(Path(ref.root, ref.file or ""), ref.attribute).model_info
    except UsageError as error:
        raise ModelStartError(str(error)) from None
