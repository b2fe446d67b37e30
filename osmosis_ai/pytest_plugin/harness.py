"""The state that the fixtures share: the repository, an event loop in a thread, the store, each test's runs."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from osmosis_ai.config import RunConfig
from osmosis_ai.conversation import conversation
from osmosis_ai.discovery.repository import parse_mcp_source, repository_at, root_above
from osmosis_ai.errors import OsmosisError
from osmosis_ai.pytest_plugin.rollouts import RolloutResult, RunRollout
from osmosis_ai.records import JsonObject
from osmosis_ai.runtime.run.recordings import Recordings, open_recordings
from osmosis_ai.runtime.run.report import Report
from osmosis_ai.runtime.run.session import RunSession
from osmosis_ai.store.queries import Queries
from osmosis_ai.testing.endpoint import ScriptedEndpoint
from osmosis_ai.text import score_number

if TYPE_CHECKING:
    from osmosis_ai.mcp_tools.host import ToolHost
    from osmosis_ai.mcp_tools.setups import Setup
    from osmosis_ai.pytest_plugin.tools import Tools

__all__ = ["Harness", "ItemRuns", "Options", "fail"]

T = TypeVar("T")
Options = dict[str, Any]

SHOWN_CHARACTERS = 400
"""Characters to show of each message in a failing test's rollouts."""
SHOWN_ROLLOUTS = 3
"""Rollouts of a failing test to show, its last ones."""


class Harness:
    """The repository under test, for one pytest session.

    Attributes:
        root: The repository.
        store: The folder of the runs.
    """

    def __init__(
        self, config: pytest.Config, root: Path, store: Path, portal: BlockingPortal, stack: ExitStack
    ) -> None:
        self.config = config
        self.root = root
        self.store = store
        self.portal = portal
        self._stack = stack
        self._host: tuple[ToolHost, list[Setup]] | None = None

    @classmethod
    @contextmanager
    def open(cls, config: pytest.Config, store: Path) -> Iterator[Harness]:
        """Find the repository and start the event loop; fails the test if there is no repository."""
        given = config.getini("osmosis_root")
        root = config.rootpath / given if given else root_above(config.rootpath)
        if config.getoption("osmosis_keep"):
            store = root / ".osmosis"
        with ExitStack() as stack, start_blocking_portal() as portal:
            try:
                yield cls(config, root, store, portal, stack)
            finally:
                # Now, while the event loop still runs: the tools' lifespan ends on it.
                stack.close()

    def wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work on the event loop; an interrupted test cancels it. An OsmosisError fails the test with one line."""
        future = self.portal.start_task_soon(work)
        try:
            return future.result()
        except OsmosisError as error:
            fail(error)
        except BaseException:
            future.cancel()
            raise

    @contextmanager
    def tools(self) -> Iterator[Tools]:
        """Open one test's session on the repository's tools."""
        from osmosis_ai.pytest_plugin.tools import open_tools

        with self._process():
            host, setups = self._opened()
            with open_tools(self.portal, host, setups, self.root) as tools:
                yield tools

    @contextmanager
    def of_item(self, item: pytest.Item) -> Iterator[ItemRuns]:
        """Collect the runs of one test."""
        _import_libraries(self.root)
        with self._process(), ExitStack() as stack:
            yield ItemRuns(self, item, stack)

    def view(self) -> None:
        """Show the session's rollouts in the browser until the viewer is closed with Ctrl-C."""
        command = [sys.executable, "-m", "osmosis_ai", "view", "--store", str(self.store)]
        # Ctrl-C reaches both processes: it closes the viewer, and mustn't change the outcome of the tests.
        with subprocess.Popen(command, cwd=self.root) as viewer, suppress(KeyboardInterrupt):  # noqa: S603 - our own command
            viewer.wait()

    def _opened(self) -> tuple[ToolHost, list[Setup]]:
        """Load the server once, as a worker does; its lifespan lasts for the whole pytest session."""
        if self._host is None:
            from osmosis_ai.mcp_tools.host import ToolHost
            from osmosis_ai.mcp_tools.loading import load_server, prepare_path
            from osmosis_ai.mcp_tools.setups import load_setups

            folder = repository_at(self.root).mcp_dir
            if folder is None:
                pytest.fail(
                    f"there is no mcp folder in {self.root}; name the root with the ini option osmosis_root", False
                )
            try:
                source = parse_mcp_source("mcp", self.root)
                _import_libraries(self.root)
                prepare_path(folder, self.root)
                server = load_server(Path(source.path or folder / "main.py"), source.server_name)
                setups = load_setups(folder, self.root)
                host = self._stack.enter_context(
                    self.portal.wrap_async_context_manager(ToolHost(server, root=self.root))
                )
            except OsmosisError as error:
                fail(error)
            self._host = host, setups
        return self._host

    @contextmanager
    def _process(self) -> Iterator[None]:
        """Work in the repository's root, as its tools expect, and restore the process state that loading changes."""
        cwd, environ, argv = Path.cwd(), dict(os.environ), list(sys.argv)
        os.chdir(self.root)
        try:
            yield
        finally:
            os.chdir(cwd)
            sys.argv[:] = argv
            for name in os.environ.keys() - environ.keys():
                del os.environ[name]
            os.environ.update(environ)


