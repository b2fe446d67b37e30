"""The pytest plugin: the fixtures `tools`, `rollout` and `evaluate`, the mark `osmosis`, and the options.

Every project with this package installed loads it, so it imports nothing but the standard library and pytest until a
fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from osmosis_ai.pytest_plugin.evaluation import Evaluate
    from osmosis_ai.pytest_plugin.harness import Harness, ItemRuns
    from osmosis_ai.pytest_plugin.rollouts import RunRollout
    from osmosis_ai.pytest_plugin.tools import Tools

RECORD = "--osmosis-record"
HARNESS = pytest.StashKey["Harness"]()
RUNS = pytest.StashKey["ItemRuns"]()
PROPERTY = "osmosis_unused"
"""Under xdist, workers can report to the controlling process only through a test's user properties."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("osmosis", "rollouts of MCP tools")
    group.addoption(
        RECORD,
        choices=("none", "new", "all"),
        default="none",
        help="Record model replies: none; new records what is missing; all records everything again.",
    )
    group.addoption("--osmosis-model", metavar="NAME", help="The model for tests whose mark names none.")
    group.addoption("--osmosis-live", action="store_true", help="Call models; neither replay nor record their replies.")
    group.addoption("--osmosis-keep", action="store_true", help="Keep rollouts in the repository's own store.")
    group.addoption("--osmosis-view", action="store_true", help="Show the rollouts in the browser after the tests.")
    parser.addini("osmosis_root", "The repository's root; found from pytest's root directory by default.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "osmosis(model=None, rows=None, n=None, cassette=None, **options): the model (a name, or a script of replies), "
        "the rows (a file, or dicts), the attempts per row, the recordings' file (False for none), and other options "
        "of `osmosis eval` for the fixtures `rollout` and `evaluate`.",
    )
    given = any(str(argument).startswith(RECORD) for argument in config.invocation_params.args)
    if os.environ.get("CI") and not given:
        # In CI, only an explicit command-line option may record, not a setting in the project's files.
        config.option.osmosis_record = "none"


@pytest.fixture(scope="session")
def _osmosis(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    from osmosis_ai.pytest_plugin.harness import Harness

    base = tmp_path_factory.getbasetemp()
    # All xdist workers share a store, so that one command shows every rollout.
    store = (base.parent if hasattr(pytestconfig, "workerinput") else base) / "osmosis"
    with Harness.open(pytestconfig, store) as harness:
        pytestconfig.stash[HARNESS] = harness
        yield harness


@pytest.fixture
def _osmosis_runs(request: pytest.FixtureRequest, _osmosis: Harness) -> Iterator[ItemRuns]:
    with _osmosis.of_item(request.node) as runs:
        request.node.stash[RUNS] = runs
        yield runs
    if not runs.failed:
        request.node.user_properties += [(PROPERTY, unused) for unused in runs.unused]


@pytest.fixture
def tools(_osmosis: Harness) -> Iterator[Tools]:
    """The repository's tools, in this test's own session: `tools.call("price", item="bread")`."""
    with _osmosis.tools() as tools:
        yield tools


@pytest.fixture
def rollout(_osmosis_runs: ItemRuns) -> RunRollout:
    """Run one rollout in this process: `rollout(row=0)`, or `rollout(user="What is the price of bread?")`."""
    return _osmosis_runs.rollout


@pytest.fixture
def evaluate(_osmosis_runs: ItemRuns, request: pytest.FixtureRequest) -> Evaluate:
    """Run many rows in worker processes: `evaluate("test_data.jsonl", limit=40)`."""
    from osmosis_ai.pytest_plugin.evaluation import Evaluate

    return Evaluate(_osmosis_runs, request)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report: pytest.TestReport = outcome.get_result()
    runs = item.stash.get(RUNS, None)
    if runs is not None and report.failed and report.when == "call":
        runs.failed = True
        report.sections += runs.shown()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # The fixture adds the properties in its teardown, so no earlier report of the test has them.
    if report.when == "teardown":
        _unused.extend(str(value) for name, value in report.user_properties if name == PROPERTY)


# A global, because the hook that fills it gets no config.
_unused: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _unused:
        terminalreporter.write_line(f"osmosis: {line}; {RECORD}=all records everything again, without them")
    _unused.clear()


def pytest_unconfigure(config: pytest.Config) -> None:
    harness = config.stash.get(HARNESS, None)
    if harness is not None and config.getoption("osmosis_view", False) and not hasattr(config, "workerinput"):
        harness.view()
