"""How long a file and a function may be."""

from __future__ import annotations

import ast

import pytest
from support.source import Function, functions, modules

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def lines_without_docstring(function: Function) -> int:
    """Count a function's lines from `def` to its end, its docstring left out."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def test_files_are_short() -> None:
    # The facade is the documentation of the public methods, and may be longer.
    lengths = {m: len(m.path.read_text("utf-8").splitlines()) for m in modules() if m.path.name != "trainer.py"}
    assert [f"{m.at(m.tree)}: {n} lines" for m, n in lengths.items() if n > MAX_FILE_LINES] == []


def test_functions_are_short() -> None:
    assert [
        f"{module.at(function)} {function.name}: {lines_without_docstring(function)} lines"
        for module in modules()
        for function in functions(module.tree)
        if lines_without_docstring(function) > MAX_FUNCTION_LINES
    ] == []


@pytest.mark.parametrize(
    ("text", "lines"), [("def f():\n    return 1", 2), ('def f():\n    """One.\n\n    Two.\n    """\n    return 1', 2)]
)
def test_lines_without_docstring_counts(text: str, lines: int) -> None:
    assert lines_without_docstring(next(functions(ast.parse(text)))) == lines
