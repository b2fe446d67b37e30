"""Run configs: every rule of the reference, with the line in the file."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest

from osmosis_ai.toml_files import KeyLines, parse_toml
from osmosis_ai.validate.run_configs import check_config, check_configs

EVAL = """
[experiment]
rollout = "my-rollout"
entrypoint = "main.py"
model_path = "openai/gpt-5-mini"
dataset = "my-dataset"
commit_sha = "abc1234"

[evaluation]
limit = 200
n = 1
batch_size = 1
pass_threshold = 1.0
agent_workflow_timeout_s = 450
grader_timeout_s = 150.5

[env]
LOG_LEVEL = "INFO"
_PRIVATE = "x"

[secrets]
required = ["OPENAI_API_KEY"]
"""
TRAINING = """
[experiment]
rollout = "my-rollout"
entrypoint = "main.py"
model_path = "Qwen/Qwen3.6-35B-A3B"
dataset = "my-dataset"

[training]
lr = 1e-6
total_epochs = 1
n_samples_per_prompt = 8
rollout_batch_size = 32
max_prompt_length = 8192
max_response_length = 8192
agent_workflow_timeout_s = 450
grader_timeout_s = 150

[sampling]
rollout_temperature = 1.0
rollout_top_p = 1.0

[checkpoints]
eval_interval = 10
checkpoint_save_freq = 20

[advanced]
anything = {at = "all"}
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "rollouts" / "my-rollout").mkdir(parents=True)
    (tmp_path / "rollouts" / "my-rollout" / "main.py").touch()
    for kind in ("eval", "training"):
        (tmp_path / "configs" / kind).mkdir(parents=True)
    return tmp_path


def found(repo: Path, text: str | bytes, kind: str = "eval") -> list[tuple[str, int | None]]:
    return [(one.code, one.line) for one in findings(repo, text, kind)]


def findings(repo: Path, text: str | bytes, kind: str = "eval") -> list:
    file = repo / "configs" / kind / "it.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return check_config(file, repo, kind)  # type: ignore[arg-type]


def test_the_reference_is_right(repo: Path) -> None:
    assert found(repo, EVAL) == []
    assert found(repo, TRAINING, "training") == []


def test_the_least_configs(repo: Path) -> None:
    least = EVAL[: EVAL.index("commit_sha")]
    assert found(repo, least + "[secrets]\nrequired = []\n") == []
    assert found(repo, least, "training") == []


@pytest.mark.parametrize("key", ["rollout", "entrypoint", "model_path", "dataset"])
def test_required_fields(repo: Path, key: str) -> None:
    lines = [line for line in EVAL.splitlines() if not line.startswith(key)]
    assert found(repo, "\n".join(lines)) == [("OSM502", 2)]
    empty = [f'{key} = " "' if line.startswith(key) else line for line in EVAL.splitlines()]
    assert [code for code, _ in found(repo, "\n".join(empty))] == ["OSM502"]


def test_no_experiment_at_all(repo: Path) -> None:
    assert found(repo, "[secrets]\nrequired = []\n") == [("OSM502", None)] * 4


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "said"),
    [
        ("limit = 200", "limits = 200", "OSM503", 10, "did you mean limit?"),
        ("[evaluation]", "[evalution]", "OSM503", 9, "did you mean evaluation?"),
        ('commit_sha = "abc1234"', 'comit_sha = "abc1234"', "OSM503", 7, "did you mean commit_sha?"),
        ("required = [", "extra = 1\nrequired = [", "OSM503", 22, "unknown key extra in [secrets]"),
        ("limit = 200", 'limit = "200"', "OSM504", 10, "limit is a string, not an integer"),
        ("limit = 200", "limit = true", "OSM504", 10, "limit is a boolean"),
        ("limit = 200", "limit = 2.0", "OSM504", 10, "not an integer"),
        ("pass_threshold = 1.0", 'pass_threshold = "1"', "OSM504", 13, "not a number"),
        ('dataset = "my-dataset"', "dataset = 3", "OSM504", 6, "not a string"),
        ('LOG_LEVEL = "INFO"', "LOG_LEVEL = 3", "OSM504", 18, "not a string"),
        ('["OPENAI_API_KEY"]', '"OPENAI_API_KEY"', "OSM504", 22, "not a list of names"),
        ('["OPENAI_API_KEY"]', "[1]", "OSM504", 22, "a list with the number 1 in it"),
        ("LOG_LEVEL", "log-level", "OSM505", 18, "[env] log-level"),
        ("LOG_LEVEL", "2ND", "OSM505", 18, "don't begin with a digit"),
        ('["OPENAI_API_KEY"]', '["_OPENAI"]', "OSM505", 22, "begin with a letter"),
        ("LOG_LEVEL", "_OSMOSIS_LEVEL", "OSM506", 18, "_OSMOSIS_"),
        ("LOG_LEVEL", "OPENAI_API_KEY", "OSM507", 18, "both [env] and [secrets].required"),
        ('required = ["OPENAI_API_KEY"]', "", "OSM508", 21, "[secrets] has no required"),
        ('"abc1234"', '"abc123"', "OSM509", 7, "7 to 40"),
        ('"abc1234"', '"main"', "OSM509", 7, "7 to 40"),
        ('"abc1234"', f'"{"a" * 41}"', "OSM509", 7, "7 to 40"),
        ('"my-rollout"', '"my-rolout"', "OSM510", 3, "did you mean my-rollout?"),
        ('"my-rollout"', '"../rollouts/my-rollout"', "OSM510", 3, "not a path"),
        ('"main.py"', '"start.py"', "OSM511", 4, "rollouts/my-rollout/start.py doesn't exist"),
        ('"main.py"', '"../../x.py"', "OSM511", 4, "must be a relative path"),
        ("n = 1", "n = 0", "OSM512", 11, "at least 1"),
        ("= 150.5", "= nan", "OSM512", 15, "more than 0"),
        ('["OPENAI_API_KEY"]', '["A", "A"]', "OSM505", 22, "listed twice"),
        ('commit_sha = "abc1234"', 'branch = "a b"', "OSM509", 7, "no spaces"),
        ('"abc1234"', '"abc1234"; branch = "main"'.replace("; ", "\n"), "OSM509", 8, "keep one of them"),
    ],
)
def test_rules_of_eval_configs(repo: Path, old: str, new: str, code: str, line: int, said: str) -> None:
    assert old in EVAL
    result = findings(repo, EVAL.replace(old, new, 1))
    assert [(one.code, one.line) for one in result] == [(code, line)]
    assert said in result[0].message


