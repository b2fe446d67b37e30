"""Reward and rubric folders: signatures, reach, lookalikes, imports, secrets, keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from osmosis_ai.discovery.scan import scan_functions
from osmosis_ai.records import Failure
from osmosis_ai.validate.findings import Finding
from osmosis_ai.validate.functions import (
    check_functions,
    check_load_problems,
    is_about_form,
    reads_ground_truth,
)
from osmosis_ai.validate.imports import check_imports
from osmosis_ai.validate.judges import check_key_variables, check_rubric_files
from osmosis_ai.validate.secrets import check_secrets, kind_of_secret

START = "from osmosis_ai import osmosis_reward, osmosis_rubric\n\n"
# Made of parts, so that no tool takes this file for one that holds a key.
OPENAI = "sk-" + "aB3dE6gH9jK2mN5pQ8sT1vW4"


def write(root: Path, file: str, text: str) -> Path:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def rewards(root: Path, text: str) -> list[Finding]:
    write(root, "reward_fn/rewards.py", START + text)
    found = scan_functions(root / "reward_fn", root, "reward").components
    return list(check_functions(root / "reward_fn", root, "reward", found))


def rubrics(root: Path, text: str) -> list[Finding]:
    write(root, "reward_rubric/rubrics.py", START + text)
    found = scan_functions(root / "reward_rubric", root, "rubric").components
    return list(check_functions(root / "reward_rubric", root, "rubric", found))


def reward(signature: str) -> str:
    return f"@osmosis_reward\ndef score({signature}:\n    return 1.0\n"


# Signatures


@pytest.mark.parametrize(
    "signature",
    [
        "solution_str: str, ground_truth: str, extra_info: dict = None) -> float",
        "solution_str: str, ground_truth: str, extra_info: dict | None = {}, **kwargs)",
        "solution_str: 'str', ground_truth: str, extra_info: 'Optional[dict]' = None, *, more: int = f()) -> float",
        "messages: list, ground_truth, metadata)",
    ],
)
def test_signatures_that_are_right(tmp_path: Path, signature: str) -> None:
    assert rewards(tmp_path, "from typing import Optional\n" + reward(signature)) == []


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("solution_str, ground_truth: str, extra_info: dict = None)", "`solution_str` has no annotation"),
        ("solution_str: str, truth: str, extra_info: dict = None)", "expected `ground_truth: str`"),
        ("solution_str: str, ground_truth: str, extra_info: dict)", "must have a default"),
        ("solution_str: str, ground_truth: str, extra_info: list = None)", "expected `extra_info: dict = None`"),
        ("solution_str: str, ground_truth: str, extra_info: dict = None) -> int", "return annotation"),
        ("answer: str)", "its first parameter is `answer: str`"),
        ("messages: list, temperature)", "parameter `temperature` has no default"),
        (")", "it takes no parameters"),
    ],
)
def test_signatures_that_are_wrong(tmp_path: Path, signature: str, said: str) -> None:
    findings = rewards(tmp_path, reward(signature))
    assert [(one.code, one.file, one.line, one.subject) for one in findings] == [
        ("OSM201", "reward_fn/rewards.py", 4, "score")
    ]
    assert said in findings[0].message


def test_an_annotation_that_only_running_tells_is_not_judged(tmp_path: Path) -> None:
    text = "Text = str\n" + reward("solution_str: Text, ground_truth: Text, extra_info: dict = None)")
    assert rewards(tmp_path, text) == []


def test_no_code_of_the_user_runs_when_a_signature_is_checked(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    default = f"open({str(mark)!r}, 'w')"
    rewards(tmp_path, f"{default}\n" + reward(f"solution_str: str, ground_truth: str, extra_info: dict = {default})"))
    assert not mark.exists()


def test_a_rubric_has_its_own_signature(tmp_path: Path) -> None:
    good = "@osmosis_rubric\ndef judge(solution_str: str, ground_truth: str | None, extra_info: dict) -> float: ...\n"
    assert rubrics(tmp_path, good) == []
    assert [one.code for one in rubrics(tmp_path, good.replace("extra_info: dict", "extra_info: dict = None"))] == [
        "OSM201"
    ]


# Reach


def test_functions_nobody_can_reach(tmp_path: Path) -> None:
    form = "(solution_str: str, ground_truth: str, extra_info: dict = None): ..."
    findings = rewards(
        tmp_path,
        f"def make():\n    @osmosis_reward\n    def nested{form}\n"
        f"class It:\n    @osmosis_reward\n    def method{form}\n"
        f"if __name__ == '__main__':\n    @osmosis_reward\n    def main{form}\n"
        f"@osmosis_reward\ndef twice{form}\n@osmosis_reward\ndef twice{form}\n"
        f"@osmosis_rubric\ndef stray(solution_str: str, ground_truth: str | None, extra_info: dict): ...\n",
    )
    assert sorted((one.code, one.subject or "") for one in findings) == [
        ("OSM205", name) for name in ("main", "method", "nested", "stray", "twice")
    ]
    assert next(one for one in findings if one.subject == "stray").hint == "Move it to reward_rubric/."
    assert next(one for one in findings if one.subject == "twice").line == 13


def test_a_function_that_looks_like_a_reward(tmp_path: Path) -> None:
    findings = rewards(
        tmp_path,
        reward("solution_str: str, ground_truth: str, extra_info: dict = None)")
        + "def exact_reward(solution_str, ground_truth, extra_info=None): ...\n"
        "def _reward(solution_str): ...\n"
        "def score_part(text): ...\n"
        "def helper_score(solution_str): ...\nused = helper_score\n",
    )
    assert [(one.code, one.severity, one.subject) for one in findings] == [("OSM206", "warning", "exact_reward")]


def test_a_folder_without_functions(tmp_path: Path) -> None:
    assert [one.code for one in rewards(tmp_path, "")] == ["OSM204"]


def test_what_functions_read(tmp_path: Path) -> None:
    form = "(solution_str: str, ground_truth: str, extra_info: dict = None)"
    write(
        tmp_path,
        "reward_fn/rewards.py",
        f"{START}@osmosis_reward\ndef compares{form}:\n    return float(solution_str == ground_truth)\n"
        f"@osmosis_reward\ndef looks_up{form}:\n    return extra_info['ground_truth']\n"
        f"@osmosis_reward\ndef format_reward{form}:\n    return 1.0\n"
        f"@osmosis_reward\ndef other{form}:\n    '''Penalty for long answers.'''\n    return 1.0\n",
    )
    found = scan_functions(tmp_path / "reward_fn", tmp_path, "reward").components
    assert [reads_ground_truth(one, tmp_path) for one in found] == [True, True, False, False]
    assert [is_about_form(one, tmp_path) for one in found] == [False, False, True, True]


def test_load_problems_are_said_once() -> None:
    problem = Failure(
        "reward", "reward_fn/a.py:3: NameError: name 'x' is not defined", kind="load", file="reward_fn/a.py"
    )
    findings = list(check_load_problems([problem, problem], []))
    assert [(one.code, one.file, one.line, one.message) for one in findings] == [
        ("OSM202", "reward_fn/a.py", 3, "NameError: name 'x' is not defined")
    ]


# Imports


def imports(root: Path, pyproject: str | None, **files: str) -> list[Finding]:
    if pyproject is not None:
        write(root, "pyproject.toml", pyproject)
    for name, text in files.items():
        write(root, name.replace("__", "/") + ".py", text)
    return list(check_imports(root))


DECLARED = (
    '[project]\nname = "x"\ndependencies = ["osmosis-ai>=0.4", "PyYAML", "rich[extra]>=1; python_version > \'3\'"]\n'
)


def test_imports_that_need_no_declaration(tmp_path: Path) -> None:
    text = (
        "import json, os.path\nimport yaml\nimport rich.table\nfrom osmosis_ai import osmosis_reward\n"
        "import helpers\nfrom .near import x\nimport beside\nfrom typing import TYPE_CHECKING\n"
        "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nif TYPE_CHECKING:\n    import pandas\n"
    )
    files = {"mcp__helpers": "", "reward_fn__rewards": text, "reward_fn__beside": ""}
    assert imports(tmp_path, DECLARED, **files) == []


def test_an_undeclared_import(tmp_path: Path) -> None:
    findings = imports(tmp_path, DECLARED, reward_fn__rewards="import msgspec\nimport msgspec.json\nimport not_there\n")
    assert [(one.code, one.line, one.subject, one.severity) for one in findings] == [
        ("OSM207", 1, "msgspec", "warning"),
        ("OSM207", 3, "not_there", "warning"),
    ]
    assert findings[0].hint == 'Add "msgspec" to the dependencies.'


def test_the_sdk_is_not_the_repositorys_own_folder(tmp_path: Path) -> None:
    code = "from mcp.server import Server\n"
    assert [one.subject for one in imports(tmp_path, DECLARED, mcp__main=code)] == ["mcp"]
    extra = DECLARED.replace("osmosis-ai>=0.4", "osmosis-ai[mcp]>=0.4")
    assert imports(tmp_path, extra, mcp__main=code + "import fastmcp\n") == []


def test_no_pyproject_is_a_warning_and_a_broken_one_an_error(tmp_path: Path) -> None:
    assert [(one.code, one.severity) for one in imports(tmp_path, None)] == [("OSM004", "warning")]
    assert [(one.code, one.line) for one in imports(tmp_path, "[project\n")] == [("OSM005", 1)]
    assert imports(tmp_path, '[project]\ndynamic = ["dependencies"]\n', mcp__main="import numpy\n") == []
    # Whatever is in it, it is no traceback.
    odd = 'project = 3\ndependency-groups = 1\n[tool.poetry]\ndependencies = {python = "^3.10"}\n'
    assert [one.code for one in imports(tmp_path, odd)] == ["OSM207"]


# Secrets


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f'KEY = "{OPENAI}"', "an OpenAI key"),
        (f"# once: {OPENAI}", "an OpenAI key"),
        ("x = 'AKIA" + "QX7RB2MN5KD8WZ4J'", "an AWS access key"),
        ("x = 'ghp_" + "aB3dE6gH9jK2mN5pQ8sT1vW4xY7zA0cD'", "a GitHub token"),
        ("x = 'xai-" + "aB3dE6gH9jK2mN5pQ8sT1vW4xY'", "an xAI key"),
        ("x = 'AIza" + "SyB3dE6gH9jK2mN5pQ8sT1vW4xY7zA0cD_f'", "a Google key"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
        ('key = "sk-your-key-goes-here-please"', None),
        ('key = "sk-xxxxxxxxxxxxxxxxxxxxxxxx"', None),
        ("task-aB3dE6gH9jK2mN5pQ8sT1vW4 is fine", None),
    ],
)
def test_kinds_of_secrets(line: str, kind: str | None) -> None:
    assert kind_of_secret(line) == kind


def test_secrets_in_source_are_found_and_not_shown(tmp_path: Path) -> None:
    value = "q8W2e5R9t1Y4u7I0o3P6a8S2"
    write(
        tmp_path,
        "mcp/main.py",
        f'API_TOKEN = "{value}"\nconfig = {{"api_key": "{OPENAI}"}}\ncall(password="{value}")\n'
        f'TOKEN_URL = "{value}"\nNAME_OF_KEY = "OPENAI_API_KEY"\nself.secret = "a perfectly normal sentence 1"\n',
    )
    findings = list(check_secrets(tmp_path / "mcp", tmp_path))
    assert sorted((one.code, one.line) for one in findings) == [("OSM208", 1), ("OSM208", 2), ("OSM208", 3)]
    assert not any(secret in str(one) for one in findings for secret in (OPENAI, value))


# Judges


def test_a_key_variable_that_is_not_set(tmp_path: Path) -> None:
    write(
        tmp_path,
        "reward_rubric/one.py",
        'info = {"provider": "openai", "api_key_env": "MY_KEY"}\nx = extra_info.get("api_key_env", "OTHER_KEY")\n',
    )
    write(tmp_path, "reward_rubric/two.py", 'PROVIDER = "anthropic"\nf(model_info={"provider": PROVIDER})\n')
    folder = tmp_path / "reward_rubric"
    findings = list(check_key_variables(folder, tmp_path, {"OTHER_KEY": "set"}))
    assert [(one.code, one.file, one.line, one.subject) for one in findings] == [
        ("OSM209", "reward_rubric/one.py", 1, "MY_KEY"),
        ("OSM209", "reward_rubric/two.py", 1, "ANTHROPIC_API_KEY"),
    ]
    assert (
        list(check_key_variables(folder, tmp_path, dict.fromkeys(["MY_KEY", "OTHER_KEY", "ANTHROPIC_API_KEY"], "x")))
        == []
    )


def test_rubric_files(tmp_path: Path) -> None:
    good = (
        "version: 1\nrubrics:\n  - id: one\n    title: One\n    rubric: Judge it.\n"
        "    model_info: {provider: openai, model: gpt-5-mini, api_key_env: THE_KEY}\n"
    )
    write(tmp_path, "rubric_configs.yaml", good)
    assert [(one.code, one.subject) for one in check_rubric_files(tmp_path, {})] == [("OSM209", "THE_KEY")]
    assert list(check_rubric_files(tmp_path, {"THE_KEY": "set"})) == []
    key = "9f3c7a1b5d8e2046c1" * 2
    for inline, found in ((key, ["OSM208"]), ("sk-your-key-goes-here-0000", [])):
        write(tmp_path, "rubric_configs.yaml", good.replace("api_key_env: THE_KEY", f"api_key: {inline}"))
        findings = list(check_rubric_files(tmp_path, {}))
        assert [one.code for one in findings] == found
        assert not any(inline in str(one) for one in findings)
    write(tmp_path, "rubric_configs.yaml", good)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    write(tmp_path, "reward_rubric/bomb.yaml", bomb)
    write(tmp_path, "reward_rubric/broken.yml", "rubrics: [\n")
    findings = list(check_rubric_files(tmp_path, {"THE_KEY": "set"}))
    assert [(one.code, one.file) for one in findings] == [
        ("OSM210", "reward_rubric/bomb.yaml"),
        ("OSM210", "reward_rubric/broken.yml"),
    ]
    assert all(one.line for one in findings)
    assert not any(str(tmp_path) in one.message for one in findings)
