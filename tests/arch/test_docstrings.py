"""Every public name says what it is for."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator

import pytest
from support.source import Function, Module, modules

Documented = ast.ClassDef | Function


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """Yield public functions, classes and methods with their dotted names; not overloads, setters, declarations."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            yield from public_definitions([*node.body, *node.orelse], prefix)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            yield from public_definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            is_declared = ast.unparse(node.body[0]) == "..."  # in a protocol, of methods documented elsewhere
            if not is_declared and not decorators & {"overload", "setter", "deleter"}:
                yield prefix + node.name, node


def inherited_docstring(module: Module, dotted: str) -> str | None:
    """Return the docstring that a method takes over from a base class of ours."""
    owner, _, name = dotted.rpartition(".")
    if not owner:
        return None
    kind = importlib.import_module(module.name)
    for part in owner.split("."):
        kind = getattr(kind, part)
    bases = [base for base in inspect.getmro(kind)[1:] if base.__module__.split(".")[0] == "hftrain"]
    return next((doc for base in bases if (doc := inspect.getdoc(base.__dict__.get(name)))), None)


def is_sentence(docstring: str | None) -> bool:
    """Tell whether the first line is there and ends as a sentence does."""
    lines = (docstring or "").strip().splitlines()
    return bool(lines) and lines[0].rstrip().endswith((".", "!", "?", ":"))


def test_modules_say_what_they_are_for() -> None:
    assert [m.at(m.tree) for m in modules() if not is_sentence(ast.get_docstring(m.tree))] == []


def test_public_names_say_what_they_are_for() -> None:
    assert [
        f"{module.at(node)} {dotted}"
        for module in modules()
        for dotted, node in public_definitions(module.tree.body)
        if not is_sentence(ast.get_docstring(node) or inherited_docstring(module, dotted))
    ] == []


@pytest.mark.parametrize(
    ("docstring", "is_one"), [(None, False), ("", False), ("Do it", False), ("Do it.", True), ("Do it\n.", False)]
)
def test_is_sentence_tells(docstring: str | None, is_one: bool) -> None:
    assert is_sentence(docstring) is is_one
