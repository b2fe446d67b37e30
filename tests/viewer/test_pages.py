"""The viewer's pages, over stores as runs write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from viewed import ADDRESS, HOSTILE, Elements, hostile_run, made, viewer, write_run

from commands import Osmosis
from osmosis_ai.records import Failure
from osmosis_ai.store.run_store import RunStore
from osmosis_ai.viewer.rendering import environment, images_of, shown
from osmosis_ai.viewer.trees import MAX_NODES, tree

BROKEN = Failure("model", "connection refused", "connection")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a run of five rows: two pass, one half, one without a score, one failed."""
    root = tmp_path_factory.mktemp("viewed") / "repo"
    root.mkdir()
    write_run(root, [made(0), made(1, score=0.5), made(2, score=None), made(3, failure=BROKEN), made(4)])
    return root


def page(root: Path, path: str, status: int = 200) -> Elements:
    with viewer(root) as client:
        answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return Elements(answer.text)


def listed(found: Elements) -> list[int]:
    return [int(re.findall(r"/rows/(\d+)", str(attributes["data-row"]))[0]) for tag, attributes in found.found
            if tag == "tr" and "data-row" in attributes]  # fmt: skip


def test_a_repository_without_runs_shows_how_to_create_one(tmp_path: Path) -> None:
    assert "osmosis eval" in page(tmp_path, "/").text
    # Looking creates nothing.
    assert list(tmp_path.iterdir()) == []


def test_the_list_shows_each_run_s_options_and_scores(root: Path) -> None:
    shown = page(root, "/")
    for text in ("finished", "eval", "m/one", "rows.jsonl", "0.500", "exact"):
        assert text in shown.text


@pytest.mark.parametrize(
    ("query", "runs"),
    [
        ("", 2),
        ("?q=TWO+finished", 1),
        ("?q=nothing", 0),
        ("?model=m/one", 1),
        ("?status=killed", 1),
        ("?sort=-failed", 2),
    ],
)
def test_runs_are_filtered_and_sorted_by_the_url(tmp_path: Path, query: str, runs: int) -> None:
    write_run(tmp_path, [made(0)], status="running")
    write_run(tmp_path, [made(0, failure=BROKEN)], model="m/two")
    found = page(tmp_path, f"/{query}")
    assert len([1 for tag, attributes in found.found if tag == "tr" and "data-row" in attributes]) == runs


def test_scores_over_the_runs_of_a_dataset_are_a_chart(tmp_path: Path) -> None:
    for score in (0.25, 0.75):
        write_run(tmp_path, [made(0, score=score)])
    write_run(tmp_path, [made(0)], dataset="/data/other.jsonl")
    found = page(tmp_path, "/")
    (label,) = [str(attributes["aria-label"]) for tag, attributes in found.found
                if tag == "svg" and "over" in str(attributes.get("aria-label"))]  # fmt: skip
    assert label == "Mean of r:exact over 2 runs, from 0.250 to 0.750"


@pytest.mark.parametrize("run", ["latest", ""])
def test_a_run_shows_its_figures_and_its_rows(root: Path, run: str) -> None:
    with RunStore.open(root) as store:
        run_id = store.find_run("latest").id
    found = page(root, f"/runs/repo/{run or run_id}")
    assert listed(found) == [0, 1, 2, 3, 4]
    for text in ("r:exact", "0.500", "3 of 5", "add", "connection refused", "ValueError: no number", "1,000 + 100"):
        assert text in found.text
    # Every cause, tool and bar leads to its rows.
    assert found.links("/runs/repo/")
    assert {href.partition("?")[2].partition("=")[0] for href in found.links(f"/runs/repo/{run or run_id}?")} >= {
        "kind", "message", "tool", "fn", "sort",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("status=failed", [2, 3]),
        ("status=not-passed", [1, 2, 3]),
        ("status=passed", [0, 4]),
        ("status=unheard-of", [0, 1, 2, 3, 4]),
        ("fn=r:exact&min=0.4&max=0.6", [1]),
        ("max=0.9", [1]),
        ("min=nan", [0, 1, 2, 3, 4]),
        ("kind=connection", [3]),
        ("kind=reward_raised", [2]),
        ("message=connection+refused", [3]),
        ("tool=add", [0, 1, 2, 3, 4]),
        ("tool=sub", []),
        ("q=IS+4+%2B", [4]),
        ("q=%22a%22%3A+4", [4]),
        ("q=tool_call_id", []),
        ("sort=-time", [4, 3, 2, 1, 0]),
        ("sort=score", [2, 3, 1, 0, 4]),
        ("sort=;drop", [0, 1, 2, 3, 4]),
        ("offset=3", [3, 4]),
        ("offset=99999999999999999999", [0, 1, 2, 3, 4]),
    ],
)
def test_rows_are_filtered_and_sorted_by_the_url(root: Path, query: str, rows: list[int]) -> None:
    assert listed(page(root, f"/runs/repo/latest?{query}")) == rows


