"""The files that a function consists of, and when its scores are stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from osmosis_ai.code_hashes import file_hash, function_code
from osmosis_ai.discovery.closure import module_files
from osmosis_ai.records import FunctionRef

FILES = {
    "reward_fn/exact.py": "from shared.numbers import parse\nfrom . import forms\n",
    "reward_fn/__init__.py": "",
    "reward_fn/forms.py": "def plain():\n    import late\n",
    "reward_fn/style.py": "import importlib\nimportlib.import_module('reward_fn.plugin')\n",
    "reward_fn/plugin.py": "",
    "reward_fn/words.txt": "one",
    "reward_rubric/tone.py": "import helper, shared.numbers\nfrom reward_fn.forms import plain\n",
    "reward_rubric/helper.py": "from .. import too.far\nbroken(:\n",
    "shared/__init__.py": "",
    "shared/numbers.py": "from .deep import tables\nfrom ....above import nothing\n",
    "shared/deep/__init__.py": "",
    "shared/deep/tables.py": "import shared.numbers, json\n",
    "late.py": "",
    "unrelated.py": "",
}


def write(root: Path) -> None:
    for name, source in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source, encoding="utf-8")


def test_a_module_is_made_of_what_it_imports(tmp_path: Path) -> None:
    write(tmp_path)
    found = {path.relative_to(tmp_path.resolve()).as_posix() for path in module_files(tmp_path / "late.py", tmp_path)}
    assert found == {"late.py"}
    files = module_files(tmp_path / "reward_fn" / "exact.py", tmp_path)
    assert {path.relative_to(tmp_path.resolve()).as_posix() for path in files} == {
        "reward_fn/__init__.py",
        "reward_fn/exact.py",
        "reward_fn/forms.py",
        "shared/__init__.py",
        "shared/numbers.py",
        "shared/deep/__init__.py",
        "shared/deep/tables.py",
        "late.py",
    }
    assert module_files(tmp_path / "nothing.py", tmp_path) == {tmp_path.resolve() / "nothing.py"}
    assert module_files(Path("/elsewhere/x.py"), tmp_path) == set()


def test_a_change_makes_the_scores_of_the_functions_it_reaches_out_of_date(tmp_path: Path) -> None:
    write(tmp_path)

    def ref(name: str, kind: str, file: str | None) -> FunctionRef:
        return FunctionRef(name, name, "f", str(tmp_path), kind=kind, file=file)  # type: ignore[arg-type]

    functions = [
        ref("exact", "reward", "reward_fn/exact.py"),
        ref("style", "reward", "reward_fn/style.py"),
        ref("tone", "rubric", "reward_rubric/tone.py"),
        ref("anywhere", "reward", None),
        FunctionRef(
            "rubrics.yaml#a", "", "a", str(tmp_path), kind="rubric", file="rubrics.yaml", content="what a says"
        ),
    ]
    loaded = ["reward_fn/exact.py", "reward_fn/style.py", "reward_fn/plugin.py", "reward_fn/words.txt"]
    loaded += ["reward_rubric/tone.py", "shared/numbers.py", "unrelated.py"]

    def code() -> dict[str, str]:
        return function_code(functions, {name: file_hash(tmp_path / name) for name in loaded}, tmp_path)

    def changed_by(name: str) -> set[str]:
        before = code()
        (tmp_path / name).write_text(f"{FILES[name]}# changed\n", encoding="utf-8")
        return {function for function, now in code().items() if now != before[function]}

    assert changed_by("reward_fn/exact.py") == {"exact", "anywhere"}
    assert changed_by("reward_rubric/tone.py") == {"tone", "anywhere"}
    assert changed_by("shared/deep/tables.py") == {"exact", "tone"}
    assert changed_by("shared/numbers.py") == {"exact", "tone", "anywhere"}
    # Imported by a name worked out at run time, or read: it may concern every reward function, but no rubric.
    assert changed_by("reward_fn/plugin.py") == {"exact", "style", "anywhere"}
    assert changed_by("reward_fn/words.txt") == {"exact", "style", "anywhere"}
    assert changed_by("unrelated.py") == {"exact", "style", "tone", "anywhere"}
    # Not loaded yet, but imported by a function when it runs.
    assert changed_by("late.py") == {"exact", "tone"}


def test_imports_of_the_fork_server_are_no_sources(tmp_path: Path) -> None:
    for name in ("before", "after", "again"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    code = """
import sys
from pathlib import Path
from osmosis_ai.code_hashes import imported_sources, leave_out_imported
import again, before
print(sorted(imported_sources(Path.cwd())))
leave_out_imported()
import after
del sys.modules["again"]
import again
print(sorted(imported_sources(Path.cwd())))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['again.py', 'before.py']", "['after.py', 'again.py']"]