class ItemRuns:
    """The runs of one test, which share its recordings and are shown if it fails.

    Attributes:
        failed: True once the test has failed.
        unused: Recordings that the test didn't use, known at its end.
        rows: The dataset or the rows that its mark names.
    """

    def __init__(self, harness: Harness, item: pytest.Item, stack: ExitStack) -> None:
        self.harness = harness
        self.failed = False
        self.unused: list[str] = []
        self.rollout = RunRollout(self)
        self._item = item
        self._stack = stack
        self._rollouts: list[RolloutResult] = []
        self._runs: list[str] = []
        self._recordings: Recordings | None = None
        marks = [mark.kwargs for mark in item.iter_markers("osmosis")]
        # The closest mark comes first.
        self._marked: Options = {name: value for kwargs in reversed(marks) for name, value in kwargs.items()}
        self._cassette: str | bool | None = self._marked.pop("cassette", None)
        self.rows: Any = self._marked.pop("rows", None)

    def one(self, row: int | JsonObject, attempt: int, options: Options) -> RolloutResult:
        """Run one rollout in this process."""
        # In this process, where `monkeypatch`, coverage and `breakpoint()` reach the tools. Attempts count from 0, and
        # a run makes those before this one too.
        chosen: Options = {"workers": 0, **options, "n": attempt + 1}
        if isinstance(row, int):
            chosen |= {"offset": row, "limit": 1}
            rows = self.rows
        else:
            rows = [row]
        report = self.run("eval", rows, chosen)
        found = Queries(Path(report.store)).scored(report.run_id, with_trajectory=True)
        scored = [one for one in found if one.stored.rollout.run_index == attempt]
        place = scored[-1].stored.rollout.row_index
        store = "" if self.harness.config.getoption("osmosis_keep") else f" --store {self.harness.store}"
        command = f"osmosis runs show {report.run_id} --row {place}{store}"
        result = RolloutResult(scored[-1], command)
        self._rollouts.append(result)
        return result

    def run(self, command: str, rows: Any, options: Options) -> Report:
        """Run rows with the mark's options and these."""
        given = {**self._marked, **options}
        # The default needs no key and costs nothing, whatever keys are set.
        model = given.get("model") or self.harness.config.getoption("osmosis_model") or "offline/oracle"
        if not isinstance(model, str):
            endpoint = self._stack.enter_context(ScriptedEndpoint(model).run_in_thread())
            given |= {"model": "scripted", "base_url": endpoint.url}
            recordings = None
        else:
            given["model"] = model
            # Like a script, a stand-in is repeatable without recordings.
            recordings = None if model.startswith("offline/") else self._cassette_of_test()
        dataset = self._dataset(rows)
        if dataset is not None:
            given["dataset"] = str(dataset)
        given.setdefault("store", str(self.harness.store))
        work = partial(_run, given, command, self.harness.root, recordings)
        report = self.harness.wait(work)
        self._runs.append(report.run_id)
        return report

    def shown(self) -> list[tuple[str, str]]:
        """Return the report sections for a failing test: summaries of its last rollouts."""
        return [("osmosis rollout", _transcript(result)) for result in self._rollouts[-SHOWN_ROLLOUTS:]]

    def _dataset(self, rows: Any) -> Path | None:
        if rows is None or isinstance(rows, (str, Path)):
            return None if rows is None else self.harness.root / rows
        folder = self.harness.store / "rows"
        folder.mkdir(parents=True, exist_ok=True)
        content = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        path = folder / f"{hashlib.blake2b(content, digest_size=8).hexdigest()}.jsonl"
        path.write_bytes(content)
        return path

    def _cassette_of_test(self) -> Recordings | None:
        """Open the test's recordings at its first run, and clean them up at its end."""
        config = self.harness.config
        mode = config.getoption("osmosis_record")
        if self._cassette is False or config.getoption("osmosis_live"):
            return None
        if self._recordings is None:
            given = self._cassette if isinstance(self._cassette, str) else None
            path = _cassette_path(self._item, given)
            shown = os.path.relpath(path, config.rootpath)
            advice = f"record it with: pytest {self._item.nodeid!r} --osmosis-record=new"
            try:
                self._recordings = self._stack.enter_context(_recorded(path, shown, mode, advice, self.unused))
            except OsmosisError as error:
                fail(error)
        return self._recordings


