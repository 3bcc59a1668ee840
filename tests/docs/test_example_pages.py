"""Every script in examples/ is on the page that lists them."""

from __future__ import annotations

import ast

import pytest
from support.source import ROOT

# reviews.py makes the data of two others.
SCRIPTS = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {"reviews.py"})


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_is_listed_and_says_how_to_run_it(name: str) -> None:
    assert f"`python examples/{name}`" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8")))
    assert f"python examples/{name}" in str(docstring)
