"""Training runs in the viewer, over records and runs as `osmosis train run` writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from viewed import HOSTILE, Elements, made, viewer, write_run, write_training

from osmosis_ai.training.record import LeftOutRow, MetricsLine, SavedCheckpoint
from osmosis_ai.viewer.stores import Stores


def steps(*rewards: float) -> list[MetricsLine]:
    """The figures of steps from 1 on: of their rollouts, and of the trainer, which reports the reward, too."""
    lines = []
    for step, reward in enumerate(rewards, 1):
        lines.append(MetricsLine(step, "rollouts", {"groups_with_variance": 0.75, "turns": 2.0, "reward": reward}, 1.0))
        lines.append(MetricsLine(step, "trainer", {"loss": -0.25 / step, "reward": reward, "entropy": 1.5}, 1.0))
    return lines


def evaluation(step: int, reward: float) -> MetricsLine:
    return MetricsLine(step, "evaluation", {"reward": reward, "seconds": 2.0}, 1.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two runs, and an interrupted training run of two steps with an evaluation."""
    root = tmp_path_factory.mktemp("training") / "repo"
    root.mkdir()
    for _ in "ab":
        write_run(root, [made(0)])
    for name in ("first.step-00001", "first.step-00002", "first.eval-00002"):
        write_run(root, [made(0)], name=name)
    write_training(
        root,
        lines=[*steps(0.25, 0.5), evaluation(2, 0.4)],
        step=2,
        reward=0.5,
        left_out=[LeftOutRow(7, "its prompt is too long")],
        checkpoints=[SavedCheckpoint(2, "/store/checkpoint-2", "lora", 1.7e9)],
    )
    return root


def page(root: Path, path: str, status: int = 200) -> Elements:
    with viewer(root) as client:
        answer = client.get(path)
    assert answer.status_code == status, answer.text
    return Elements(answer.text)


def labels(found: Elements) -> list[str]:
    return [str(attributes.get("aria-label")) for tag, attributes in found.found if tag == "svg"]


def listed(root: Path, path: str) -> list[str]:
    """The names of the runs that a list shows, without the unnamed ones."""
    return re.findall(r"\w+\.(?:step|eval)-\d+", page(root, path).text)


def test_a_training_run_shows_its_state_and_its_figures(root: Path) -> None:
    found = page(root, "/training/repo/first")
    # The record says that it is running, and its process is gone.
    for text in ("interrupted", "2 of 20", "/models/qwen", "/data/rows.jsonl", "trl", "/store/checkpoint-2"):
        assert text in found.text
    assert "its prompt is too long" in found.text
    assert labels(found) == [
        "reward from step 1 to 2: 0.25 at first, 0.5 at last",
        "reward on held-out rows from step 2 to 2: 0.4 at first, 0.4 at last",
        "share of groups with variance from step 1 to 2: 0.75 at first, 0.75 at last",
        "loss from step 1 to 2: -0.25 at first, -0.125 at last",
        "turns from step 1 to 2: 2 at first, 2 at last",
        "entropy from step 1 to 2: 1.5 at first, 1.5 at last",
        "held-out seconds from step 2 to 2: 2 at first, 2 at last",
    ]


def test_points_and_the_table_lead_to_the_runs_of_steps_and_back(root: Path) -> None:
    found = page(root, "/training/repo/first")
    links = [f"/runs/repo/first.{run}" for run in ("step-00001", "step-00002", "eval-00002")]
    # Once in the charts, and once in the table, whose last step comes first.
    assert found.links("/runs/repo/") == [*links, links[1], links[2], links[0]]
    for link in links:
        assert page(root, link).links("/training/") == ["/training/repo/first"]


def test_a_training_run_without_a_step_says_so(tmp_path: Path) -> None:
    write_training(tmp_path)
    assert "No step is finished yet" in page(tmp_path, f"/training/{tmp_path.name}/first").text


def test_the_runs_of_a_training_run_are_listed_under_its_name(root: Path) -> None:
    found = page(root, "/")
    assert listed(root, "/") == []
    assert "2 runs" in found.text
    assert found.links("/training/") == ["/training/repo/first"]
    assert found.links("/?training=") == ["/?training=first"]
    assert listed(root, "/?training=first") == ["first.eval-00002", "first.step-00002", "first.step-00001"]
    assert listed(root, "/?training=firs") == []


def test_many_steps_leave_the_place_of_other_runs(tmp_path: Path) -> None:
    other = write_run(tmp_path, [made(0)], name="firstborn")
    step = write_run(tmp_path, [made(0)], name="first.step-00001")
    (repository,) = Stores([(tmp_path, tmp_path / ".osmosis")])
    # Without a record it is a run like any other.
    assert [run.id for run in repository.listed_runs(1)] == [step]
    write_training(tmp_path)
    assert [run.id for run in repository.listed_runs(1)] == [other]
    assert [run.id for run in repository.listed_runs(5, "first")] == [step]


def test_a_step_is_compared_with_steps_and_another_run_with_others(root: Path) -> None:
    def choices(path: str) -> list[str]:
        values = [str(attributes.get("value")) for tag, attributes in page(root, path).found if tag == "option"]
        return [value for value in values if value.startswith("/compare/")]

    assert len(choices("/runs/repo/first.step-00001")) == 2
    plain = page(root, "/").links("/runs/repo/")[0]
    assert len(choices(plain)) == 1