def test_secrets_are_required_in_eval_configs_only(repo: Path) -> None:
    without = EVAL[: EVAL.index("[secrets]")]
    assert found(repo, without) == [("OSM508", None)]
    assert found(repo, TRAINING + "[secrets]\n", "training") == [("OSM508", 28)]


def test_tables_belong_to_a_kind(repo: Path) -> None:
    assert found(repo, TRAINING + "[evaluation]\nn = 1\n", "training") == [("OSM503", 28)]
    assert [code for code, _ in found(repo, TRAINING + "[secrets]\nrequired = []\n")] == ["OSM503"] * 3
    assert found(repo, TRAINING.replace("top_p = 1.0", "top_p = 1.5"), "training") == [("OSM512", 20)]


def test_a_key_written_into_a_config_is_not_shown(repo: Path) -> None:
    key = "sk-" + "aB3dE6gH9jK2mN5pQ8sT1vW4"
    result = findings(repo, EVAL.replace('"INFO"', f'"{key}"')) + findings(
        repo, EVAL.replace('"OPENAI_API_KEY"', f'"{key}"')
    )
    assert [(one.code, one.line) for one in result] == [("OSM208", 18), ("OSM208", 22)]
    assert key not in str(result)


@pytest.mark.parametrize("text", ["experiment = 3", "env = 1", "secrets = [1]", "experiment = [{}]", "[[env]]"])
def test_tables_that_are_none(repo: Path, text: str) -> None:
    assert "OSM504" in [code for code, _ in found(repo, text)]


# Files


def test_a_hundred_megabytes_are_refused_at_once(repo: Path) -> None:
    file = repo / "configs" / "eval" / "big.toml"
    with file.open("wb") as large:
        large.truncate(100_000_000)
    started = perf_counter()
    result = check_config(file, repo, "eval")
    assert [one.code for one in result] == ["OSM501"]
    assert "too large" in result[0].message
    assert perf_counter() - started < 5


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"[experiment]\nrollout = \n", 2),
        (b"[experiment\n", 1),
        (b"a = 1\na = 2\n", 2),
        (b"a = '\xff'\n", 1),
        (b"\n\n\x80", 3),
        (b"a = [" + b"[" * 50_000, None),
        (b"a = 99999999999999999999999999999-01-01", 1),
        (b"a = " + b"9" * 200_000, None),
        (b"# a\na" + b" . 'b'" * 40_000 + b" = 1", 2),
        (b"x = {" + b"a." * 100_000 + b"a = 1}", 1),
        (b"a" * 200_000, 1),
    ],
)
def test_files_that_are_no_toml(repo: Path, data: bytes, line: int | None) -> None:
    result = found(repo, data)
    assert [code for code, _ in result] == ["OSM501"]
    if line is not None:
        assert result[0][1] == line


def test_links_and_folders(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "it.toml"
    outside.write_text(EVAL, encoding="utf-8")
    (repo / "configs" / "eval" / "link.toml").symlink_to(outside)
    (repo / "configs" / "eval" / "gone.toml").symlink_to(repo / "nowhere")
    (repo / "configs" / "eval" / "folder.toml").mkdir()
    circle = repo / "configs" / "eval" / "circle.toml"
    circle.symlink_to(circle)
    result = list(check_configs(repo))
    assert [one.code for one in result] == ["OSM501"] * 4


def test_configs_in_other_places(repo: Path) -> None:
    for name in ("configs/it.toml", "configs/eval/deeper/it.toml"):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text(EVAL, encoding="utf-8")
    assert [(one.code, one.file) for one in check_configs(repo)] == [
        ("OSM513", "configs/eval/deeper/it.toml"),
        ("OSM513", "configs/it.toml"),
    ]


# Lines


def test_lines_of_keys_however_they_are_written() -> None:
    text = (
        'top.one = 1\n"quoted key" = 2\ninline = {first = 1, second = 2}\n'
        '[table] # a comment\ntext = """\nfake = 1\n[fake]\n"""\nreal = 3\n'
        "[ spaced . name ]\nkey= 4\nlong = [\n  1,\n]\n[[list]]\nx = 1\n"
    )
    parse_toml(text)
    lines = KeyLines(text)
    assert [
        lines.of("top", "one"),
        lines.of("quoted key"),
        lines.of("inline", "second"),
        lines.of("table", "text"),
        lines.of("table", "real"),
        lines.of("spaced", "name", "key"),
        lines.of("list", "x"),
    ] == [1, 2, 3, 5, 9, 11, 16]
    assert lines.of("table", "missing") == 4
    assert lines.of("fake") is None