@contextmanager
def _recorded(path: Path, shown: str, mode: str, advice: str, unused: list[str]) -> Iterator[Recordings]:
    """Open recordings, and add those left unused to `unused`; the mode `all` keeps only those that were used."""
    # Beside the old file, which stays in place until the test has ended.
    fresh = path.with_name(f".{path.name}") if mode == "all" else path
    if mode == "all":
        from osmosis_ai.models.cassette import judge_file

        # Those of a test that was killed.
        for left in (fresh, judge_file(fresh)):
            left.unlink(missing_ok=True)
    with open_recordings(fresh, shown, replay=mode == "none", advice=advice) as recordings:
        yield recordings
        recordings.tidy()
        if mode != "all":
            unused += recordings.unused([recordings.policy, recordings.judges])
    if mode == "all":
        for new, old in ((fresh, path), (judge_file(fresh), judge_file(path))):
            old.unlink(missing_ok=True)
            if new.exists():
                new.rename(old)


async def _run(options: Options, command: str, root: Path, recordings: Recordings | None) -> Report:
    config = RunConfig.of("test" if command == "test" else "eval", **options)
    async with RunSession.open(config, root, recordings=recordings) as session:
        await session.begin()
        return await session.report()


def _transcript(result: RolloutResult) -> str:
    rollout = result.stored.stored.rollout
    lines = []
    for section in conversation(rollout.messages, rollout.turns, rollout.tool_calls):
        body = "\n".join(section.body)
        lines += [f"── {section.title}", body if len(body) <= SHOWN_CHARACTERS else f"{body[:SHOWN_CHARACTERS]}…"]
    if rollout.failure is not None:
        lines.append(f"failed: {rollout.failure.origin}: {rollout.failure.message}")
    lines += [f"score {name}: {'–' if value is None else score_number(value)}" for name, value in result.scores.items()]
    return "\n".join([*lines, f"to see it: {result.command}"])


def fail(error: OsmosisError) -> NoReturn:
    """Fail the test with an error's own message, without our traceback."""
    # Raised `from None`, because the original error would only repeat the message.
    raise pytest.fail.Exception(str(error), pytrace=False) from None


def _cassette_path(item: pytest.Item, given: str | None) -> Path:
    """Return a test's recordings: the named file beside it, else one of its own in the folder `cassettes`."""
    folder = item.path.parent
    if given is not None:
        return folder / given
    # The id of a parametrised test may hold any character.
    name = ".".join(item.nodeid.split("::")[1:])
    return folder / "cassettes" / item.path.stem / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.jsonl"


def _import_libraries(root: Path) -> None:
    """Import the MCP libraries with the repository off the path: it may have a folder `mcp` with an `__init__.py`."""
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry or ".").resolve() != root.resolve()]
    try:
        from osmosis_ai.mcp_tools.loading import import_fastmcp

        import_fastmcp()
        import mcp.types  # noqa: F401
    finally:
        sys.path[:] = path