def test_every_change_of_a_record_is_a_change_of_the_store(tmp_path: Path) -> None:
    stores = Stores([(tmp_path, tmp_path / ".osmosis")])
    seen = [stores.version()]
    record = write_training(tmp_path)
    with record.locked():
        seen.append(stores.version())
        record.add(evaluation(1, 0.5))
        seen.append(stores.version())
        record.write(record.read())
        seen.append(stores.version())
        assert stores.version() == seen[-1]
    # Its process has ended without a word.
    seen.append(stores.version())
    assert len(set(seen)) == len(seen)
    stores.close()


@pytest.mark.parametrize(
    "name",
    ["none", "..", "%2e%2e", ".", "%00", "..%2Fother", "%2Ftmp", "linked", "x" * 3000, "%ff", "first%0A"],
)
def test_names_lead_only_to_training_runs_of_the_store(tmp_path: Path, name: str) -> None:
    write_training(tmp_path)
    other = tmp_path / "other"
    write_training(other)
    (tmp_path / ".osmosis/other").symlink_to(other / ".osmosis/training/first")
    (tmp_path / ".osmosis/training/linked").symlink_to(other / ".osmosis/training/first")
    assert "interrupted" not in page(tmp_path, f"/training/{tmp_path.name}/{name}", 404).text


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_of_a_training_run_are_escaped(tmp_path: Path, text: str) -> None:
    # Files hold neither a slash nor a NUL in their names, JSON no lone surrogate.
    text = text.encode("utf-8", "replace").decode()
    name = re.sub(r"[/\x00]", "~", text)
    lines = [MetricsLine(1, kind, {text: 1.0, "reward": 0.5}, 1.0) for kind in ("rollouts", "trainer", "evaluation")]
    changes = {"model": text, "dataset": text, "config": text, "trainer": text, "error": text}
    checkpoints = [SavedCheckpoint(1, text, "full", 1.7e9)]
    write_training(tmp_path, name, lines, left_out=[LeftOutRow(0, text)], checkpoints=checkpoints, **changes)
    write_run(tmp_path, [made(0)], name=f"{name}.step-00001")
    (path,) = page(tmp_path, "/").links("/training/")
    step = page(tmp_path, path).links("/runs/")[0]
    (shown,) = page(tmp_path, "/").links("/?training=")
    for url in ("/", path, step, shown):
        with viewer(tmp_path) as client:
            answer = client.get(url)
        assert answer.status_code == 200
        found = Elements(answer.text)
        assert not [key for _, attributes in found.found for key in attributes if key.startswith("on")]
        assert {tag for tag, _ in found.found}.isdisjoint({"img", "b", "style", "iframe"})
        assert all(str(attributes.get("href", "/")).startswith(("/", "#", "data:,")) for _, attributes in found.found)
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", answer.text)
    assert page(tmp_path, shown).text.count(".step-00001") == 1


def test_a_folder_whose_name_is_not_utf8_is_listed(tmp_path: Path) -> None:
    write_training(tmp_path).folder.rename(tmp_path / ".osmosis/training" / "bad\udcff")
    assert "bad\\udcff" in page(tmp_path, "/").text


@pytest.mark.parametrize(
    ("values", "charts"),
    [((1e308, -1e308), 3), ((1.7e308, 1.7e308), 3), ((5e-324, 5e-324), 4), ((0.0, 5e-324), 4), ((-3.0, -3.0), 4)],
)
def test_numbers_that_no_chart_can_show_are_in_the_table(tmp_path: Path, values: Sequence[float], charts: int) -> None:
    write_training(tmp_path, lines=steps(*values))
    found = page(tmp_path, f"/training/{tmp_path.name}/first")
    assert len(labels(found)) == charts + 1
    assert ("no chart of such numbers" in found.text) == (charts == 3)
    assert f"/runs/{tmp_path.name}/first.step-00002" in found.links("/runs/")


def test_thousands_of_steps_are_thinned_and_paged(tmp_path: Path) -> None:
    write_training(tmp_path, lines=steps(*(step % 10 / 10 for step in range(1000))))
    found = page(tmp_path, f"/training/{tmp_path.name}/first")
    assert "mean of steps 1 to 4: 0.15" in found.text
    assert len([1 for tag, _ in found.found if tag == "circle"]) <= 5 * 300
    assert len([1 for tag, _ in found.found if tag == "tr"]) == 51
    (earlier,) = found.links(f"/training/{tmp_path.name}/first?offset")
    assert f"/runs/{tmp_path.name}/first.step-00950" in page(tmp_path, earlier).links("/runs/")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", b"{}\n"),
        ("metrics.jsonl", b'{"step": 1, "kind": "rollouts", "metrics": {"reward": 1e400}, "time": 1}\n'),
        ("run.json", b"{"),
        ("run.json", b'{"created_at": 1e300}'),
    ],
)
def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path, file: str, content: bytes) -> None:
    (write_training(tmp_path, "damaged").folder / file).write_bytes(content)
    write_training(tmp_path, "other")
    assert f"{file} can't be read" in page(tmp_path, f"/training/{tmp_path.name}/damaged", 404).text
    assert len(page(tmp_path, "/").links("/training/")) == 2


def test_an_impossible_date_counts_as_damage(tmp_path: Path) -> None:
    write_training(tmp_path, created_at=1e300)
    assert "unreadable" in page(tmp_path, "/").text
