"""Requests that schemathesis derives from the served description: valid and invalid ones, for every operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from platforms import Platform, rows, serving

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11")
QUIET = settings(
    max_examples=5, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with serving(tmp_path_factory.mktemp("platform")) as platform:
        assert platform.upload("sums", rows(4)).status == 200
        yield platform


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_each_operation_answers_as_it_is_described(platform: Platform, mode: str) -> None:
    description = platform.ask("GET", "/api/openapi.json").body
    headers = {"Authorization": f"Bearer {platform.token}"}
    # A name that follows the description may be of nothing.
    left_out = [schemathesis.checks.positive_data_acceptance]
    operations = 0
    for found in schemathesis.openapi.from_dict(description).get_all_operations():
        operation = found.ok()
        operations += 1

        @QUIET
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def answered(case: Any) -> None:
            case.call_and_validate(base_url=platform.url, headers=headers, excluded_checks=left_out)

        answered()
    assert operations > 30
