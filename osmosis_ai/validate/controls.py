"""Judge reward functions by how they score right, wrong, empty and odd answers.

A function passes if right answers score high in some usual form and wrong ones don't. "High" is relative to the
function: `floor` is the lowest score of any answer, `best` the highest score of a right one, and an answer counts as
accepted from halfway between the two. A wrong answer "scores like a right one" if it gets what the right answer of its
row got. A function that never reads the ground truth (a format or length reward) can't tell wrong answers from right
ones and isn't asked to, but at least one function of a repository should.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from osmosis_ai.records import FunctionRef, Record, Score
from osmosis_ai.validate.findings import Finding, Place, examples, finding
from osmosis_ai.validate.probes import WRONG, Kind, Probe

__all__ = [
    "ControlReport",
    "ControlledFunction",
    "FormReport",
    "Trial",
    "judge",
    "judge_together",
    "judges_trajectories",
    "tells_rows_apart",
]

SLOW_MS = 100.0
"""Milliseconds above which the median call counts as slow."""
TOLERATED_SHARE = 0.2
"""Share of the rows in which a wrong answer may happen to mean the same as the right one."""

_CLOSE = 1e-9
"""Scores this close are equal: the same score may be computed in different ways."""
_NAMES: dict[Kind, str] = {
    "right": "the right answer",
    "another row's": "another row's answer",
    "all rows' at once": "all rows' answers at once",
    "negated": "the answer negated",
    "+1 character": "the answer with 1 character more",
    "empty": "the empty answer",
    "prompt": "the prompt echoed back",
}


class Trial(NamedTuple):
    """A probe and its score, with a second score if the call was repeated."""

    probe: Probe
    score: Score
    again: Score | None = None


class ControlledFunction(NamedTuple):
    """A reward function under test.

    `reads_ground_truth` is known from its source or its scores (`tells_rows_apart`).
    """

    ref: FunctionRef
    reads_ground_truth: bool
    about_form: bool


class FormReport(Record, frozen=True):
    """Mean scores of one answer form; `wrong` is by kind, None where nothing could be tried."""

    form: str
    accepted: bool
    right: float | None
    wrong: dict[str, float | None]


class ControlReport(Record, frozen=True):
    """The controls' verdict on one function. `median_ms` is the median duration of a call in milliseconds."""

    function: str
    verdict: str
    rows: int
    calls: int
    median_ms: float
    forms: list[FormReport]
    empty: float | None
    prompt: float | None
    odd: float | None


def judge(
    function: ControlledFunction, trials: Sequence[Trial], trajectories: Sequence[Trial] = ()
) -> tuple[ControlReport, list[Finding]]:
    """Judge a function by its trials, given in the order in which they ran.

    `trajectories` are trials of the right answer after different tool calls, for a function of the full form.
    """
    return _Judgement(function, trials, trajectories).report()


def judges_trajectories(trajectories: Sequence[Trial]) -> bool:
    """Return True if a function's score of a row depends on the tool calls before the same answer."""
    by_row: dict[int, list[float]] = {}
    for trial in trajectories:
        if trial.score.value is not None:
            by_row.setdefault(trial.probe.row.index, []).append(trial.score.value)
    return any(max(values) - min(values) > _CLOSE for values in by_row.values())


