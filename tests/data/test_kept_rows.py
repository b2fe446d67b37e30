"""The rows of a run are those that were checked and hashed, whatever happens to the dataset meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from osmosis_ai.data.dataset import Dataset, open_dataset
from osmosis_ai.data.kept_rows import keep_rows
from osmosis_ai.errors import DatasetError
from osmosis_ai.records import Row

COUNT = 50


def write(path: Path, answer: str) -> None:
    rows = [
        {
            "system_prompt": "s",
            "user_prompt": f"What is {number}?",
            "ground_truth": answer,
            "big": 2**70 + number,
            "solution": [{"tool": "add", "arguments": {"a": number}}, "done"],
        }
        for number in range(COUNT)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    path = tmp_path / "rows.jsonl"
    write(path, "right")
    return open_dataset(path)


def test_rows_are_those_of_the_pass_that_hashed_them(dataset: Dataset, tmp_path: Path) -> None:
    before = list(dataset.rows(offset=3, limit=40))
    files = sorted(tmp_path.iterdir())
    summary, kept = keep_rows(dataset, tmp_path, offset=3, limit=40)
    assert sorted(tmp_path.iterdir()) == files
    assert summary == dataset.check(offset=3, limit=40)
    write(dataset.path, "wrong")
    # In any order, and by several readers at once.
    first, second = iter(kept), iter(kept)
    read: list[Row] = []
    for row in first:
        read.append(row)
        assert next(second) == row
    assert read == before
    assert (len(kept), kept[39], kept[0]) == (40, before[39], before[0])
    with pytest.raises(IndexError):
        kept[40]
    kept.close()


def test_a_save_right_after_the_rows_were_read_is_noticed(dataset: Dataset, tmp_path: Path) -> None:
    told: list[int] = []

    def save(read: int, size: int) -> None:
        told.append(read)
        # The file's end is told twice, by the reader and at last.
        if told.count(size) == 2:
            write(dataset.path, "wrong")

    _, kept = keep_rows(dataset, tmp_path, progress=save)
    assert kept.outdated()
    kept.close()


def test_a_dataset_is_outdated_if_its_content_is_another(dataset: Dataset, tmp_path: Path) -> None:
    _, kept = keep_rows(dataset, tmp_path)
    assert not kept.outdated()
    os.utime(dataset.path, (1, 1))
    assert not kept.outdated()
    write(dataset.path, "wrong")
    assert kept.outdated()
    write(dataset.path, "right")
    assert not kept.outdated()
    dataset.path.unlink()
    assert kept.outdated()
    kept.close()


def test_rows_that_cannot_be_kept_are_an_error_that_says_where(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"rows\.jsonl: its rows can't be kept in .*gone .*; .*--store DIR"):
        keep_rows(dataset, tmp_path / "gone")
