"""Findings, and the registry of their codes. docs/checks.md lists causes and remedies; a test keeps it complete."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from osmosis_ai.records import Record

__all__ = ["CODES", "Code", "Finding", "Place", "Severity", "codes", "examples", "finding"]

Severity: TypeAlias = Literal["error", "warning", "note"]


class Code(NamedTuple):
    """A kind of finding: its severity and a short title."""

    severity: Severity
    title: str


class Finding(Record, frozen=True):
    """One problem.

    `file` is relative to the repository's root, with forward slashes; None if the problem has no place. `subject` is
    the tool, function, column or key concerned. `hint` says what to do; it is empty if the message says it all.
    """

    code: str
    severity: Severity
    file: str | None
    line: int | None
    subject: str | None
    message: str
    hint: str


class Place(NamedTuple):
    """The location and subject of a problem; see `Finding`."""

    file: str | None = None
    line: int | None = None
    subject: str | None = None


NOWHERE = Place()


def finding(code: str, message: str, at: Place = NOWHERE, hint: str = "") -> Finding:
    """Create a finding with its code's severity."""
    return Finding(code, CODES[code].severity, *at, message, hint)


def codes(first: int, last: int) -> str:
    """Return the codes from `first` to `last`, separated by spaces."""
    return " ".join(code for code in CODES if first <= int(code.removeprefix("OSM")) <= last)


def examples(items: list[str], limit: int = 5) -> str:
    """Return the first few items of a list as text, and how many more there are."""
    shown = ", ".join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown


def _error(title: str) -> Code:
    return Code("error", title)


def _warning(title: str) -> Code:
    return Code("warning", title)


def _note(title: str) -> Code:
    return Code("note", title)


