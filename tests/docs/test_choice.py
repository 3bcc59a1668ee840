"""The tables of docs/strategy_tables.md must be what `hftrain plan` computes."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
from support.source import ROOT


def test_page_holds_what_the_plan_computes() -> None:
    pytest.importorskip("transformers")
    choice = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/choice.py")))
    text = choice.PAGE.read_text(encoding="utf-8")
    assert {place["name"] for place in choice.PLACE.finditer(text)} == set(choice.MODELS)
    # The smallest takes seconds; the others follow from the same code.
    assert choice.fill(text, ("1B",)) == text, "run python docs/choice.py"
