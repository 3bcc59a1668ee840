"""Every script in examples/ is on the page that lists them; the notebook of a story holds its whole script."""

from __future__ import annotations

import ast
import re
import runpy

import pytest
from support.source import ROOT

# reviews.py makes the data of two others.
SCRIPTS = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {"reviews.py"})
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_example_is_listed_and_says_how_to_run_it(name: str) -> None:
    assert f"`python examples/{name}`" in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text(encoding="utf-8")))
    assert f"python examples/{name}" in str(docstring)


@pytest.mark.parametrize(("name", "page"), NOTEBOOKS["stories"]().items())
def test_notebook_has_each_cell_of_the_script_once(name: str, page: object) -> None:
    script = ROOT / "examples" / f"{name}.py"
    code = [text for kind, text in NOTEBOOKS["cells"](page, script) if kind == "code" and "%%writefile" not in text]
    assert code == re.split(r"^# %% \w+\n", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
