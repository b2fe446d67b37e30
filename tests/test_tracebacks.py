"""The place in a repository's code that an exception comes from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from osmosis_ai.tracebacks import describe, locate, short_traceback


def module(path: Path, source: str) -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def caught(function: object, *args: object) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011 - whatever it is
        function(*args)
    return info.value


def test_the_deepest_line_of_the_users_code(tmp_path: Path) -> None:
    code = module(
        tmp_path / "tools" / "m.py",
        "import json\n\ndef outer(x):\n    return inner(x)\n\ndef inner(x):\n    return json.loads(x)\n",
    )
    exc = caught(code.outer, "{")
    place = locate(exc, tmp_path)
    assert place == ("tools/m.py", 7, "return json.loads(x)")
    assert str(place) == "tools/m.py:7"
    assert short_traceback(exc, tmp_path).splitlines() == [
        "Traceback (most recent call last, this repository's code only):",
        '  File "tools/m.py", line 4, in outer',
        "    return inner(x)",
        '  File "tools/m.py", line 7, in inner',
        "    return json.loads(x)",
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]


def test_installed_packages_under_the_root_are_not_the_users(tmp_path: Path) -> None:
    package = module(tmp_path / ".venv" / "lib" / "site-packages" / "p.py", "def fail(x):\n    raise ValueError(x)\n")
    code = module(tmp_path / "mine.py", "def use(fail, x):\n    fail(x)\n")
    assert locate(caught(code.use, package.fail, "no"), tmp_path) == ("mine.py", 2, "fail(x)")
    assert locate(caught(package.fail, "no"), tmp_path) is None


def test_no_line_of_the_users_code(tmp_path: Path) -> None:
    exc = caught(json.loads, "{")
    assert locate(exc, tmp_path) is None
    assert short_traceback(exc, tmp_path).startswith("JSONDecodeError: ")


def test_a_syntax_error_is_its_own_place(tmp_path: Path) -> None:
    exc = caught(module, tmp_path / "broken.py", "def f(:\n    pass\n")
    place = locate(exc, tmp_path)
    assert place is not None
    assert place[:2] == ("broken.py", 1)
    assert place.text == "def f(:"
    assert str(tmp_path) not in short_traceback(exc, tmp_path)
    assert short_traceback(exc, tmp_path).splitlines()[-1] == describe(exc)


def test_the_cause_is_looked_for_when_the_exception_itself_is_a_librarys(tmp_path: Path) -> None:
    code = module(tmp_path / "mine.py", "def fail():\n    raise KeyError('k')\n")

    def library() -> None:
        try:
            code.fail()
        except KeyError as exc:
            raise RuntimeError("wrapped") from exc

    assert locate(caught(library), tmp_path) == ("mine.py", 2, "raise KeyError('k')")


def test_a_group_is_looked_into(tmp_path: Path) -> None:
    code = module(tmp_path / "mine.py", "def fail():\n    raise KeyError('k')\n")

    class GroupError(Exception):
        exceptions = (ValueError("elsewhere"), caught(code.fail))

    assert locate(GroupError(), tmp_path) == ("mine.py", 2, "raise KeyError('k')")


def test_a_root_and_a_folder_reached_through_links(tmp_path: Path) -> None:
    real = tmp_path / "real"
    code = module(real / "shared" / "m.py", "def fail():\n    raise KeyError('k')\n")
    (tmp_path / "link").symlink_to(real)
    assert locate(caught(code.fail), tmp_path / "link") == ("shared/m.py", 2, "raise KeyError('k')")


def test_a_deep_recursion_stays_short(tmp_path: Path) -> None:
    code = module(tmp_path / "mine.py", "def again(n):\n    return again(n + 1)\n")
    text = short_traceback(caught(code.again, 0), tmp_path)
    assert len(text.splitlines()) < 30
    assert "more frames …" in text
    assert "RecursionError: maximum recursion depth exceeded" in text


def test_a_group_of_one_is_described_as_that_one() -> None:
    class GroupError(Exception):
        def __init__(self, *exceptions: Exception) -> None:
            super().__init__(f"({len(exceptions)} sub-exceptions)")
            self.exceptions = exceptions

    assert describe(GroupError(GroupError(KeyError("k")))) == "KeyError: 'k'"
    assert describe(GroupError(KeyError("k"), ValueError("v"))) == "GroupError: (2 sub-exceptions)"


def test_an_exception_that_can_not_be_shown() -> None:
    class RudeError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe(RudeError()).startswith("RudeError: <")
    assert describe(ValueError()) == "ValueError"
    assert describe(ValueError("a\ud800")) == "ValueError: a?"
    assert len(describe(ValueError("x" * 10_000))) == 2000