CODES: dict[str, Code] = {
    # The repository, and reading it
    "OSM001": _error("a source file can't be read"),
    "OSM002": _error("a link is broken or leads out of the repository"),
    "OSM003": _error("there is nothing to check"),
    "OSM004": _warning("no pyproject.toml"),
    "OSM005": _error("pyproject.toml can't be read"),
    "OSM006": _error(".env can't be read"),
    "OSM009": _error("a check could not run"),
    # mcp/
    "OSM101": _error("no main.py"),
    "OSM102": _error("main.py can't be loaded"),
    "OSM103": _error("main.py doesn't finish loading"),
    "OSM104": _error("the server has no tools"),
    "OSM105": _error("a tool's name is refused by providers"),
    "OSM106": _error("two tools have the same name"),
    "OSM107": _error("a tool's file is never imported"),
    "OSM108": _warning("a tool in the source isn't registered"),
    "OSM109": _warning("a registered tool isn't in the source"),
    "OSM110": _warning("a tool has no description"),
    "OSM111": _warning("a parameter has no description"),
    "OSM112": _warning("a parameter has no type"),
    "OSM113": _error("a tool's parameters aren't an object"),
    "OSM114": _error("a union at the top of a tool's parameters"),
    "OSM115": _error("a recursive schema"),
    "OSM116": _warning("a schema keyword that providers ignore or refuse"),
    "OSM117": _error("a schema reference leads nowhere"),
    "OSM118": _warning("two tools' descriptions can't be told apart"),
    "OSM119": _warning("a description is too long for some providers"),
    "OSM120": _warning("more tools than some providers take"),
    "OSM121": _warning("tools change module-level state"),
    "OSM122": _error("a result depends on earlier rollouts"),
    # reward_fn/ and reward_rubric/
    "OSM201": _error("a decorated function has the wrong signature"),
    "OSM202": _error("a function can't be loaded"),
    "OSM203": _error("functions don't finish loading"),
    "OSM204": _warning("a folder without decorated functions"),
    "OSM205": _error("a decorated function can't be reached"),
    "OSM206": _warning("a function looks like a reward but isn't decorated"),
    "OSM207": _warning("an import isn't declared in pyproject.toml"),
    "OSM208": _error("a file contains a secret"),
    "OSM209": _warning("a rubric's key variable isn't set"),
    "OSM210": _error("a rubric file can't be used"),
    # Controls of reward functions
    "OSM301": _warning("no answer form is accepted"),
    "OSM302": _error("wrong answers score like right ones"),
    "OSM303": _warning("some wrong answers score like right ones"),
    "OSM304": _warning("wrong answers score more than half"),
    "OSM305": _error("an empty answer is rewarded"),
    "OSM306": _warning("an empty answer scores something"),
    "OSM307": _warning("a function never reads the ground truth"),
    "OSM308": _error("no function tells right answers from wrong ones"),
    "OSM309": _warning("the controls could not be run"),
    "OSM310": _error("the score never varies"),
    "OSM311": _error("repeating the prompt is rewarded"),
    "OSM312": _error("a function raises"),
    "OSM313": _warning("scores outside 0 to 1"),
    "OSM314": _error("a function doesn't return a finite float"),
    "OSM315": _error("a function isn't deterministic"),
    "OSM316": _warning("a function is slow"),
    "OSM317": _error("a function takes too long"),
    "OSM318": _error("a function ends its process"),
    "OSM319": _note("the score depends on the tool calls"),
    "OSM320": _warning("right answers of some rows score nothing"),
    # The dataset
    "OSM401": _warning("no dataset"),
    "OSM402": _error("a row can't be used"),
    "OSM403": _warning("duplicate rows"),
    "OSM404": _warning("equal prompts with different ground truths"),
    "OSM405": _warning("rows without ground truth"),
    "OSM406": _warning("the prompt gives the ground truth away"),
    "OSM407": _warning("a column that no function reads"),
    "OSM408": _warning("rows much longer than the others"),
    "OSM409": _warning("a column with values of several types"),
    "OSM410": _error("a solution doesn't earn the full reward"),
    "OSM411": _warning("a solution's tool call fails"),
    "OSM412": _error("the column expect can't be used"),
    "OSM413": _warning("the column expect names an unknown tool"),
    "OSM414": _warning("the column expect asks for what no rollout can do"),
    # configs/
    "OSM501": _error("a config can't be read"),
    "OSM502": _error("a required field is missing"),
    "OSM503": _error("an unknown table or key"),
    "OSM504": _error("a value of the wrong type"),
    "OSM505": _error("an invalid name"),
    "OSM506": _error("a reserved name"),
    "OSM507": _error("a name is both variable and secret"),
    "OSM508": _error("[secrets] is missing or incomplete"),
    "OSM509": _error("an invalid commit_sha or branch"),
    "OSM510": _error("the rollout's folder doesn't exist"),
    "OSM511": _error("the entrypoint doesn't exist"),
    "OSM512": _warning("an implausible value"),
    "OSM513": _warning("a config outside the searched folders"),
    "OSM514": _warning("a training config from which nothing can be learned"),
    # The working copy
    "OSM601": _warning("not a git repository"),
    "OSM602": _warning("uncommitted changes"),
    "OSM603": _warning("unpushed commits"),
    "OSM604": _warning("a file over 50 MB"),
    "OSM605": _error("a file over 100 MB"),
    "OSM606": _error("a .env file is tracked"),
    "OSM607": _warning("a .env file isn't ignored"),
    "OSM608": _warning("git ignores a needed file"),
    # rollouts/, by `osmosis rollout validate`
    "OSM701": _error("a rollout's environment can't be made"),
    "OSM702": _error("a rollout server doesn't start"),
    "OSM703": _error("a workflow fails"),
    "OSM704": _error("a workflow or grader takes too long"),
    "OSM705": _warning("a workflow makes no model call"),
    "OSM706": _error("no grader is called"),
    "OSM707": _error("a grader fails, or gives no finite reward"),
    "OSM708": _warning("a right answer doesn't earn the full reward"),
}
"""Every kind of finding, by its code. Repositories name codes in settings and comments, so a code keeps its meaning."""
