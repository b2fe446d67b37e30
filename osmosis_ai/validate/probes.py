"""Generate probes for reward functions: right, wrong, empty and odd answers, in every form."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple, TypeAlias

from osmosis_ai.records import Message, Row

__all__ = [
    "MAX_ROWS",
    "WRONG",
    "Form",
    "Kind",
    "Probe",
    "answer_forms",
    "conversation",
    "parse_answer_form",
    "probes",
    "same_answer",
]

MAX_ROWS = 50
MAX_ANSWER = 20_000
EDGE_ROWS = 2
MAX_NAMED_FORMS = 6
"""Bounds on the rows tried, an answer's characters, the rows that get odd answers (which hardly depend on the row), and
the answer forms taken from system prompts."""

Kind: TypeAlias = Literal[
    "right", "another row's", "all rows' at once", "negated", "+1 character", "empty", "prompt", "odd", "trajectory"
]
WRONG: tuple[Kind, ...] = ("another row's", "all rows' at once", "negated", "+1 character")


class Form(NamedTuple):
    """A way to write an answer. `template` contains `{answer}` at least once."""

    name: str
    template: str

    def write(self, answer: str) -> str:
        """Return an answer in this form."""
        # Not `str.format`: templates contain other braces, as in JSON and \boxed{}.
        return self.template.replace("{answer}", answer)


class Probe(NamedTuple):
    """One answer to try on a row. `odd` describes its oddity; `near` means that a lenient reward may accept it.

    A `trajectory` is the right answer after other tool calls, which `odd` describes.
    """

    kind: Kind
    row: Row
    form: str
    answer: str
    odd: str = ""
    near: bool = False


PLAIN = Form("plain", "{answer}")
USUAL = (
    PLAIN,
    Form("#### x", "#### {answer}"),
    Form("\\boxed{x}", "\\boxed{{answer}}"),
    Form("<answer>x</answer>", "<answer>{answer}</answer>"),
    Form("sentence", "The answer is {answer}."),
)
_TAG = re.compile(r"<([A-Za-z][\w-]*)>.{0,200}?</\1>", re.DOTALL)
_JSON_KEY = re.compile(r'\{\s*"(\w+)"\s*:')
_LABEL = re.compile(r"\b((?:final |your )?(?:answer|result|solution))\s*:", re.IGNORECASE)
# Text in quotes or backquotes with one placeholder: <number>, {answer}, [value], or a lone x.
_QUOTED = re.compile(r"`([^`\n]{2,80})`|\"([^\"\n]{2,80})\"|“([^”\n]{2,80})”")
_PLACEHOLDER = re.compile(r"<[\w .-]+>|\{[\w .-]+\}|\[[\w .-]+\]|(?<![\w\\])[xXnN](?!\w)|\.\.\.|…")
_ANSWER_TAGS = ("answer", "final", "final_answer", "solution", "result", "output")


def parse_answer_form(template: str) -> Form:
    """Parse an `--answer-form` value; raises ValueError without `{answer}`."""
    if "{answer}" not in template:
        raise ValueError(f"--answer-form {template!r} has no {{answer}}, which stands for the answer")
    # A shell passes a line break as a backslash and an n.
    written = template.replace("\\n", "\n")
    return Form(_shortened(template), written)


def answer_forms(prompts: Sequence[str], given: Sequence[Form] = ()) -> list[Form]:
    """Return the forms to try: those given, the usual ones, and those that the system prompts name."""
    forms = {form.template: form for form in (*given, *USUAL)}
    named = 0
    for prompt in dict.fromkeys(prompts):
        # Patterns such as `_TAG` search ahead from every place where they may begin, so the text is bounded.
        for form in _named_forms(prompt[:20_000]):
            if named < MAX_NAMED_FORMS and form.template not in forms:
                forms[form.template] = form
                named += 1
    return list(forms.values())


def _named_forms(prompt: str) -> Iterator[Form]:
    tags = list(dict.fromkeys(match[1] for match in _TAG.finditer(prompt)))
    if tags:
        holder = next((tag for tag in reversed(tags) if tag.lower() in _ANSWER_TAGS), tags[-1])
        # A reward for the form may want the other tags too.
        parts = [f"<{tag}>{'{answer}' if tag == holder else 'I work it out.'}</{tag}>" for tag in tags]
        yield _form("\n".join(parts))
        yield _form(f"<{holder}>{{answer}}</{holder}>")
    for match in _QUOTED.finditer(prompt):
        text = next(filter(None, match.groups()))
        places = _PLACEHOLDER.findall(text)
        if len(places) == 1 and len(text) > len(places[0]) and "</" not in text:
            yield _form(_PLACEHOLDER.sub("{answer}", text))
    for match in _JSON_KEY.finditer(prompt):
        # Once as text and once as a number.
        yield _form(f'{{"{match[1]}": "{{answer}}"}}')
        yield _form(f'{{"{match[1]}": {{answer}}}}')
    for match in _LABEL.finditer(prompt):
        yield _form(f"{match[1][:1].upper()}{match[1][1:]}: {{answer}}")


def _form(template: str) -> Form:
    return Form(_shortened(template.replace("{answer}", "x")), template)


def _shortened(text: str) -> str:
    text = text.replace("\n", "⏎")
    return text if len(text) <= 30 else text[:29] + "…"


def probes(rows: Sequence[Row], forms: Sequence[Form]) -> Iterator[Probe]:
    """Yield the probes row by row, so that a run that stops early has tried some of every kind."""
    truths = list(dict.fromkeys(row.ground_truth or "" for row in rows))
    for number, row in enumerate(rows):
        truth = row.ground_truth or ""
        for form in forms:
            yield Probe("right", row, form.name, form.write(truth))
        yield Probe("empty", row, "", "")
        if not _mentions(row.user_prompt, truth):
            yield Probe("prompt", row, "", row.user_prompt)
        for kind, answers, near in _wrong_answers(truth, truths, number):
            for answer in answers:
                for form in forms:
                    yield Probe(kind, row, form.name, form.write(answer), near=near)
        for variant in _all_at_once(truth, truths, forms):
            yield Probe("all rows' at once", row, *variant)
        if number < EDGE_ROWS:
            yield from _odd_answers(row, forms)


def _wrong_answers(truth: str, truths: Sequence[str], number: int) -> Iterator[tuple[Kind, list[str], bool]]:
    other = _other(truth, truths, number)
    if other is not None:
        yield "another row's", [other], False
    negated = _negated(truth)
    if negated is not None:
        # A reward that searches for the answer finds B in "The answer is not B".
        yield "negated", [negated], as_number(truth) is None and negated.startswith("not ")
    longer = _one_more(truth)
    if longer:
        yield "+1 character", longer, as_number(truth) is None


def _other(truth: str, truths: Sequence[str], number: int) -> str | None:
    """Return another row's ground truth: the next one that clearly differs, else any that differs."""
    following = [*truths[number % max(1, len(truths)) :], *truths]
    apart = [other for other in following if _apart(truth, other)]
    return next((other for other in apart if _far_apart(truth, other)), apart[0] if apart else None)


