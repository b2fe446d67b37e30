"""Functions and tools read from source, and the names that stand for them."""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from osmosis_ai.discovery.repository import find_repository
from osmosis_ai.discovery.scan import (
    MAX_FILE_BYTES,
    Component,
    Problem,
    ScanResult,
    discovered_refs,
    resolve_function,
    scan_functions,
    scan_tools,
)
from osmosis_ai.errors import FunctionError
from osmosis_ai.records import FunctionRef

REWARD = "from osmosis_ai import osmosis_reward\n@osmosis_reward\ndef score(solution_str, ground_truth): ...\n"


def write(path: Path, source: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source if isinstance(source, bytes) else textwrap.dedent(source).encode())
    return path


def names(result: ScanResult) -> list[str]:
    assert result.problems == []
    return [f"{component.module}:{component.name}" for component in result.components]


# Functions


def test_a_function_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    write(
        tmp_path / "reward_fn" / "deep" / "exact.py",
        '''
        """Needs a package that isn't installed."""
        import no_such_package
        from osmosis_ai import osmosis_reward

        @no_such_package.traced
        @osmosis_reward
        async def exact(solution_str: str, /, ground_truth, *rest, extra_info=None, **kwargs) -> float:
            return 1.0
        ''',
    )
    assert scan_functions(tmp_path / "reward_fn", tmp_path, "reward") == ScanResult(
        [
            Component(
                kind="reward",
                name="exact",
                file="reward_fn/deep/exact.py",
                line=8,
                module="reward_fn.deep.exact",
                is_async=True,
                parameters=("solution_str", "ground_truth", "*rest", "extra_info", "**kwargs"),
            )
        ],
        [],
    )


@pytest.mark.parametrize(
    "source",
    [
        "from osmosis_ai import osmosis_reward\n@osmosis_reward\ndef f(): ...",
        "from osmosis_ai import osmosis_reward\n@osmosis_reward()\ndef f(): ...",
        "from osmosis_ai import osmosis_reward as r\n@r\ndef f(): ...",
        "from osmosis_ai import osmosis_reward as r\n@r()\ndef f(): ...",
        "import osmosis_ai\n@osmosis_ai.osmosis_reward\ndef f(): ...",
        "import osmosis_ai as o\n@o.osmosis_reward()\ndef f(): ...",
        "from osmosis_ai.reward_fn.decorator import osmosis_reward\n@osmosis_reward\ndef f(): ...",
        "from osmosis_ai import *\n@osmosis_reward\ndef f(): ...",
        "from .shim import osmosis_reward as r\n@r\ndef f(): ...",
        "try:\n from osmosis_ai import osmosis_reward as r\nexcept ImportError:\n raise\n@r\nasync def f(): ...",
        "if True:\n @osmosis_reward\n def f(): ...",
        "try:\n pass\nexcept E:\n pass\nelse:\n @osmosis_reward\n def f(): ...",
        "try:\n pass\nexcept E:\n @osmosis_reward\n def f(): ...",
        "if __name__ == '__main__':\n pass\nelse:\n @osmosis_reward\n def f(): ...",
        "with a:\n for b in c:\n  @osmosis_reward\n  def f(): ...",
        "match a:\n case 1:\n  @osmosis_reward\n  def f(): ...",
    ],
)
def test_recognised(tmp_path: Path, source: str) -> None:
    write(tmp_path / "reward_fn" / "m.py", source)
    assert names(scan_functions(tmp_path / "reward_fn", tmp_path, "reward")) == ["reward_fn.m:f"]
    assert names(scan_functions(tmp_path / "reward_fn", tmp_path, "rubric")) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(): ...",
        "def g():\n @osmosis_reward\n def f(): ...",
        "class C:\n @osmosis_reward\n def f(self): ...",
        "@osmosis_reward\nclass f: ...",
        "from other import thing as osmosis_reward\n@osmosis_reward\ndef f(): ...",
        "from osmosis_ai import osmosis_rubric\n@osmosis_rubric\ndef f(): ...",
        "@decorators['osmosis_reward']\ndef f(): ...",
        "@osmosis_reward.other\ndef f(): ...",
        "if __name__ == '__main__':\n @osmosis_reward\n def f(): ...",
        "import typing\nif typing.TYPE_CHECKING:\n @osmosis_reward\n def f(): ...",
        "",
    ],
)
def test_not_recognised(tmp_path: Path, source: str) -> None:
    write(tmp_path / "reward_fn" / "m.py", source)
    assert names(scan_functions(tmp_path / "reward_fn", tmp_path, "reward")) == []


