"""Controls: real functions, called through the real Scorer, judged; sound ones have no findings, broken ones theirs."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from osmosis_ai import osmosis_reward
from osmosis_ai.records import FunctionRef, Row, Score, ScoringInput
from osmosis_ai.runtime.worker.scorer import Scorer
from osmosis_ai.validate.controls import (
    ControlledFunction,
    ControlReport,
    Trial,
    judge,
    judge_together,
    tells_rows_apart,
)
from osmosis_ai.validate.findings import Finding
from osmosis_ai.validate.probes import (
    Form,
    answer_forms,
    as_number,
    conversation,
    parse_answer_form,
    probes,
    same_answer,
)

NUMBERS = ["42", "45", "168", "24", "56", "6.75", "64", "-7.5", "1,250", "0"]
WORDS = ["Paris", "the Danube", "Mount Kenya", "Lake Titicaca", "Reykjavik"]
LABELS = ["yes", "no", "no", "yes"]
PROMPT = "Answer the question."


def rows_of(truths: Sequence[str], system: str = PROMPT) -> list[Row]:
    return [Row(i, f"{i:016x}", system, f"Question {'abcdefghijklmnop'[i]}?", t) for i, t in enumerate(truths)]


def control(
    function: Callable[..., Any],
    truths: Sequence[str] = NUMBERS,
    *,
    system: str = PROMPT,
    forms: Sequence[Form] = (),
    reads: bool = True,
    about_form: bool = False,
) -> tuple[ControlReport, list[Finding]]:
    """Try a function on rows with these ground truths."""
    ref = FunctionRef("rewards:it", "rewards", "it", "/nowhere", file="rewards.py", line=1)
    return judge(ControlledFunction(ref, reads, about_form), trials_of(function, truths, system=system, forms=forms))


def trials_of(
    function: Callable[..., Any],
    truths: Sequence[str] = NUMBERS,
    *,
    system: str = PROMPT,
    forms: Sequence[Form] = (),
) -> list[Trial]:
    """Return a function's scores on rows with these ground truths."""
    ref = FunctionRef("rewards:it", "rewards", "it", "/nowhere", file="rewards.py", line=1)
    scorer = Scorer(ref, function)
    rows = rows_of(truths, system)

    async def run() -> list[Trial]:
        trials = []
        for probe in probes(rows, answer_forms([system], forms)):
            given = ScoringInput(conversation(probe, "lookup"), probe.row.ground_truth, probe.row.index, {})
            first = await scorer.score(given, 10)
            trials.append(Trial(probe, first, await scorer.score(given, 10) if first.failure is None else None))
        return trials

    return anyio.run(run)


def codes(found: tuple[ControlReport, list[Finding]]) -> set[str]:
    return {one.code for one in found[1]}


def last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*\.?\d*", text)
    try:
        return float(found[-1].replace(",", "").rstrip(".")) if found else None
    except ValueError:
        return None


# Sound functions


def exact(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.strip() == ground_truth)


