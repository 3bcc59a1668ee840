"""How long a file and a function may be."""

from __future__ import annotations

import ast

from support.source import Function, Module, functions, modules

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
# The Trainer, one class with the documented surface; its docstrings document the public methods.
FACADE, MAX_FACADE_LINES = "trainer.py", 1_570


Documented = Function | ast.ClassDef


def docstring_lines(node: Documented) -> int:
    if ast.get_docstring(node) is None:
        return 0
    docstring = node.body[0]
    return (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1


def lines_without_docstring(function: Function) -> int:
    """Count a function's lines from `def` to its end, its docstring left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring_lines(function)


def lines_of(module: Module) -> int:
    """Count a file's lines; those of the facade without docstrings."""
    lines = len(module.path.read_text("utf-8").splitlines())
    if module.path.name != FACADE:
        return lines
    return lines - sum(docstring_lines(node) for node in ast.walk(module.tree) if isinstance(node, Documented))


def test_files_are_short() -> None:
    lengths = {module: lines_of(module) for module in modules()}
    limits = {module: MAX_FACADE_LINES if module.path.name == FACADE else MAX_FILE_LINES for module in lengths}
    assert [f"{m.at(m.tree)}: {n} lines" for m, n in lengths.items() if n > limits[m]] == []


def test_functions_are_short() -> None:
    assert [
        f"{module.at(function)} {function.name}: {lines_without_docstring(function)} lines"
        for module in modules()
        for function in functions(module.tree)
        # Half of the Trainer's constructor is its documented signature.
        if (module.path.name, function.name) != ("trainer.py", "__init__")
        if lines_without_docstring(function) > MAX_FUNCTION_LINES
    ] == []