def test_a_page_that_refreshes_itself_leaves_out_the_rows(root: Path) -> None:
    with viewer(root) as client:
        found = Elements(client.get("/runs/repo/latest?sort=-row", headers={"x-without-rows": "1"}).text)
    assert listed(found) == []
    (window,) = [each for _, each in found.found if each.get("id") == "window"]
    assert (window["data-count"], window["data-url"]) == ("5", "/runs/repo/latest/table?sort=-row")


def test_a_part_of_the_rows_is_read_alone(root: Path) -> None:
    with viewer(root) as client:
        part = Elements(client.get("/runs/repo/latest/table?offset=1&limit=2&sort=-row").text)
    assert listed(part) == [3, 2]
    assert "html" not in {tag for tag, _ in part.found}


def test_every_attempt_is_a_cell(tmp_path: Path) -> None:
    write_run(tmp_path, [made(0, k, score=k / 3) for k in range(4)], n=4)
    found = page(tmp_path, f"/runs/{tmp_path.name}/latest")
    cells = [attributes for tag, attributes in found.found if tag == "a" and "cell" in str(attributes.get("class"))]
    assert [str(cell["class"]).split()[1] for cell in cells] == ["part0", "part1", "part2", "passed"]
    assert "attempt=3" in str(cells[3]["href"])
    third = page(tmp_path, str(cells[2]["href"]))
    assert "attempt 2 ·" in third.text


def test_a_rollout_s_page_shows_all_of_its_data(root: Path) -> None:
    found = page(root, "/runs/repo/latest/rows/0")
    command = "osmosis test -i --row 0 -d /data/rows.jsonl --model m/one"
    parts = ["Use the tools.", "What is 0 + 2?", "hm", "add", "result of add", "because", "I like it", "openai/judge"]
    for text in (*parts, "Is it so?", "Ground truth", command, "turn 1", "220 tokens"):
        assert text in found.text
    # The arguments and the result are trees, the system prompt and the reasoning are folded.
    assert [attributes for tag, attributes in found.found if tag == "details" and "open" in attributes]
    assert len([1 for tag, attributes in found.found if tag == "details" and "open" not in attributes]) >= 3


def test_an_imported_run_has_no_command_that_runs_a_row_again(tmp_path: Path) -> None:
    known = {"format": "inspect", "file": "/logs/a.eval", "sha256": "0", "tool": "inspect_ai", "task": None}
    write_run(tmp_path, [made(0)], imported={**known, "scorers": [], "unreadable": 0, "left_out": {}})
    found = page(tmp_path, f"/runs/{tmp_path.name}/latest/rows/0")
    assert "Use the tools." in found.text
    assert "Run it again" not in found.text
    assert "osmosis test -i" not in found.text


def test_a_failed_score_shows_its_traceback(root: Path) -> None:
    text = page(root, "/runs/repo/latest/rows/2").text
    for part in ("ValueError: no number", "reward_fn/r.py:3", "Traceback …"):
        assert part in text


def test_the_next_row_follows_the_filter(root: Path) -> None:
    found = page(root, "/runs/repo/latest/rows/2?status=not-passed&sort=-row")
    keys = {
        attributes["data-key"]: str(attributes["href"])
        for tag, attributes in found.found
        if tag == "a" and "data-key" in attributes
    }
    assert {key: re.findall(r"rows/(\d+)", href) for key, href in keys.items()} == {"k": ["3"], "j": ["1"], "f": ["3"]}
    assert keys["j"].endswith("?status=not-passed&sort=-row")
    assert "2 of 3" in found.text


