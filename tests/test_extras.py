"""What is in an extra says which when it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commands import run_osmosis
from repos import write_repo

NEEDED = "pip install 'osmosis-ai[parquet]'"


@pytest.fixture
def _without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make importing it fail, as where it isn't installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)


@pytest.mark.usefixtures("_without_pyarrow")
def test_a_parquet_dataset(repo: Path) -> None:
    (repo / "rows.parquet").write_bytes(b"PAR1")
    done = run_osmosis("eval", "-d", "rows.parquet", cwd=repo)
    assert (done.code, NEEDED in done.stderr) == (2, True), done.stderr


@pytest.mark.usefixtures("_without_pyarrow")
def test_a_parquet_export(repo: Path) -> None:
    assert run_osmosis("eval", "--limit", "1", cwd=repo).code in (0, 1)
    done = run_osmosis("runs", "export", "-o", "run.parquet", cwd=repo)
    assert (done.code, NEEDED in done.stderr) == (2, True), done.stderr
    assert not (repo / "run.parquet").exists()


@pytest.mark.usefixtures("_without_pyarrow")
def test_everything_else_works_without(tmp_path: Path) -> None:
    assert run_osmosis("eval", "--limit", "1", cwd=write_repo(tmp_path / "other")).code in (0, 1)