def after_hashes(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    found = re.findall(r"####\s*([-+]?[\d.,]+)\s*$", solution_str, re.MULTILINE)
    try:
        return float(math.isclose(float(found[-1].replace(",", "")), float(ground_truth.replace(",", ""))))
    except (IndexError, ValueError):
        return 0.0


def boxed(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    found = re.findall(r"\\boxed\{([^{}]*)\}", solution_str)
    return float(bool(found) and found[-1] == ground_truth)


def tagged(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    found = re.search(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    return float(found is not None and found[1].strip().casefold() == ground_truth.casefold())


def tolerant(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    number, truth = last_number(solution_str), as_number(ground_truth)
    if number is None or truth is None:
        return 0.0
    return float(abs(number - truth) <= 0.01 * max(1.0, abs(truth)))


def similar(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return SequenceMatcher(None, solution_str, ground_truth).ratio() ** 4


def correct_and_formatted(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return 0.2 * ("####" in solution_str) + 0.8 * after_hashes(solution_str, ground_truth)


def penalised(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return after_hashes(solution_str, ground_truth) - 1.0


def last_message(messages: list, ground_truth: str | None, metadata: dict) -> float:
    return float(messages[-1]["content"].strip() == ground_truth)


async def exact_async(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    await anyio.lowlevel.checkpoint()
    return float(solution_str.strip() == ground_truth)


@pytest.mark.parametrize(
    ("function", "truths", "accepted"),
    [
        (exact, NUMBERS, ["plain"]),
        (exact, WORDS, ["plain"]),
        (exact, LABELS, ["plain"]),
        (exact, ["7"], ["plain"]),
        (exact, ["7", "7", "7.0"], ["plain"]),
        (after_hashes, NUMBERS, ["#### x"]),
        (boxed, NUMBERS, ["\\boxed{x}"]),
        (boxed, WORDS, ["\\boxed{x}"]),
        (tagged, WORDS, ["<answer>x</answer>"]),
        (tagged, LABELS, ["<answer>x</answer>"]),
        (tolerant, NUMBERS, ["plain", "#### x", "\\boxed{x}", "<answer>x</answer>", "sentence"]),
        (correct_and_formatted, NUMBERS, ["#### x"]),
        (last_message, NUMBERS, ["plain"]),
        (exact_async, NUMBERS, ["plain"]),
    ],
)
def test_a_sound_function_has_no_findings(function: Any, truths: list[str], accepted: list[str]) -> None:
    report, findings = control(function, truths)
    assert findings == []
    assert [form.form for form in report.forms if form.accepted] == accepted
    assert report.verdict == f"accepts {', '.join(accepted)}; tells right from wrong"


def test_partial_credit_is_fine() -> None:
    report, findings = control(similar, WORDS)
    assert findings == []
    assert report.forms[0].right == 1.0


def test_scores_below_zero_are_read_by_where_they_lie() -> None:
    found = control(penalised)
    assert codes(found) == {"OSM313"}
    assert "tells right from wrong" in found[0].verdict


def test_a_decorated_function_is_judged_like_a_plain_one() -> None:
    assert codes(control(osmosis_reward(exact))) == set()


# The answer's form


def labelled(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.strip().splitlines()[-1:] == [f"RESULT={ground_truth}"])


def test_no_accepted_form_is_a_warning_that_names_the_option() -> None:
    report, findings = control(labelled)
    assert [one.code for one in findings] == ["OSM301"]
    assert findings[0].severity == "warning"
    assert "--answer-form" in findings[0].hint
    assert (findings[0].file, findings[0].line, findings[0].subject) == ("rewards.py", 1, "it")
    assert report.verdict == "accepts no usual answer form"


def test_a_given_form_is_tried() -> None:
    report, findings = control(labelled, forms=[parse_answer_form("I think so.\\nRESULT={answer}")])
    assert findings == []
    assert [form.form for form in report.forms if form.accepted] == ["I think so.\\nRESULT={answer}"]


@pytest.mark.parametrize(
    ("system", "template"),
    [
        ("End with `RESULT=<number>`.", "RESULT={answer}"),
        ("Write 'x' last, as in \"RESULT=[value]\".", "RESULT={answer}"),
        ("Say `The final value is: {value}` at the end.", "The final value is: {answer}"),
        ("Think in <think>...</think>, then answer in <final>...</final>.", "<final>{answer}</final>"),
        ('Reply with JSON: {"result": 12}', '{"result": {answer}}'),
        ("Finish with 'Final answer: ' and the number.", "Final answer: {answer}"),
        ("End with `#### <number>`.", "#### {answer}"),
    ],
)
def test_a_form_that_the_system_prompt_names_is_tried(system: str, template: str) -> None:
    assert template in [form.template for form in answer_forms([system])]


def test_several_tags_are_tried_together() -> None:
    templates = [form.template for form in answer_forms(["<think>reason</think><answer>x</answer>"])]
    assert "<think>I work it out.</think>\n<answer>{answer}</answer>" in templates


@given(st.text(max_size=200))
def test_any_system_prompt_gives_forms_that_hold_the_answer(prompt: str) -> None:
    forms = answer_forms([prompt])
    assert len(forms) <= 11
    assert all("~right~" in form.write("~right~") for form in forms)


def test_a_form_without_the_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'Result: x' has no \{answer\}"):
        parse_answer_form("Result: x")


# Broken functions


def contains(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(ground_truth in solution_str)


def starts(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.startswith(ground_truth))


def ends(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.endswith(ground_truth))


def any_match(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(ground_truth in re.findall(r"-?\d[\d,]*\.?\d*", solution_str))


def without_sign(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    found = re.findall(r"\d+", solution_str)
    return float(bool(found) and found[-1] == ground_truth.lstrip("-"))


def nan_passes(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    try:
        return 0.0 if abs(float(solution_str.replace(",", "")) - float(ground_truth.replace(",", ""))) > 1e-6 else 1.0
    except ValueError:
        return 0.0


def answered(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return 1.0 if solution_str.strip() and ground_truth else 0.0


def inverted(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(solution_str.strip() != ground_truth)


@pytest.mark.parametrize(
    ("function", "truths", "said"),
    [
        (contains, NUMBERS, "1 character more"),
        (contains, WORDS, "all rows' answers at once"),
        (starts, NUMBERS, "1 character more"),
        (ends, NUMBERS, "1 character more"),
        (any_match, NUMBERS, "all rows' answers at once"),
        (without_sign, ["42", "17", "23"], "negated"),
        (nan_passes, NUMBERS, "nan"),
        (answered, NUMBERS, "another row's answer"),
        (answered, LABELS, "another row's answer"),
    ],
)
def test_wrong_answers_that_score_are_an_error(function: Any, truths: list[str], said: str) -> None:
    _, findings = control(function, truths)
    found = [one for one in findings if one.code == "OSM302"]
    assert len(found) == 1
    assert found[0].severity == "error"
    assert said in found[0].message


def test_rewarding_wrong_answers_more_than_right_ones_is_an_error() -> None:
    found = control(inverted, ["a", "b", "c"])
    assert "OSM302" in codes(found)
    assert "OSM305" in codes(found)


def test_one_lenient_character_in_a_word_is_only_a_warning() -> None:
    def lenient(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return float(SequenceMatcher(None, solution_str, ground_truth).ratio() > 0.9)

    assert codes(control(lenient, WORDS)) == {"OSM303"}


def test_a_few_ground_truths_that_mean_the_same_are_only_a_warning() -> None:
    def synonyms(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        alike = {"automobile": "car"}
        return float(alike.get(solution_str, solution_str) == alike.get(ground_truth, ground_truth))

    truths = [
        "automobile",
        "car",
        "ship",
        "bicycle",
        "horse",
        "aeroplane",
        "tramway",
        "kick scooter",
        "ferry",
        "submarine",
    ]
    assert codes(control(synonyms, truths)) <= {"OSM303"}


def test_half_a_score_for_wrong_answers_is_a_warning() -> None:
    def generous(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 1.0 if solution_str == ground_truth else 0.7 * bool(solution_str)

    assert codes(control(generous)) == {"OSM304"}


def test_an_empty_answer_that_scores_is_an_error() -> None:
    def lazy(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 1.0 if not solution_str or solution_str == ground_truth else 0.0

    assert codes(control(lazy)) == {"OSM305"}


def test_a_little_for_an_empty_answer_is_a_warning() -> None:
    def kind(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 1.0 if solution_str == ground_truth else 0.1

    assert codes(control(kind)) == {"OSM306"}


def test_repeating_the_question_for_a_reward_is_an_error() -> None:
    def curious(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return float(solution_str == ground_truth or solution_str.endswith("?"))

    assert "OSM311" in codes(control(curious))


def test_a_question_that_holds_its_answer_is_not_echoed() -> None:
    row = Row(0, "0" * 16, PROMPT, "What is 5 * 1?", "5")
    assert {probe.kind for probe in probes([row], answer_forms([]))}.isdisjoint({"prompt", "another row's"})


def test_a_score_that_never_varies_is_an_error() -> None:
    def constant(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 0.5

    assert codes(control(constant)) == {"OSM310"}
    assert codes(control(constant, reads=False)) == {"OSM310"}


def test_always_zero_is_a_form_nobody_knows() -> None:
    def zero(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 0.0

    assert codes(control(zero)) == {"OSM301"}
    assert codes(control(zero, reads=False)) == {"OSM301"}


def test_ground_truths_that_are_not_understood_are_named() -> None:
    def without_commas(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return float(solution_str == ground_truth and "," not in solution_str)

    _, findings = control(without_commas)
    assert [one.code for one in findings] == ["OSM320"]
    assert "row 8; the ground truth of row 8 is '1,250'" in findings[0].message


# Functions about form


def format_reward(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return float(bool(re.search(r"^####\s*\S+$", solution_str.strip(), re.MULTILINE)))


def test_a_reward_for_form_is_said_to_be_one() -> None:
    report, findings = control(format_reward, reads=False, about_form=True)
    assert findings == []
    assert report.verdict == "never reads the ground truth: rewards form, not correctness"


def test_one_that_does_not_say_so_is_a_warning() -> None:
    assert codes(control(format_reward, reads=False)) == {"OSM307"}


def test_a_short_answer_reward_that_nothing_earns_is_an_error() -> None:
    def brevity(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return max(0.0, 1 - len(solution_str) / 200)

    assert codes(control(brevity, reads=False, about_form=True)) == {"OSM305"}


def test_a_function_whose_helper_compares_is_known_by_its_scores() -> None:
    def through_a_helper(messages: list, ground_truth: str, metadata: dict) -> float:
        return helper(messages, metadata)

    def helper(messages: list, metadata: dict) -> float:
        return float(messages[-1]["content"] == f"<answer>{metadata['ground_truth']}</answer>")

    chances = itertools.cycle([0.5, 1.0, 0.25])

    def by_chance(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return next(chances)

    assert tells_rows_apart(trials_of(through_a_helper))
    assert not tells_rows_apart(trials_of(format_reward))
    assert not tells_rows_apart(trials_of(by_chance))
    assert not tells_rows_apart(trials_of(exact, ["7"]))


def test_one_function_of_a_repository_must_compare() -> None:
    ref = FunctionRef("rewards:it", "rewards", "it", "/nowhere", file="rewards.py", line=1)
    form, comparing = ControlledFunction(ref, False, True), ControlledFunction(ref, True, False)
    report, _ = control(format_reward, reads=False, about_form=True)
    assert [one.code for one in judge_together([form], [report], 0)] == ["OSM308"]
    assert list(judge_together([form, comparing], [report, report], 0)) == []
    assert list(judge_together([form], [report], 1)) == []
    assert list(judge_together([], [], 0)) == []


# What every score should be


def test_exceptions_are_grouped_by_place_with_the_first_answer_that_brought_them() -> None:
    def careless(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return float(float(solution_str.replace(",", "")) == float(ground_truth.replace(",", "")))

    _, findings = control(careless)
    raised = [one for one in findings if one.code == "OSM312"]
    assert len(raised) == 1
    assert "ValueError" in raised[0].message
    assert re.search(r"\d+ times, first for the right answer '#### 42' \(row 0\)", raised[0].message)
    assert codes(control(careless)) == {"OSM312"}


def test_results_that_are_no_floats() -> None:
    def whole(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 1 if solution_str == ground_truth else 0.0

    def nothing(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return None if solution_str == "" else float(solution_str == ground_truth)  # type: ignore[return-value]

    def infinite(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return math.inf if solution_str == "" else float(solution_str == ground_truth)

    for function in (osmosis_reward(whole), nothing, infinite):
        assert "OSM314" in codes(control(function)), function


def test_scores_outside_the_unit_interval() -> None:
    def percent(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return 100.0 * (solution_str == ground_truth)

    _, findings = control(percent)
    assert [one.code for one in findings] == ["OSM313"]
    assert "100 for the right answer" in findings[0].message


def test_chance_and_state() -> None:
    chance, calls = random.Random(1), itertools.count()

    def lucky(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return float(solution_str == ground_truth) * chance.random()

    def counting(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        return float(solution_str == ground_truth) / (1 + next(calls) % 2)

    assert "OSM315" in codes(control(lucky))
    assert "OSM315" in codes(control(counting))


def test_slow_by_the_median() -> None:
    ref = FunctionRef("rewards:it", "rewards", "it", "/nowhere", file="rewards.py", line=1)

    trials = [
        Trial(p, Score("it", float(p.kind == "right"), duration_ms=150.0))
        for p in probes(rows_of(NUMBERS), answer_forms([]))
    ]
    _, findings = judge(ControlledFunction(ref, True, False), trials)
    assert [one.code for one in findings] == ["OSM316"]
    assert "150 ms" in findings[0].message


def test_a_function_that_never_gave_a_score() -> None:
    def broken(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
        raise RuntimeError("no")

    report, findings = control(broken)
    assert [one.code for one in findings] == ["OSM312"]
    assert report.verdict == "could not be judged: it never returned a score"


# Equal answers


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("5", "5.0", True),
        ("5", " 5 ", True),
        ("1,000", "1000", True),
        ("$5", "5", True),
        ("Paris", "paris.", True),
        ("5", "51", False),
        ("5", "-5", False),
        ("yes", "no", False),
        ("++", "--", False),
    ],
)
def test_which_answers_mean_the_same(one: str, other: str, same: bool) -> None:
    assert same_answer(one, other) is same


@given(st.lists(st.text(min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=6))
def test_no_wrong_answer_is_ever_the_right_one(truths: list[str]) -> None:
    rows = [Row(i, f"{i:016x}", PROMPT, "?", truth) for i, truth in enumerate(truths)]
    for probe in probes(rows, answer_forms([])):
        if probe.kind in ("another row's", "negated", "+1 character") and probe.form == "plain":
            assert probe.answer != (probe.row.ground_truth or "").strip()