def judge(root: Path, run: str, row: int, status: int = 303, **given: str) -> str:
    """Send a verdict as the page of a row does."""
    with viewer(root) as client:
        data = {"rollout": f"r{row}.0", **given}
        answer = client.post(f"/runs/{root.name}/{run}/rows/{row}/verdict", data=data, headers={"origin": ADDRESS})
    assert answer.status_code == status, answer.text
    return answer.text


def test_a_verdict_shows_where_its_rollout_does(tmp_path: Path) -> None:
    run = write_run(tmp_path, [made(0), made(1, score=0.0), made(2)])
    url = f"/runs/{tmp_path.name}/{run}"
    assert "Verdicts" not in page(tmp_path, url).text
    judge(tmp_path, run, 0, verdict="1", note=" clear <b>and</b> short ")
    judge(tmp_path, run, 1, verdict="1")
    judge(tmp_path, run, 2, verdict="0")
    row = page(tmp_path, f"{url}/rows/0")
    assert "clear <b>and</b> short" in row.text
    assert [a["value"] for tag, a in row.found if tag == "button" and a.get("aria-pressed") == "true"] == ["1"]
    found = page(tmp_path, url)
    assert "3 verdicts, 2 good, 1 bad" in found.text
    # Two of the three scores pass, and one of these is good.
    assert "r:exact and people agree on 1 of 3 (95 % CI 0.06 … 0.79), Cohen's kappa -0.500" in found.text
    assert "3 are few: only the intervals say something" in found.text
    assert [str(attributes.get("aria-label")) for tag, attributes in found.found if tag == "sup"] == [
        "verdict: good",
        "verdict: good",
        "verdict: bad",
    ]
    for status, rows in (("verdict-good", [0, 1]), ("verdict-bad", [2]), ("no-verdict", []), ("disagrees", [1, 2])):
        assert listed(page(tmp_path, f"{url}?status={status}&fn=r:exact")) == rows
    judge(tmp_path, run, 2, verdict="")
    assert listed(page(tmp_path, f"{url}?status=no-verdict")) == [2]


def test_labelling_goes_on_with_the_next_row_without_a_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path, [made(0), made(1), made(2), made(3)])
    for row in (1, 2):
        judge(tmp_path, run, row, verdict="1")
    found = page(tmp_path, f"/runs/{tmp_path.name}/{run}/rows/2?status=no-verdict")
    beside = [str(a["href"]) for tag, a in found.found if tag == "a" and a.get("data-key") in ("k", "j")]
    assert [re.findall(r"rows/(\d+)", href) for href in beside] == [["0"], ["3"]]


def test_a_verdict_that_can_not_be_recorded_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path, [made(0)])
    assert "was run again or removed" in judge(tmp_path, run, 0, 409, rollout="another", verdict="1")
    assert "too long" in judge(tmp_path, run, 0, 413, verdict="1", note="n" * 70_000)
    assert "no run" in judge(tmp_path, "none", 0, 409, verdict="1")


def test_the_next_flip_follows_the_run_that_is_compared_with(tmp_path: Path) -> None:
    _, _, name, before, after = compared_runs(tmp_path).split("/")
    url = f"/runs/{name}/{after}/rows/0"

    def flips(found: Elements) -> list[str]:
        return [str(a["href"]) for tag, a in found.found if tag == "a" and a.get("data-key") == "x"]

    without = page(tmp_path, url)
    assert flips(without) == []
    assert before in without.text  # among the runs to choose
    found = page(tmp_path, f"{url}?against={before}")
    assert flips(found) == [f"/runs/{name}/{after}/rows/1?against={before}"]
    assert f"/compare/{name}/{after}/{before}/rows/0" in found.links("/compare")
    last = page(tmp_path, f"/runs/{name}/{after}/rows/2?against={before}")
    assert flips(last) == []
    assert "no later row flipped" in last.text
    assert page(tmp_path, f"{url}?against=none", 404)


def compared_runs(root: Path) -> str:
    """Two runs of four rows: 0 stays, 1 passes now and calls with other arguments, 2 fails now, 3 and 4 are in one."""
    before = write_run(root, [made(0), made(1, score=0.0), made(2), made(3)])
    other = made(1)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 7, "b": 2}'}}
    other[0].messages[2]["tool_calls"] = [call]
    after = write_run(root, [made(0), other, made(2, score=0.0), made(4)])
    return f"/compare/{root.name}/{before}/{after}"