class _Judgement:
    """The evaluation of one function's trials."""

    def __init__(
        self, function: ControlledFunction, trials: Sequence[Trial], trajectories: Sequence[Trial] = ()
    ) -> None:
        self._function = function
        self._trials = trials
        self._trajectories = trajectories
        self._scored = [(t.probe, t.score.value) for t in trials if t.score.value is not None]
        self._right: dict[tuple[int, str], float] = {
            (probe.row.index, probe.form): value for probe, value in self._scored if probe.kind == "right"
        }
        self.best = max(self._right.values(), default=0.0)
        self.floor = min((value for _, value in self._scored), default=0.0)
        self._row_best: dict[int, float] = {}
        for (row, _), value in self._right.items():
            self._row_best[row] = max(value, self._row_best.get(row, value))
        self._forms = list(dict.fromkeys(probe.form for probe, _ in self._scored if probe.kind == "right"))
        self.accepted = [form for form in self._forms if self._accepts(form)]
        self._findings: list[Finding] = []

    def report(self) -> tuple[ControlReport, list[Finding]]:
        self._check_failures()
        self._check_determinism()
        self._check_range()
        self._check_time()
        failed = any(trial.probe.kind == "right" and trial.score.failure is not None for trial in self._trials)
        if not self._scored:
            verdict = "could not be judged: it never returned a score"
        elif failed and not self.accepted:
            verdict = "could not be judged: it fails on right answers"
        else:
            before = len(self._findings)
            verdict = self._verdict()
            if judges_trajectories(self._trajectories) and len(self._findings) > before:
                # All answers followed the same calls, so the calls may explain what was found.
                del self._findings[before:]
                verdict = self._judge_trajectory()
        calls = len(self._trials) + sum(trial.again is not None for trial in self._trials)
        report = ControlReport(
            function=self._function.ref.name,
            verdict=verdict,
            rows=len({trial.probe.row.index for trial in self._trials}),
            calls=calls,
            median_ms=self._median_ms(),
            forms=[self._form_report(form) for form in self._forms],
            **{kind: self._highest(kind) for kind in ("empty", "prompt", "odd")},
        )
        return report, self._findings

    def _add(self, code: str, message: str, hint: str = "", file: str | None = None, line: int | None = None) -> None:
        ref = self._function.ref
        at = Place(file or ref.file, line if file else ref.line, ref.attribute)
        self._findings.append(finding(code, message, at, hint))

    # Failures, and what every score should be

    def _check_failures(self) -> None:
        seen: dict[tuple[str, str | None, int | None], tuple[Trial, int]] = {}
        for trial in (*self._trials, *self._trajectories):
            for score in (trial.score, trial.again):
                if score is not None and score.failure is not None:
                    # One finding per place in the code, however many answers fail there.
                    key = (score.failure.kind, score.failure.file, score.failure.line)
                    first, count = seen.get(key, (trial._replace(score=score), 0))
                    seen[key] = (first, count + 1)
        for trial, count in seen.values():
            failure = trial.score.failure
            assert failure is not None
            times = "once" if count == 1 else f"{count} times"
            where = f"for {_described(trial.probe)}"
            name = self._function.ref.attribute
            if failure.kind == "timeout":
                self._add("OSM317", f"{name} {failure.message}, {where}", "Limit its work: input length, loops.")
            elif failure.kind in ("died", "blocked", "exit"):
                self._add("OSM318", f"{name} ended its process {where}: {failure.message}")
            # The decorator raises for a wrong type before the runtime sees it, and says so in these words.
            elif failure.kind in ("wrong_type", "not_finite") or "must return a float" in failure.message:
                said = failure.message.rpartition(": ")[2] if "must return" in failure.message else failure.message
                said = said.removeprefix(f"{name} ")
                hint = "Return float(score) in every case."
                self._add("OSM314", f"{name} {said} ({times}, first {where})", hint, failure.file, failure.line)
            else:
                hint = "A model may answer anything: catch the exception and return 0.0."
                message = f"{name} raises {failure.message} ({times}, first {where})"
                self._add("OSM312", message, hint, failure.file, failure.line)

    def _check_determinism(self) -> None:
        for trial in (*self._trials, *self._trajectories):
            if trial.again is None or trial.again.value is None or trial.score.value is None:
                continue
            if not math.isclose(trial.score.value, trial.again.value, rel_tol=_CLOSE, abs_tol=_CLOSE):
                scores = f"{trial.score.value:g} and then {trial.again.value:g}, for {_described(trial.probe)}"
                hint = "Don't depend on randomness, the time or state from earlier calls."
                self._add("OSM315", f"the same call scored {scores}", hint)
                return

    def _check_range(self) -> None:
        outside = [(probe, value) for probe, value in self._scored if not -_CLOSE <= value <= 1 + _CLOSE]
        if outside:
            probe, value = max(outside, key=lambda item: abs(item[1]))
            message = f"it scored {value:g} for {_described(probe)}, outside 0 to 1"
            self._add("OSM313", message, "Scale the score, unless the training run expects this range.")

    def _check_time(self) -> None:
        if (milliseconds := self._median_ms()) > SLOW_MS:
            message = f"the median call takes {milliseconds:.0f} ms; training makes many thousands of calls"
            self._add("OSM316", message, "Load models and files once, when the module is imported.")

    def _median_ms(self) -> float:
        # The first call may pay for caches and lazy imports; odd answers may be huge.
        usual = [t.score.duration_ms for t in self._trials[1:] if t.probe.kind != "odd"]
        return median(usual) if usual else 0.0

    # Right and wrong

    def _verdict(self) -> str:
        values = [value for _, value in self._scored]
        if max(values) - min(values) <= _CLOSE:
            return self._never_varies()
        self._check_empty()
        return self._judge_comparing() if self._function.reads_ground_truth else self._judge_form_only()

    def _judge_trajectory(self) -> str:
        """Note what the tool calls decide."""
        scored = {trial.probe.odd: trial.score.value for trial in self._trajectories if trial.score.value is not None}
        low, high = min(scored, key=scored.__getitem__), max(scored, key=scored.__getitem__)
        message = f"the same answer scores {scored[low]:g} after {low}, and {scored[high]:g} after {high}"
        hint = "The controls of answers can't judge it. Check that these are the trajectories it should tell apart."
        self._add("OSM319", message, hint)
        answers = {value for _, value in self._scored}
        return "judges the tool calls" + ("" if max(answers) - min(answers) <= _CLOSE else " and the answer")

    @property
    def _span(self) -> float:
        return self.best - self.floor

    @property
    def _half(self) -> float:
        return self.floor + 0.5 * self._span

    def _judge_comparing(self) -> str:
        wrong = [item for item in self._scored if item[0].kind in WRONG or (item[0].kind == "odd" and item[0].odd)]
        most_wrong = max((value for _, value in wrong), default=self.floor)
        if not self.accepted or self._span <= _CLOSE:
            if most_wrong > self.best + _CLOSE:
                probe, value = max(wrong, key=lambda item: item[1])
                scores = f"{value:g} for {_described(probe)}, {self.best:g} for the best right answer"
                hint = "Look for an inverted comparison, or pass the expected form with --answer-form."
                self._add("OSM302", f"wrong answers score more than right ones: {scores}", hint)
                return "rewards wrong answers"
            self._add_unaccepted()
            return "accepts no usual answer form"
        self._check_prompt()
        fooled = self._check_wrong(wrong)
        self._check_rows()
        forms = ", ".join(self.accepted)
        return f"accepts {forms}; " + ("wrong answers score too" if fooled else "tells right from wrong")

    def _judge_form_only(self) -> str:
        if not self._function.about_form:
            name = self._function.ref.attribute
            message = f"{name} never reads the ground truth, so wrong answers score the same as right ones"
            hint = "Fine for a format or length reward if another one compares; say so in its name or docstring."
            self._add("OSM307", message, hint)
        return "never reads the ground truth: rewards form, not correctness"

    def _never_varies(self) -> str:
        value = self._scored[0][1]
        if abs(value) > _CLOSE:
            message = f"every answer scored {value:g}: right, wrong and empty ones"
            # Varied calls were tried as well, so they can't explain the constant either.
            if self._trajectories:
                message += ", after any tool calls"
            self._add("OSM310", message, "A model can't learn from a constant score.")
            return f"always scores {value:g}"
        if self._function.reads_ground_truth:
            self._add_unaccepted()
            return "accepts no usual answer form"
        self._add("OSM301", "every answer tried scored 0", "Pass the form it rewards with --answer-form.")
        return "scored 0 for every answer tried"

    def _add_unaccepted(self) -> None:
        message = f"right answers score at most {self.best:g} in every form tried: {', '.join(self._forms)}"
        self._add("OSM301", message, "Pass the form it expects: --answer-form 'Result: {answer}'.")

    def _check_empty(self) -> None:
        value = self._highest("empty")
        if value is None or value <= _CLOSE:
            return
        top = max(value for _, value in self._scored)
        # With penalties, halfway between the floor and the top may be close to 0, which is no reward.
        if value >= self.floor + 0.5 * (top - self.floor) - _CLOSE and value >= 0.5 * top - _CLOSE:
            message = f"an empty answer scores {value:g}, so a model is rewarded without answering"
            self._add("OSM305", message, "Return 0.0 when there is no answer.")
        else:
            self._add("OSM306", f"an empty answer scores {value:g}", "Return 0.0 when there is no answer.")

    def _check_prompt(self) -> None:
        for probe, value in self._scored:
            if probe.kind == "prompt" and self._like_right(probe, value):
                row = f"(row {probe.row.index})"
                message = f"repeating the question scores {value:g}, although it doesn't contain the answer {row}"
                self._add("OSM311", message, "Extract the answer from its expected place and compare only that.")
                return

    def _check_wrong(self, wrong: Sequence[tuple[Probe, float]]) -> bool:
        """Look for wrong answers that score like right ones; return True if there are enough of them to matter."""
        fooled = False
        kinds: dict[tuple[str, bool], list[tuple[Probe, float]]] = {}
        for probe, value in wrong:
            kinds.setdefault((probe.odd or probe.kind, probe.near), []).append((probe, value))
        serious: list[tuple[Probe, float, str]] = []
        slight: list[tuple[Probe, float, str]] = []
        for (_, near), tried in kinds.items():
            alike = [(probe, value) for probe, value in tried if self._like_right(probe, value)]
            if not alike:
                continue
            rows, all_rows = {p.row.index for p, _ in alike}, {p.row.index for p, _ in tried}
            share = f"in {len(rows)} of {len(all_rows)} rows"
            # A lenient reward may accept these, or two ground truths may mean the same.
            is_slight = near or (len(rows) <= TOLERATED_SHARE * len(all_rows))
            (slight if is_slight else serious).append((*alike[0], share))
        for code, cases in (("OSM302", serious), ("OSM303", slight)):
            if cases:
                shown = "; ".join(f"{value:g} for {_described(probe)}, {share}" for probe, value, share in cases[:4])
                more = f"; and {len(cases) - 4} other kinds" if len(cases) > 4 else ""
                extract = "First extract the one answer by its form, then compare all of it."
                self._add(code, f"wrong answers score like right ones: {shown}{more}", extract)
                fooled = fooled or code == "OSM302"
        if not fooled:
            self._check_partial(wrong)
        return fooled

    def _check_partial(self, wrong: Sequence[tuple[Probe, float]]) -> None:
        in_form = [
            value for probe, value in wrong if probe.kind in WRONG and not probe.near and probe.form in self.accepted
        ]
        if in_form and (mean := sum(in_form) / len(in_form)) > self._half:
            message = f"wrong answers score {mean:.2f} on average; right ones get {self.best:g}"
            self._add("OSM304", message, "Give less credit for similar answers.")

    def _check_rows(self) -> None:
        missed = sorted(row for row, value in self._row_best.items() if value < self._half - _CLOSE)
        if missed:
            truth = next(t.probe.row.ground_truth or "" for t in self._trials if t.probe.row.index == missed[0])
            first = f"the ground truth of row {missed[0]} is {_quoted(truth)}"
            message = f"the right answer isn't accepted in any form for row {examples(list(map(str, missed)))}; {first}"
            self._add("OSM320", message, "Make sure the function understands every ground truth of the dataset.")

    def _like_right(self, probe: Probe, value: float) -> bool:
        # A row whose own right answer isn't accepted says nothing about wrong ones.
        best = self._row_best.get(probe.row.index)
        return best is not None and best >= self._half and value >= best - _CLOSE * max(1.0, abs(best))

    def _accepts(self, form: str) -> bool:
        values = [value for (_, name), value in self._right.items() if name == form]
        # Half of the rows suffice: `_check_rows` reports ground truths that the function doesn't understand.
        return self._span > _CLOSE and 2 * sum(value >= self._half - _CLOSE for value in values) >= len(values)

    def _form_report(self, form: str) -> FormReport:
        def mean(kind: str) -> float | None:
            values = [value for probe, value in self._scored if probe.kind == kind and probe.form == form]
            return sum(values) / len(values) if values else None

        return FormReport(form, form in self.accepted, mean("right"), {kind: mean(kind) for kind in WRONG})

    def _highest(self, kind: str) -> float | None:
        return max((value for probe, value in self._scored if probe.kind == kind), default=None)