def test_rubrics(tmp_path: Path) -> None:
    write(tmp_path / "reward_rubric" / "m.py", "import osmosis_ai as o\n@o.osmosis_rubric\ndef judge(): ...")
    (component,) = scan_functions(tmp_path / "reward_rubric", tmp_path, "rubric").components
    assert (component.kind, component.name) == ("rubric", "judge")


def test_a_later_definition_replaces_an_earlier_one(tmp_path: Path) -> None:
    write(tmp_path / "reward_fn" / "m.py", "@osmosis_reward\ndef f(): ...\n@osmosis_reward\ndef f(): ...\n")
    (component,) = scan_functions(tmp_path / "reward_fn", tmp_path, "reward").components
    assert component.line == 4


def test_modules_are_named_from_the_root_in_order(tmp_path: Path) -> None:
    for file in ("z.py", "__init__.py", "test_it.py", "sub/__init__.py", "sub/a.py", "exact-match.v2.py"):
        write(tmp_path / "reward_fn" / file, REWARD)
    assert names(scan_functions(tmp_path / "reward_fn", tmp_path, "reward")) == [
        "reward_fn:score",
        "reward_fn.exact-match.v2:score",
        "reward_fn.sub:score",
        "reward_fn.sub.a:score",
        "reward_fn.test_it:score",
        "reward_fn.z:score",
    ]


def test_what_is_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "reward_fn"
    for file in (".hidden.py", ".git/a.py", "__pycache__/a.py", "env/lib/a.py", "site-packages/a.py", "notes.txt"):
        write(folder / file, REWARD)
    (folder / "env" / "pyvenv.cfg").touch()
    assert names(scan_functions(folder, tmp_path, "reward")) == []
    assert names(scan_functions(tmp_path / "none", tmp_path, "reward")) == []
    assert names(scan_functions(folder / "notes.txt", tmp_path, "reward")) == []
    assert names(scan_functions(write(tmp_path / "file.py", REWARD), tmp_path, "reward")) == []


# Problems


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("x = 1\ndef f(:\n", 2, "SyntaxError: "),
        ("if a:\nb\n", 2, "IndentationError: expected an indented block"),
        (b"x = 1\n# caf\xe9\n", 2, "not UTF-8 (byte 0xe9)"),
        (b"# coding: no-such-codec\nx = '\xe9'\n", 2, "not UTF-8 (byte 0xe9)"),
        (b"# coding: rot13\nx = '\xe9'\n", 2, "not UTF-8 (byte 0xe9)"),
        ("-" * 100_000 + "1", None, "can't be parsed: nested too deeply"),
        (b"x" * (MAX_FILE_BYTES + 1), None, "larger than 5 MB"),
    ],
)
def test_a_bad_file_is_a_problem_and_the_rest_goes_on(
    tmp_path: Path, source: str | bytes, line: int | None, message: str
) -> None:
    write(tmp_path / "reward_fn" / "bad.py", source)
    write(tmp_path / "reward_fn" / "good.py", REWARD)
    result = scan_functions(tmp_path / "reward_fn", tmp_path, "reward")
    (problem,) = result.problems
    assert (problem.file, problem.line) == ("reward_fn/bad.py", line)
    assert message in problem.message
    assert [component.file for component in result.components] == ["reward_fn/good.py"]


def test_null_bytes_are_a_problem(tmp_path: Path) -> None:
    write(tmp_path / "reward_fn" / "bad.py", "x = 1\n\0")
    (problem,) = scan_functions(tmp_path / "reward_fn", tmp_path, "reward").problems
    assert "source code string cannot contain null bytes" in problem.message


