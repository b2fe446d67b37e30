"""Write an answer in the requested form: `#### x`, `\\boxed{x}`, `<answer>x</answer>`, JSON, `Answer: x`, or plain."""

from __future__ import annotations

import json
import re

from osmosis_ai.data.solution import decode_result

__all__ = ["render"]

_MAX_ANSWER = 4000

# A line that begins with #### may be a heading; only an answer line has a placeholder.
_HASHES = re.compile(
    r"(?<=[^\n#])####(?!#)"
    r"|^\s*####\s*(?=[<{\[(]|-?[0-9]|x\b|(?:the |your |final |numeric )*(?:answer|number|result|value)\b)",
    re.IGNORECASE | re.MULTILINE,
)
_BOXED = re.compile(r"\\{1,2}boxed\b")
_TAG_NAMES = "answer|final_answer|final|result|solution|output|response"
# The repetitions are bounded, because a prompt may hold a whole document full of tags.
_TAG = re.compile(rf"<({_TAG_NAMES})>(?=[^<]{{0,300}}</\1>|.{{0,60}}\btags?\b|[^\n]{{0,60}}\\boxed)", re.IGNORECASE)
_JSON_FORM = re.compile(r"\{(\s*\"[\w ]{1,40}\"\s*:[^{}]{0,300})\}")
_JSON_PAIR = re.compile(r"\"([\w ]{1,40})\"\s*:\s*(\"?)")
_ANSWER_KEYS = ("answer", "final_answer", "result", "value", "solution", "output", "response")
_LABEL = re.compile(r"\b((?:final )?answer):\s*(?=[<{\[(]|x\b|your|the answer|number)", re.IGNORECASE)


def render(answer: str, system: str, prompt: str) -> str:
    """Write an answer in the form that the system prompt, or else the user prompt, asks for.

    Args:
        answer: The plain answer.
        system: The system prompt.
        prompt: The user prompt.
    """
    answer = answer.strip()[:_MAX_ANSWER]
    for text in (system, prompt):
        rendered = _render(answer, text)
        if rendered is not None:
            return rendered
    return answer


def _render(answer: str, text: str) -> str | None:
    line = " ".join(answer.split())
    found: list[tuple[int, str]] = []
    boxed, tag, hashes = _BOXED.search(text), _TAG.search(text), _HASHES.search(text)
    if tag is not None:
        name = tag.group(1)
        inner = text[tag.end() :].split(f"</{name}>", 1)[0]
        content = f"\\boxed{{{answer}}}" if _BOXED.search(inner) and f"</{name}>" in text else answer
        found.append((tag.start(), f"<{name}>{content}</{name}>"))
    if boxed is not None:
        found.append((boxed.start(), f"\\boxed{{{answer}}}"))
    if hashes is not None:
        found.append((hashes.start(), f"#### {line}"))
    form = _JSON_FORM.search(text)
    if form is not None and any(key.lower() in _ANSWER_KEYS for key, _ in _JSON_PAIR.findall(form.group(1))):
        found.append((form.start(), _json_answer(answer, form.group(1))))
    label = _LABEL.search(text)
    if label is not None:
        found.append((label.start(), f"{label.group(1)}: {line}"))
    # The form that the text names first is the one it asks for; later ones are usually its parts or examples.
    return min(found)[1] if found else None


def _json_answer(answer: str, form: str) -> str:
    pairs = dict(_JSON_PAIR.findall(form))
    chosen = next(key for key in pairs if key.lower() in _ANSWER_KEYS)
    value = decode_result(answer.replace(",", ""))
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return json.dumps({key: (value if number else answer) if key == chosen else "" for key in pairs})