def test_two_runs_show_their_flips_first(tmp_path: Path) -> None:
    url = compared_runs(tmp_path)
    found = page(tmp_path, url)
    assert listed(found) == [1, 2]
    assert found.text.index("Flipped rows") < found.text.index("95 % CI")
    for text in ("now pass: 1", "now fail: 1", "only the 3 common rows", "+0.000"):
        assert text in found.text
    assert listed(page(tmp_path, f"{url}?show=fail")) == [2]
    # A threshold that every score reaches.
    assert listed(page(tmp_path, f"{url}?threshold=0")) == []


def test_a_row_of_two_runs_is_aligned_step_by_step(tmp_path: Path) -> None:
    url = compared_runs(tmp_path)
    with viewer(tmp_path) as client:
        text = client.get(f"{url}/rows/1").text
    found = Elements(text)
    assert "2 equal steps" in found.text
    assert "<del>1</del>" in text
    assert "<ins>7</ins>" in text
    assert [1 for _, attributes in found.found if attributes.get("id") == "first-divergence"] == [1]
    keys = {each["data-key"]: str(each["href"]) for _, each in found.found if "data-key" in each}
    assert {key: re.findall(r"rows/(\d+)", href) for key, href in keys.items()} == {"k": ["0"], "j": ["2"], "x": ["2"]}
    assert "Both went the same way" in page(tmp_path, f"{url}/rows/0").text
    assert "doesn't have row 3" in page(tmp_path, f"{url}/rows/3", 404).text
    assert "no attempt 5" in page(tmp_path, f"{url}/rows/0?attempt_b=5", 404).text


def test_attempts_of_two_runs_are_chosen_one_by_one(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [made(0, k, score=k / 2) for k in range(3)], n=3) for _ in range(2)]
    found = page(tmp_path, f"/compare/{tmp_path.name}/{runs[0]}/{runs[1]}/rows/0?attempt=1&attempt_b=2")
    cells = [each for tag, each in found.found if tag == "a" and "cell" in str(each.get("class"))]
    assert [index for index, each in enumerate(cells) if "aria-current" in each] == [1, 5]
    assert str(cells[0]["href"]).endswith("attempt=0&attempt_b=2")
    assert str(cells[3]["href"]).endswith("attempt=1&attempt_b=0")


def test_a_rollout_s_own_log_lines_are_shown(tmp_path: Path) -> None:
    run_id = write_run(tmp_path, [made(1), made(11)])
    logs = tmp_path / ".osmosis" / "logs"
    logs.mkdir()
    lines = [
        "[row 1 run 0 stdout] mine",
        "[row 11 run 0 stdout] other",
        "[row 1 scores stderr] scored",
        "[probe stdout] no",
    ]
    (logs / f"{run_id}.log").write_text("\n".join(lines), encoding="utf-8")
    text = page(tmp_path, f"/runs/{tmp_path.name}/latest/rows/1").text
    assert "mine\n[row 1 scores stderr] scored" in text
    assert "other" not in text


def test_a_rollout_s_json_is_that_of_the_command(root: Path, osmosis: Osmosis) -> None:
    with viewer(root) as client:
        answer = client.get("/runs/repo/latest/rows/0/raw")
    assert answer.headers["content-type"] == "application/json"
    printed = osmosis("runs", "show", "--row", "0", "--json", "--root", str(root)).json
    assert answer.json() == printed["rollouts"][0]


@pytest.mark.parametrize(
    "path",
    ["/none", "/runs/none/latest", "/runs/repo/none", "/runs/repo/latest/rows/99", "/runs/repo/latest/rows/99/raw",
     "/runs/repo/latest/rows/x", "/runs/repo/%3Cb%3E"],
)  # fmt: skip
def test_missing_pages_are_reported(root: Path, path: str) -> None:
    found = page(root, path, 404)
    assert "Not there" in found.text
    assert "b" not in {tag for tag, _ in found.found}


def test_repositories_of_one_name_have_different_addresses(tmp_path: Path) -> None:
    roots = [tmp_path / name / "agent" for name in "ab"]
    for root in roots:
        root.mkdir(parents=True)
        write_run(root, [made(0)])
    with viewer(*roots) as client:
        assert Elements(client.get("/").text).links("/runs/agent-2/")
        assert client.get("/runs/agent-2/latest").status_code == 200