def tells_rows_apart(trials: Sequence[Trial]) -> bool:
    """Return True if some answer scores more on its own row than on another one, and none scores less.

    Such a function reads the ground truth, even if only a helper mentions it.
    """
    right: dict[str, float] = {}
    for probe, score, _ in trials:
        if probe.kind == "right" and score.value is not None:
            right[probe.answer] = max(score.value, right.get(probe.answer, score.value))
    differences = [
        right[probe.answer] - score.value
        for probe, score, _ in trials
        if probe.kind == "another row's" and score.value is not None and probe.answer in right
    ]
    return max(differences, default=0.0) > _CLOSE and min(differences) >= -_CLOSE


def judge_together(
    functions: Sequence[ControlledFunction], reports: Sequence[ControlReport], rubrics: int
) -> Iterator[Finding]:
    """Check that at least one function, or a rubric, can tell right answers from wrong ones."""
    if not functions or rubrics or any(function.reads_ground_truth for function in functions):
        return
    # A function that was never called may read the ground truth in a helper.
    if all(report.calls for report in reports):
        names = ", ".join(function.ref.attribute for function in functions)
        message = f"the rows have a ground truth, but no reward function reads it ({names})"
        at = Place(functions[0].ref.file, functions[0].ref.line)
        hint = "Write one that compares the answer with ground_truth."
        yield finding("OSM308", f"{message}: wrong answers earn the same reward as right ones", at, hint)


def _described(probe: Probe) -> str:
    row = f"row {probe.row.index}"
    if probe.kind == "odd":
        return f"{probe.odd} ({probe.form}, {row})"
    if probe.kind == "trajectory":
        return f"{probe.odd} ({row})"
    what = _NAMES[probe.kind]
    return f"{what}, {row}" if probe.kind in ("empty", "prompt") else f"{what} {_quoted(probe.answer)} ({row})"


def _quoted(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