@pytest.mark.parametrize("source", ["+".join("1" * 20_000), "a" + ".b" * 20_000, "a" + "()" * 20_000, "(" * 20_000])
def test_hostile_source_never_raises(tmp_path: Path, source: str) -> None:
    # Python 3.10 parses some of these, later versions refuse them.
    write(tmp_path / "mcp" / "bad.py", f"@{source}\ndef f(): ...\nx = {source}\n")
    write(tmp_path / "mcp" / "good.py", REWARD + "@mcp.tool\ndef add(): ...")
    assert "good" in scan_functions(tmp_path / "mcp", tmp_path, "reward").components[-1].module
    assert "good" in scan_tools(tmp_path / "mcp", tmp_path).components[-1].module


def test_a_declared_encoding_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    write(tmp_path / "reward_fn" / "latin.py", b"# coding: latin-1\nx = '\xe9'\n" + REWARD.encode())
    write(tmp_path / "reward_fn" / "mark.py", b"\xef\xbb\xbf" + REWARD.replace("\n", "\r\n").encode())
    assert names(scan_functions(tmp_path / "reward_fn", tmp_path, "reward")) == [
        "reward_fn.latin:score",
        "reward_fn.mark:score",
    ]


def test_no_warning_escapes(tmp_path: Path) -> None:
    write(tmp_path / "reward_fn" / "m.py", REWARD + "x = '\\d'\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(scan_functions(tmp_path / "reward_fn", tmp_path, "reward")) == ["reward_fn.m:score"]


def test_a_folder_with_a_dot_in_its_name(tmp_path: Path) -> None:
    write(tmp_path / "reward_fn" / "v1.0" / "m.py", REWARD)
    write(tmp_path / "reward_fn" / "v1.0" / "other.py", "x = 1")
    result = scan_functions(tmp_path / "reward_fn", tmp_path, "reward")
    message = "can't be imported from the folder v1.0: a folder's name can't have a dot in it"
    assert result == ScanResult([], [Problem("reward_fn/v1.0/m.py", 3, message)])


def test_links(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    outside = write(tmp_path / "outside" / "m.py", REWARD)
    inside = write(root / "lib" / "m.py", REWARD)
    folder = root / "reward_fn"
    folder.mkdir()
    (folder / "a.py").symlink_to(outside)
    (folder / "b").symlink_to(outside.parent)
    (folder / "c").symlink_to(inside.parent)
    (folder / "d.py").symlink_to("nowhere")
    (folder / "e").symlink_to(folder)
    (folder / "f.py").symlink_to("f.py")
    result = scan_functions(folder, root, "reward")
    assert [component.module for component in result.components] == ["reward_fn.c.m"]
    problems = {problem.file: problem.message for problem in result.problems}
    assert problems.keys() == {"reward_fn/a.py", "reward_fn/b", "reward_fn/d.py", "reward_fn/f.py"}
    assert problems["reward_fn/a.py"] == problems["reward_fn/b"] == "a link to a place outside the repository"
    assert problems["reward_fn/d.py"] == "a link to something that doesn't exist"
    # A root that is itself reached through a link is no place outside.
    (tmp_path / "link").symlink_to(root)
    assert len(scan_functions(tmp_path / "link" / "reward_fn", tmp_path / "link", "reward").components) == 1


def test_special_files_and_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "reward_fn"
    folder.mkdir()
    os.mkfifo(folder / "pipe.py")
    write(folder / "closed.py", REWARD).chmod(0)
    problems = {problem.file: problem.message for problem in scan_functions(folder, tmp_path, "reward").problems}
    assert problems["reward_fn/pipe.py"] == "not a regular file"
    # The superuser may read anything.
    if not os.access(folder / "closed.py", os.R_OK):
        assert problems["reward_fn/closed.py"] == "can't be read: Permission denied"


@settings(max_examples=200, deadline=None)
@given(source=st.binary(max_size=80) | st.text(max_size=80).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(source=b"# coding: \x00")
@example(source=b"\xff# coding: idna")
def test_any_bytes_give_components_or_problems(tmp_path_factory: pytest.TempPathFactory, source: bytes) -> None:
    root = tmp_path_factory.mktemp("repo")
    write(root / "mcp" / "m.py", source)
    assert len(scan_functions(root / "mcp", root, "reward").problems) <= 1
    assert len(scan_tools(root / "mcp", root).problems) <= 1


# Tools


def test_tools(tmp_path: Path) -> None:
    write(
        tmp_path / "mcp" / "tools" / "calc.py",
        """
        from fastmcp.tools import tool as standalone
        from server import mcp

        @mcp.tool
        def plain(a: int, b: int = 1) -> int: ...

        @mcp.tool()
        async def called(): ...

        @app.server.tool(name="by_keyword", description="d")
        def f(): ...

        @mcp.tool("by_position")
        def g(): ...

        @mcp.tool(name=NAME)
        def computed(): ...

        def register(server):
            @server.tool
            def nested(): ...

        @standalone
        def alone(): ...

        @tool
        def not_one(): ...

        @mcp.resource("x://y")
        def nor_this(): ...

        class Tools:
            @mcp.tool
            def method(self): ...
        """,
    )
    result = scan_tools(tmp_path / "mcp", tmp_path)
    assert result.problems == []
    assert [component.name for component in result.components] == [
        "plain",
        "called",
        "by_keyword",
        "by_position",
        "computed",
        "nested",
        "alone",
        "method",
    ]
    assert result.components[0] == Component(
        "tool", "plain", "mcp/tools/calc.py", 6, "mcp.tools.calc", parameters=("a", "b")
    )
    assert result.components[1].is_async


# Names that stand for functions


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    write(root / "mcp" / "main.py", "")
    write(
        root / "reward_fn" / "compute_reward.py",
        """
        import math
        from json import loads as read
        from osmosis_ai import osmosis_reward

        @osmosis_reward
        def numbers_match_reward(solution_str, ground_truth): ...

        def helper(messages): ...

        made = helper
        declared: object
        a, (b, *c) = 1, (2, 3)
        if made:
            with open("x") as opened:
                late = 1
        class Scorer:
            def method(self): ...
        """,
    )
    write(root / "reward_fn" / "other.py", REWARD)
    write(root / "reward_fn" / "sub" / "other.py", REWARD)
    write(root / "rewards.py", "def compute_reward(messages): ...\n")
    return root


def resolve(spec: str, repo: Path, cwd: Path | None = None) -> FunctionRef:
    components = scan_functions(repo / "reward_fn", repo, "reward").components
    return resolve_function(spec, components, repo, cwd or repo)


def failure(spec: str, repo: Path, cwd: Path | None = None) -> str:
    with pytest.raises(FunctionError) as caught:
        resolve(spec, repo, cwd)
    return str(caught.value)


def test_discovered_refs(repo: Path) -> None:
    write(repo / "reward_fn" / "broken.py", "def")
    refs, problems = discovered_refs(find_repository("mcp", repo))
    assert [ref.name for ref in refs] == [
        "reward_fn.compute_reward:numbers_match_reward",
        "reward_fn.other:score",
        "reward_fn.sub.other:score",
    ]
    assert refs[0] == FunctionRef(
        name="reward_fn.compute_reward:numbers_match_reward",
        module="reward_fn.compute_reward",
        attribute="numbers_match_reward",
        root=str(repo),
        file="reward_fn/compute_reward.py",
        line=7,
    )
    assert [problem.file for problem in problems] == ["reward_fn/broken.py"]
    assert msgspec.json.decode(msgspec.json.encode(problems), type=list[Problem]) == problems
    assert discovered_refs(find_repository(None, repo / "mcp")) == (refs, problems)


def test_module_and_function(repo: Path) -> None:
    discovered, _ = discovered_refs(find_repository("mcp", repo))
    assert resolve("reward_fn.compute_reward:numbers_match_reward", repo) == discovered[0]
    assert resolve("numbers_match_reward", repo) == discovered[0]
    assert resolve("rewards:compute_reward", repo) == FunctionRef(
        "rewards:compute_reward", "rewards", "compute_reward", str(repo), file="rewards.py", line=1
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("helper", 9),
        ("made", 11),
        ("a", 13),
        ("b", 13),
        ("c", 13),
        ("opened", 15),
        ("late", 16),
        ("Scorer", 17),
        ("math", 2),
        ("read", 3),
    ],
)
def test_what_is_not_decorated_can_be_named_too(repo: Path, name: str, line: int) -> None:
    ref = resolve(f"reward_fn.compute_reward:{name}", repo)
    assert (ref.file, ref.line) == ("reward_fn/compute_reward.py", line)


@pytest.mark.parametrize(
    "source",
    [
        "from helpers import *",
        "def __getattr__(name): ...",
        "globals()['f'] = 1",
        "exec('f = 1')",
        "def setup():\n    global f\n    f = 1\nsetup()",
        "match [1]:\n    case [f]: ...",
    ],
)
def test_a_name_that_can_not_be_told_from_the_source_is_left_to_the_import(repo: Path, source: str) -> None:
    write(repo / "dynamic.py", source)
    assert resolve("dynamic:f", repo).file == "dynamic.py"


def test_the_root_comes_before_the_working_directory(repo: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "work"
    write(cwd / "rewards.py", "def elsewhere(messages): ...\n")
    write(cwd / "only_here" / "__init__.py", "def f(messages): ...\n")
    write(cwd / "only_here" / "inner.py", "async def f(messages): ...\n")
    assert resolve("rewards:compute_reward", repo, cwd).root == str(repo)
    assert "there is no elsewhere in rewards.py" in failure("rewards:elsewhere", repo, cwd)
    assert resolve("only_here:f", repo, cwd) == FunctionRef(
        "only_here:f", "only_here", "f", str(cwd), file="only_here/__init__.py", line=1
    )
    assert resolve("only_here.inner:f", repo, cwd).file == "only_here/inner.py"
    assert f"there is no module nowhere in {repo} or {cwd}" in failure("nowhere:f", repo, cwd)


def test_python_prefers_a_package_to_a_module(repo: Path) -> None:
    write(repo / "rewards" / "__init__.py", "def packaged(messages): ...\n")
    assert resolve("rewards:packaged", repo).file == "rewards/__init__.py"


def test_a_new_file_is_seen_at_once(repo: Path) -> None:
    failure("fresh:f", repo)
    write(repo / "fresh.py", "def f(messages): ...\n")
    assert resolve("fresh:f", repo).line == 1


def test_rubric_functions_are_known_as_such(repo: Path) -> None:
    write(repo / "reward_rubric" / "m.py", "from osmosis_ai import osmosis_rubric\n@osmosis_rubric\ndef judge(): ...")
    components = scan_functions(repo / "reward_rubric", repo, "rubric").components
    assert resolve_function("judge", components, repo, repo).kind == "rubric"
    assert resolve("reward_rubric.m:judge", repo).kind == "rubric"


def test_files_whose_names_no_import_statement_could_hold(repo: Path) -> None:
    write(repo / "reward_fn" / "exact-match.v2.py", REWARD)
    assert resolve("reward_fn.exact-match.v2:score", repo).file == "reward_fn/exact-match.v2.py"


def test_installed_packages(repo: Path) -> None:
    assert resolve("msgspec.json:decode", repo) == FunctionRef(
        "msgspec.json:decode", "msgspec.json", "decode", str(repo)
    )
    # The repository's mcp folder is no package, so the installed one is meant.
    assert resolve("mcp.types:Tool", repo).file is None
    # Its own package hides an installed one of the same name.
    write(repo / "msgspec" / "__init__.py", "")
    assert "there is no module msgspec.json" in failure("msgspec.json:decode", repo)


def test_nothing_is_imported(repo: Path) -> None:
    write(repo / "reward_fn" / "boom.py", "raise SystemExit\ndef f(messages): ...\n")
    write(repo / "pack" / "__init__.py", "raise SystemExit\n")
    write(repo / "pack" / "inner.py", "def f(messages): ...\n")
    before = set(sys.modules)
    assert resolve("reward_fn.boom:f", repo).line == 2
    assert resolve("pack.inner:f", repo).line == 1
    resolve("msgspec.json:decode", repo)
    assert not {
        name for name in set(sys.modules) - before if name.partition(".")[0] in ("reward_fn", "pack", "msgspec")
    }


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("", ["a function's name is empty"]),
        (":", ["':' names no function; write MODULE:FUNCTION"]),
        ("rewards:", ["'rewards:' names no function"]),
        (":f", ["':f' names no function"]),
        ("rewards:f:g", ["names no function"]),
        ("rewards:a.b", ["names no function"]),
        (".rewards:f", ["names no function"]),
        ("a..b:f", ["names no function"]),
        ("/:f", ["names no function"]),
        ("./reward_fn/other.py:score", ["the module is written with dots: reward_fn.other:score"]),
        ("rewards.py:compute_reward", ["the module is written with dots: rewards:compute_reward"]),
        (
            "reward_fn.compute_rewards:numbers_match_reward",
            [
                "there is no module reward_fn.compute_rewards in ",
                "; did you mean reward_fn.compute_reward?",
                "Discovered: reward_fn.compute_reward:numbers_match_reward, reward_fn.other:score,",
            ],
        ),
        ("no_such_module:f", ["there is no module no_such_module in "]),
        ("rewards.sub:f", ["there is no module rewards.sub in "]),
        ("reward_fn:f", ["reward_fn is a folder; name the file in it with the function. Discovered: "]),
        (
            "rewards:compute_rewrad",
            ["no compute_rewrad in rewards.py; did you mean compute_reward? Its functions: compute_reward"],
        ),
        ("reward_fn.compute_reward:declared", ["Its functions: numbers_match_reward, helper"]),
        ("reward_fn.compute_reward:method", ["there is no method in reward_fn/compute_reward.py"]),
        ("score", ["2 functions have this name: reward_fn.other:score, reward_fn.sub.other:score"]),
        ("number_match_reward", ["no discovered function", "did you mean numbers_match_reward? Discovered: reward_fn"]),
        ("nul\0:f", ["there is no module nul"]),
        ("x" * 5000 + ":f", ["there is no module xxx"]),
    ],
)
def test_what_can_not_be_resolved(repo: Path, spec: str, parts: list[str]) -> None:
    message = failure(spec, repo)
    assert [part for part in parts if part not in message] == [], message


def test_a_module_that_can_not_be_parsed(repo: Path) -> None:
    write(repo / "broken.py", "x = 1\ndef f(:\n")
    write(repo / "empty.py", "")
    assert "broken.py:2: SyntaxError" in failure("broken:f", repo)
    assert failure("empty:f", repo) == "empty:f: there is no f in empty.py. Its functions: none"


def test_a_repository_without_functions(tmp_path: Path) -> None:
    for spec in ("f", "m:f"):
        with pytest.raises(FunctionError, match="No functions were discovered in the repository"):
            resolve_function(spec, [], tmp_path, tmp_path)


def test_a_long_list_of_functions_is_cut(tmp_path: Path) -> None:
    components = [Component("reward", f"f{n}", "m.py", n, "m") for n in range(25)]
    with pytest.raises(FunctionError, match=r"m:f19 and 5 more"):
        resolve_function("g", components, tmp_path, tmp_path)


@settings(max_examples=200, deadline=None)
@given(
    spec=st.text(max_size=20) | st.lists(st.sampled_from(["a", ".", ":", "/", "os", "json"]), max_size=6).map("".join)
)
def test_any_text_gives_a_function_or_an_error(tmp_path_factory: pytest.TempPathFactory, spec: str) -> None:
    root = tmp_path_factory.getbasetemp()
    try:
        ref = resolve_function(spec, [], root, root)
    except FunctionError:
        return
    assert ref.name == f"{ref.module}:{ref.attribute}"
