"""The documents' sections that start programs (make, pytest, scripts, servers), run as in `test_documents.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from sections import Section, run_section, sections


@pytest.mark.parametrize("section", sections(starting_programs=True))
def test_a_section(section: Section, tmp_path: Path, clone: Path, servers: dict[str, str]) -> None:
    run_section(section, tmp_path, clone, servers)
