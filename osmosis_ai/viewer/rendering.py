"""Render the templates, with everything they show escaped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from osmosis_ai.reward_rubric.agreement import agreement_words
from osmosis_ai.store.alignment import word_changes
from osmosis_ai.text import (
    content_text,
    cost,
    counted,
    duration,
    excerpt,
    failure_line,
    iso_time,
    score_number,
    visible,
)
from osmosis_ai.viewer.trees import TEXT_CHARACTERS, tree

__all__ = ["environment", "file_name", "images_of", "is_markup", "prepare", "shown"]

IMAGE_CHARACTERS = 8 << 20
"""A longer data URL is only described."""
_IMAGES = tuple(f"data:image/{kind};base64," for kind in ("png", "jpeg", "gif", "webp"))


def shown(value: Any) -> Any:
    """Escape characters that a browser would hide or misrender: control characters, bidi overrides, lone surrogates."""
    if not isinstance(value, str) or is_markup(value):
        return value
    return visible(value.encode("utf-8", "backslashreplace").decode("utf-8"))


def is_markup(value: object) -> bool:
    """Return True if a text is already escaped."""
    return hasattr(value, "__html__")


@functools.cache
def environment() -> Environment:
    """Return the templates' environment, whose `autoescape` and `finalize` escape everything shown."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        cost=cost, counted=counted, duration=duration, excerpt=excerpt, score=score_number, failure_line=failure_line
    )
    found.filters.update(file_name=file_name, moment=moment)
    found.globals.update(tree=tree, text_of=content_text, images_of=images_of, word_changes=word_changes)
    found.globals["agreement_words"] = agreement_words
    found.globals["TEXT_CHARACTERS"] = TEXT_CHARACTERS
    return found


def file_name(path: str) -> str:
    """Return the last part of a path."""
    return path.replace("\\", "/").rpartition("/")[2]


def moment(seconds: float) -> str:
    """Format seconds since the epoch to the minute, in UTC."""
    return iso_time(seconds)[:16].replace("T", " ")


def prepare() -> None:
    """Compile the templates of a run's page in advance, because that takes longer than rendering any page."""
    for name in ("run.html", "base.html", "parts.html", "figures.html", "rows.html"):
        environment().get_template(name)


def images_of(content: Any) -> list[tuple[str, str]]:
    """Return the images in a message's or a tool's content, as pairs of a data URL (or "") and a description."""
    found = []
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict):
            continue
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if part.get("type") == "image" and isinstance(part.get("data"), str):
            url = f"data:{part.get('mimeType')};base64,{part['data']}"
        if not isinstance(url, str):
            continue
        whole = url.startswith(_IMAGES) and len(url) <= IMAGE_CHARACTERS
        found.append((url if whole else "", f"{excerpt(url, 60)} ({len(url):,} characters)"))
    return found