# Hostile content


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(), max_size=40)))
def test_no_text_ever_yields_an_element(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    shapes = []
    for each in (text, "harmless"):
        root = tmp_path_factory.mktemp("hostile") / "repo"
        root.mkdir()
        runs = [hostile_run(root, each) for _ in "ab"]
        compared = f"/compare/repo/{runs[0]}/{runs[1]}"
        paths = ["/", "/runs/repo/latest", "/runs/repo/latest/rows/0", "/runs/repo/latest/rows/1", compared]
        with viewer(root) as client:
            pages = [client.get(path) for path in (*paths, f"{compared}/rows/0")]
        assert [answer.status_code for answer in pages] == [200] * 6
        for answer in pages:
            found = Elements(answer.text)
            assert not [name for _, attributes in found.found for name in attributes if name.startswith("on")]
            assert not [
                1 for tag, attributes in found.found if tag == "script" and attributes.get("src") != "/static/view.js"
            ]
            assert "img" not in {tag for tag, _ in found.found}
            for _, attributes in found.found:
                assert str(attributes.get("href", "/")).startswith(("/", "#", "data:,"))
            assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", answer.text)
        shapes.append([{tag for tag, _ in Elements(answer.text).found} for answer in pages])
    for hostile, harmless in zip(*shapes, strict=True):
        # A text that is JSON is a tree; nothing else differs.
        assert hostile - harmless <= {"i", "b", "details", "summary", "div"}


@pytest.mark.parametrize(
    "value",
    [
        "[" * 10_000,
        "[" * 10_000 + "]" * 10_000,
        '{"a": ' * 10_000 + "1" + "}" * 10_000,
        "9" * 10_000,
        "[" + "9" * 10_000 + "]",
    ],
)
def test_json_of_any_depth_gives_a_bounded_tree_or_text(value: str) -> None:
    nodes = tree(value)
    assert nodes is None or len(nodes) <= MAX_NODES * 2


def test_a_tree_is_cut_where_it_grows_too_large() -> None:
    nodes = tree([[{"a": {"b": list(range(2000))}}]])
    assert nodes is not None
    assert len(nodes) < 2 * MAX_NODES
    assert sum(node.kind == "open" for node in nodes) == sum(node.kind == "close" for node in nodes)
    assert "cut" in {node.kind for node in nodes}


def test_ten_megabytes_are_cut_with_a_way_to_the_whole(tmp_path: Path) -> None:
    write_run(tmp_path, [made(0, text="x" * 10_000_000)])
    with viewer(tmp_path) as client:
        answer = client.get(f"/runs/{tmp_path.name}/latest/rows/0")
        assert len(answer.text) < 200_000
        assert "9,980,000 more characters" in answer.text
        assert len(client.get(f"/runs/{tmp_path.name}/latest/rows/0/raw").content) > 10_000_000
        assert len(client.get(f"/runs/{tmp_path.name}/latest").text) < 200_000


@pytest.mark.parametrize(
    ("url", "shows"),
    [
        ("data:image/png;base64,AAAA", True),
        ("data:image/svg+xml;base64,AAAA", False),
        ("data:text/html;base64,AAAA", False),
        ("https://evil.example/pixel.png", False),
        ("javascript:alert(1)", False),
    ],
)
def test_only_images_that_are_in_the_conversation_are_shown_and_only_when_opened(url: str, shows: bool) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    assert [bool(shown) for shown, _ in images_of(content)] == [shows]
    text = (
        environment()
        .from_string('{% import "parts.html" as parts %}{{ parts.images(content) }}')
        .render(content=content)
    )
    assert ("<img" in text) == shows
    assert "<details" in text
    assert "open" not in Elements(text).found[0][1]


def test_values_are_escaped_and_a_template_s_own_text_is_not() -> None:
    rendered = (
        environment()
        .from_string("{{ value }}<b>{{ number }}</b>{{ nothing | safe }}")
        .render(value="<\x1b>", number=1.5, nothing="<i>")
    )
    assert rendered == "&lt;\\x1b&gt;<b>1.5</b><i>"
    assert shown("\ud800") == "\\ud800"
