"""How far the parts of the package know each other, and its size: limits that fall, and rise for a feature only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from arch.test_foreign import NAMES, PUBLIC
from support.source import ROOT, Module, functions, modules

from hftrain.run.parts import TrainerHooks

# The protocol of a Trainer: a run calls them on it.
HOOKS = {*vars(TrainerHooks), *TrainerHooks.__annotations__}
# 46,804 were there before the features of 2026-11: the weekly craft has 4908, the flight log 2860, meshes 4763;
# 166 lines were taken away elsewhere.
MAX_LINES = 59_100
MAX_TEST_LINES = 79_900
MAX_FILES = 384


def circles() -> list[set[str]]:
    """Return the sets of modules that reach each other by imports, those for type checkers and in functions too."""
    known = {module.name for module in modules()}
    edges = {module.name: set(_imported(module, known)) - {module.name} for module in modules()}
    reached = {name: _reach(name, edges) for name in edges}
    found = ({name} | {other for other in reached[name] if name in reached[other]} for name in reached)
    return [circle for circle in found if len(circle) > 1]


def _imported(module: Module, known: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in inner)


def _reach(name: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for target in edges.get(waiting.pop(), set()) - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def takes_trainer(module: Module) -> Iterator[str]:
    """Yield the functions that are given a Trainer."""
    for function in functions(module.tree):
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if each.annotation is not None and ast.unparse(each.annotation).strip("'\"") == "Trainer":
                yield f"{module.at(function)} {function.name}"


def private_reaches(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the underscored attributes that a file reads or writes of objects not its own, and where it does."""
    own = {f.name for f in functions(module.tree)} | HOOKS
    own |= {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or _is_self(node.value) or node.attr in own | PUBLIC:
            continue
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr, f"{module.at(node)}: {ast.unparse(node)}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_nobody_is_given_a_trainer() -> None:
    assert [found for module in modules() for found in takes_trainer(module)] == []


def test_private_attributes_stay_with_their_objects() -> None:
    reaches = [found for module in modules() for found in private_reaches(module)]
    listed = NAMES | {"_VALID_DICT_FIELDS"}  # the last one transformers' clients read and write too
    assert [place for name, place in reaches if name not in listed] == []


def test_package_grows_for_features_only() -> None:
    lengths = [len(module.path.read_text("utf-8").splitlines()) for module in modules()]
    assert sum(lengths) <= MAX_LINES
    assert len(lengths) <= MAX_FILES


def test_tests_grow_for_features_only() -> None:
    files = (ROOT / "tests").rglob("*.py")
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= MAX_TEST_LINES