def _apart(one: str, other: str) -> bool:
    return not same_answer(one, other) and not _mentions(one, other) and not _mentions(other, one)


def _far_apart(one: str, other: str) -> bool:
    a, b = as_number(one), as_number(other)
    if a is not None and b is not None:
        return abs(a - b) > 0.1 * max(1.0, abs(a), abs(b)) and a != -b
    # `SequenceMatcher` takes quadratic time, so only the beginnings are compared.
    return SequenceMatcher(None, one[:500].casefold(), other[:500].casefold()).ratio() < 0.6


_OPPOSITES = {"yes": "no", "true": "false", "correct": "incorrect", "positive": "negative", "valid": "invalid"}
_OPPOSITES |= {other: one for one, other in _OPPOSITES.items()}


def _negated(truth: str) -> str | None:
    text = truth.strip()
    number = as_number(text)
    if number is not None:
        if number == 0:
            return None
        return text[1:] if text.startswith("-") else f"-{text.removeprefix('+')}"
    opposite = _OPPOSITES.get(text.casefold())
    if opposite is not None:
        return opposite.capitalize() if text[:1].isupper() else opposite
    return f"not {text}" if len(text) <= 100 and text[:1].isalpha() else None


def _one_more(truth: str) -> list[str]:
    """Return wrong answers made by adding one character after or before the right one."""
    text = truth.strip()
    if len(text) > 100:
        return []
    if as_number(text) is None:
        # In a text with a number, the number may be all that counts.
        return [] if re.search(r"\d", text) else [f"{text}x", f"x{text}"]
    digits = text.lstrip("+-$€£")
    sign = text[: len(text) - len(digits)]
    # A digit appended to a decimal fraction may be within tolerance; adding 1, not 0, changes even 0.
    longer = [f"{sign}1{digits}"]
    return [f"{text}1", *longer] if re.fullmatch(r"\d+", digits) else longer


