"""Make the notebooks of the example pages: ``python docs/notebooks.py FOLDER``.

Such a page tells the story and includes cells (``# %% name``) of a script. Its notebook has the page's text and every
cell of the script, so words and code exist once. A page offers its notebook for download; `nox -s examples` runs it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
SITE = "https://github.com/hftrain/hftrain/blob/main/docs/"
INCLUDE = re.compile(r'```\{literalinclude\} \.\./\.\./(examples/\w+\.py)\n:start-after: "# %% (\w+)"\n[^`]*```\n')


def stories() -> dict[str, Path]:
    """Return the pages that include cells, by the names of their scripts."""
    found = {page: INCLUDE.search(page.read_text("utf-8")) for page in sorted((DOCS / "examples").glob("*.md"))}
    return {Path(first[1]).stem: page for page, first in found.items() if first}


def cells(page: Path, script: Path) -> list[tuple[str, str]]:
    """Return ("markdown" or "code", text) of each cell: those that the page leaves out come before the next one."""
    code = re.split(r"^# %% \w+\n", script.read_text("utf-8"), flags=re.MULTILINE)
    names = ["", *re.findall(r"^# %% (\w+)$", script.read_text("utf-8"), flags=re.MULTILINE)]
    local = [script.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", code[0], re.MULTILINE)]
    found = [("code", f"%%writefile {path.name}\n{path.read_text('utf-8')}") for path in local if path.exists()]
    text, *included = INCLUDE.split(page.read_text("utf-8"))
    done = 0
    for name, after in zip(included[1::3], included[2::3], strict=True):
        end = names.index(name, done) + 1
        found += [("markdown", text), *(("code", each) for each in code[done:end])]
        text, done = after, end
    return [*found, *(("code", each) for each in code[done:]), ("markdown", text)]


def write_notebooks(folder: Path) -> None:
    """Write a notebook for each story; its links lead to the repository, and it makes its pictures itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in stories().items():
        notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}
        for number, (kind, text) in enumerate(cells(page, DOCS.parent / "examples" / f"{name}.py")):
            if kind == "markdown":
                text = re.sub(r"!\[.*\n|.*\{download\}.*\n", "", text)
                text = re.sub(r"\]\((?!https?:|#)", f"]({SITE}examples/", text)
            cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.strip()}
            notebook["cells"].append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook, indent=1), "utf-8")


if __name__ == "__main__":
    write_notebooks(Path(sys.argv[1]))
