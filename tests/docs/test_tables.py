"""The pages' tables must be those of the code."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.source import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))


@pytest.fixture
def tables() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(DOCS / "tables.py")))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 writes unions with Any otherwise")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_page_holds_the_tables_of_the_code(tables: SimpleNamespace, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "run python docs/tables.py"


def test_every_table_stands_on_a_page(tables: SimpleNamespace) -> None:
    places = [found["name"] for path in PAGES for found in tables.PLACE.finditer(path.read_text(encoding="utf-8"))]
    assert set(places) == set(tables.TABLES)


def test_fill_replaces_a_stale_table(tables: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables.TABLES, "new", lambda: "| now |\n")
    stale = "before\n<!-- table: new -->\n| then |\n<!-- end of table -->\nafter\n"
    assert tables.fill(stale) == stale.replace("then", "now")
