"""The picture of a terminal shows what the commands print now, and fetches nothing."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

from sections import stable

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
RECORDING = ROOT / "docs" / "site" / "recording.py"


def texts(picture: Path) -> str:
    """Return what a picture says, without what differs between two runs."""
    found = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text(encoding="utf-8")))
    said = re.sub(r"\s+", " ", html.unescape(found))
    return re.sub(r"\d+\.\d m?s", "#", stable(said))


def test_the_picture_of_a_terminal_is_what_its_script_records(tmp_path: Path) -> None:
    subprocess.run([sys.executable, RECORDING, tmp_path / "terminal.svg"], check=True)
    shown = texts(PICTURE)
    assert "answered '#### 264', expected '2640'" in shown
    assert shown == texts(tmp_path / "terminal.svg"), "run python docs/site/recording.py and look at the picture"


def test_the_picture_fetches_nothing() -> None:
    content = PICTURE.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"]*", content) == ["http://www.w3.org/2000/svg"]
    assert "url(http" not in content
    assert "@import" not in content
    assert "/tmp" not in content