def _all_at_once(truth: str, truths: Sequence[str], forms: Sequence[Form]) -> Iterator[tuple[str, str]]:
    """Yield all rows' answers at once, the right one neither first nor last: in one form, and each in its own."""
    others = [other for other in truths if not same_answer(other, truth)][: MAX_ROWS - 1]
    if not others or not _apart(truth, others[0]) or not _apart(truth, others[-1]):
        return
    middle = max(1, len(others) // 2)
    listed = [*others[:middle], truth, *(others[middle:] or others[:1])]
    for form in forms:
        for answer in (form.write(", ".join(listed)), "\n".join(form.write(item) for item in listed)):
            if len(answer) <= MAX_ANSWER:
                yield form.name, answer


_ODD = {
    "nan": "nan",
    "infinity": "inf",
    "negative infinity": "-inf",
    "a number too large for a float": "1e400",
    # Python's `int` refuses more than 4,300 digits.
    "a number of 5,000 digits": "9" * 5000,
    "full-width digits": "１２３",
    "a division by zero": "1/0",
    "two signs": "--1",
    "a lone decimal point": ".",
    "emoji and other scripts": "答えは四十二です 🎉 ٤٢ é́",
    "a null byte": "\0",
    "only whitespace": " \n\t ",
    "unbalanced brackets": "{{[((",
}


def _odd_answers(row: Row, forms: Sequence[Form]) -> Iterator[Probe]:
    truth = row.ground_truth or ""
    for what, answer in _ODD.items():
        # For this row, the odd answer happens to be right.
        if same_answer(answer, truth) or _mentions(answer, truth):
            continue
        for form in forms:
            yield Probe("odd", row, form.name, form.write(answer), odd=what)
    for what, text in (("100,000 characters of text", "word " * 20_000), ("50,000 numbers", "7 " * 50_000)):
        if not same_answer("7", truth):
            yield Probe("odd", row, PLAIN.name, text, odd=what)


def conversation(probe: Probe, tool: str | None) -> list[Message]:
    """Return a conversation that ends with a probe's answer, for functions that read all of it.

    If `tool` is given, the agent calls that tool, and its result is the answer.
    """
    messages: list[Message] = [
        {"role": "system", "content": probe.row.system_prompt},
        {"role": "user", "content": probe.row.user_prompt},
    ]
    if tool is not None:
        call = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": probe.answer})
    messages.append({"role": "assistant", "content": probe.answer})
    return messages


# Equal answers


def as_number(text: str) -> float | None:
    """Parse a text as a number without currency signs, percent sign and thousands separators; None if it isn't one."""
    text = text.strip().lstrip("$€£").rstrip("%").replace(",", "")
    if len(text) > 400 or not re.fullmatch(r"[-+]?[$€£]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return None
    number = float(re.sub(r"[$€£]", "", text))
    return number if math.isfinite(number) else None


def same_answer(one: str, other: str) -> bool:
    """Return True if two answers are equal as numbers, or as texts apart from case, whitespace and punctuation."""
    a, b = as_number(one), as_number(other)
    if a is not None and b is not None:
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9)
    return _plain_words(one) == _plain_words(other)


def _plain_words(text: str) -> str:
    words = re.findall(r"\w+", text.casefold())
    return " ".join(words) if words else text.strip()


def _mentions(text: str, answer: str) -> bool:
    """Return True if a text contains an answer as a whole word or number."""
    answer = answer.strip()
    if not answer or not text:
        return False
    if re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE):
        return True
    number = as_number(answer)
    found = re.findall(r"-?\d[\d,]*\.?\d*", text[:MAX_ANSWER]) if number is not None else []
    return any(same_answer(item, answer) for item in found)
