"""Which files can hold a test that ``pytest -m`` selects, told from their text: importing all takes a minute."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

_SUPPORT = Path(__file__).parent


def may_hold(path: Path, expression: str) -> bool:
    """Tell whether a test of a file may be selected: False only where the file's text rules it out.

    Args:
        path: A test file.
        expression: What follows ``-m``.
    """
    any_of, none_of = _conditions(expression)
    return (any_of is None or bool(any_of & named(path))) and not none_of & _of_every_test(path)


@cache
def named(path: Path) -> frozenset[str]:
    """Return the marks that a file or a module of `tests/support` which it imports from mentions."""
    text = path.read_text(encoding="utf-8")
    modules = [_SUPPORT / f"{name}.py" for name in re.findall(r"^ *from support\.(\w+) import", text, re.MULTILINE)]
    texts = [text, *(module.read_text(encoding="utf-8") for module in modules if module.exists())]  # or a package
    return frozenset(mark for text in texts for mark in re.findall(r"\bpytest\.mark\.(\w+)", text))


def _of_every_test(path: Path) -> frozenset[str]:
    assigned = re.findall(r"^pytestmark = (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(mark for value in assigned for mark in re.findall(r"\bpytest\.mark\.(\w+)", value))


@cache
def _conditions(expression: str) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return marks of which a selected test has at least one (None: not known), and marks that it has not."""
    try:
        return _any_of(tree := ast.parse(expression, mode="eval").body), _none_of(tree)
    except SyntaxError:  # pytest says it better
        return None, frozenset()


def _any_of(node: ast.expr) -> frozenset[str] | None:
    if isinstance(node, ast.Name):
        return frozenset({node.id})
    if not isinstance(node, ast.BoolOp):
        return None
    parts = [_any_of(value) for value in node.values]
    known = [part for part in parts if part is not None]
    if isinstance(node.op, ast.And):
        return known[0] if known else None
    return frozenset().union(*known) if len(known) == len(parts) else None


def _none_of(node: ast.expr) -> frozenset[str]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return frozenset().union(*map(_none_of, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Name):
        return frozenset({node.operand.id})
    return frozenset()
