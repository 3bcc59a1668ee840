"""Pictures that pages show are pictures."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted(
    {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s:]+)\)", page.read_text())
    }
)


def test_pages_show_pictures() -> None:
    assert len(PICTURES) >= 5


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_picture_can_be_shown(path: Path) -> None:
    if path.suffix == ".svg":
        assert ElementTree.fromstring(path.read_text("utf-8")).tag == "{http://www.w3.org/2000/svg}svg"
    else:
        assert path.read_bytes().startswith(b"\x89PNG")
