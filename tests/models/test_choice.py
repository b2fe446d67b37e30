from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from osmosis_ai.errors import UsageError
from osmosis_ai.models.choice import choose_model, named_by_rows
from osmosis_ai.models.engines import banner_of
from osmosis_ai.models.offline import offline_names
from osmosis_ai.records import ModelSpec

URL = "http://localhost:8000/v1"


def choose(
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    params: dict[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelSpec:
    return choose_model(
        model=model, base_url=base_url, api_key=api_key, params=params or {}, request_timeout=300, environ=environ or {}
    )


@pytest.mark.parametrize(
    ("model", "environ", "name", "engine"),
    [
        ("anthropic/claude-x", {"OSMOSIS_MODEL": "m", "OPENAI_API_KEY": "k"}, "anthropic/claude-x", "litellm"),
        (None, {"OSMOSIS_MODEL": "xai/grok", "OPENAI_API_KEY": "k"}, "xai/grok", "litellm"),
        (None, {"OSMOSIS_MODEL": "offline/empty", "OPENAI_API_KEY": "k"}, "offline/empty", "offline"),
        (None, {"OPENAI_API_KEY": "k"}, "openai/gpt-5-mini", "litellm"),
        (None, {"OPENAI_API_KEY": "", "OSMOSIS_MODEL": ""}, "offline/oracle", "offline"),
        (None, {}, "offline/oracle", "offline"),
        ("gpt-5-mini", {}, "openai/gpt-5-mini", "litellm"),
        ("offline/oracle", {}, "offline/oracle", "offline"),
    ],
)
def test_which_model_is_run(model: str | None, environ: dict[str, str], name: str, engine: str) -> None:
    spec = choose(model, environ=environ)
    assert (spec.name, spec.model, spec.engine, spec.base_url) == (name, name, engine, None)


@pytest.mark.parametrize("name", offline_names())
def test_every_offline_model_says_that_it_is_none(name: str) -> None:
    spec = choose(name)
    assert spec.stand_in
    banner = banner_of(spec)
    assert banner is not None
    assert name in banner
    assert "not a" in banner


def test_real_models_have_no_banner() -> None:
    for spec in (choose("gpt-5-mini"), choose("m", URL), choose("offline/oracle", URL)):
        assert banner_of(spec) is None
        assert not spec.stand_in


def test_the_stand_in_says_its_scores_mean_nothing() -> None:
    assert "scores say nothing about a model" in str(banner_of(choose()))


def test_an_oracle_without_anything_to_play_is_a_smoke_test() -> None:
    oracle, real = choose(), choose("gpt-5-mini")
    assert named_by_rows(oracle, references=True) is oracle
    assert named_by_rows(oracle, references=False).name == "offline/smoke"
    assert named_by_rows(real, references=False) is real


@pytest.mark.parametrize("name", ["qwen3", "meta-llama/Llama-3.1-8B", "openai/x", "offline/oracle"])
def test_with_a_base_url_the_name_is_sent_as_given(name: str) -> None:
    spec = choose(name, URL)
    assert (spec.name, spec.model, spec.engine, spec.base_url) == (name, name, "openai_compatible", URL)
    assert choose(None, URL, environ={"OSMOSIS_MODEL": name}).model == name


def test_a_base_url_needs_a_model() -> None:
    with pytest.raises(UsageError, match="pass --model"):
        choose(base_url=URL, environ={"OPENAI_API_KEY": "k"})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (f"{URL}/", URL),
        (f" {URL}//", URL),
        (f"{URL}/chat/completions", URL),
        (f"{URL}/chat/completions/", URL),
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://[::1]:8000/v1", "https://[::1]:8000/v1"),
    ],
)
def test_forms_of_a_base_url(given: str, kept: str) -> None:
    assert choose("m", given).base_url == kept


@pytest.mark.parametrize(
    "given",
    [
        "localhost:8000/v1",
        "ftp://host/v1",
        "http://",
        "http:///v1",
        "http://host:port/v1",
        "http://[::1/v1",
        "http://a b/v1",
    ],
)
def test_what_is_no_base_url(given: str) -> None:
    with pytest.raises(UsageError, match=r"--base-url .*http://localhost:8000/v1"):
        choose("m", given)


@pytest.mark.parametrize(
    "given", ["http://user:hunter22@host/v1", "http://host/v1?key=hunter22", "http://host/v1#hunter22"]
)
def test_a_base_url_that_may_hold_a_secret_is_refused_without_showing_it(given: str) -> None:
    with pytest.raises(UsageError, match="--base-url holds") as caught:
        choose("m", given)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize(
    ("base_url", "api_key", "environ", "key"),
    [
        (URL, "option", {"OSMOSIS_API_KEY": "variable"}, "option"),
        (URL, None, {"OSMOSIS_API_KEY": "variable", "OPENAI_API_KEY": "openai"}, "variable"),
        (URL, None, {"OPENAI_API_KEY": "openai"}, None),
        (URL, " ", {}, None),
        ("https://api.openai.com/v1", None, {"OPENAI_API_KEY": "openai"}, "openai"),
        ("http://api.openai.com/v1", None, {"OPENAI_API_KEY": "openai"}, None),
        ("https://api.openai.com.example.org/v1", None, {"OPENAI_API_KEY": "openai"}, None),
        (None, " option\n", {}, "option"),
        (None, None, {"OSMOSIS_API_KEY": "variable"}, None),
    ],
)
def test_which_key_goes_where(
    base_url: str | None, api_key: str | None, environ: dict[str, str], key: str | None
) -> None:
    assert choose("m", base_url, api_key, environ=environ).api_key == key


def test_a_key_that_cannot_be_one_is_refused_without_showing_it() -> None:
    with pytest.raises(UsageError) as caught:
        choose("m", URL, "hunter22…")
    assert "hunter22" not in str(caught.value)


def test_an_unknown_offline_model_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match=", ".join(offline_names())):
        choose("offline/gpt")


def test_empty_options_are_refused_instead_of_ignored() -> None:
    with pytest.raises(UsageError, match="--model is empty"):
        choose("", environ={"OPENAI_API_KEY": "k"})
    with pytest.raises(UsageError, match="--base-url is empty"):
        choose("m", " ")


@pytest.mark.parametrize("name", ["model", "messages", "tools", "stream", "n"])
def test_parameters_that_belong_to_the_run_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'"):
        choose("m", params={"temperature": 1, name: 1})


def test_parameters_and_timeout_reach_the_spec() -> None:
    spec = choose("m", params={"temperature": 0.5})
    assert (spec.params, spec.request_timeout) == ({"temperature": 0.5}, 300)


def test_choosing_imports_nothing_heavy() -> None:
    code = (
        "import sys; import osmosis_ai.models.choice; "
        "print({'aiohttp', 'litellm', 'fastmcp', 'mcp', 'pydantic', 'openai'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_an_address_without_a_scheme_is_shown_with_one() -> None:
    with pytest.raises(UsageError, match=r"Write --base-url http://gpu-7:8000/v1$"):
        choose("m", "gpu-7:8000/v1")


def test_a_family_of_models_is_no_model() -> None:
    with pytest.raises(UsageError, match=", ".join(offline_names())):
        choose("offline")
