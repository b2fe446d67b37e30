"""The man pages that `make man` writes."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from osmosis_ai.cli.man import man_pages

PAGES = dict(man_pages())


def test_every_command_has_a_page_with_its_options() -> None:
    assert {"osmosis.1", "osmosis-eval-run.1", "osmosis-runs-show.1", "osmosis-import.1"} <= PAGES.keys()
    page = PAGES["osmosis-runs-show.1"]
    assert r"osmosis\-runs\-show \- Show a run" in page
    assert '.SH "EXIT CODES"' in page
    assert r"\-\-run\-index" in page


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff isn't installed")
def test_pages_are_what_troff_reads() -> None:
    source = "\n".join(PAGES[name] for name in ("osmosis.1", "osmosis-eval.1", "osmosis-runs-export.1"))
    shown = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=source, capture_output=True, encoding="utf-8")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "osmosis runs export [OPTIONS] [RUN]" in shown.stdout
