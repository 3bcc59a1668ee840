"""The package's source as syntax trees, for the architecture tests."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hftrain"

# A room may import rooms of lower floors only.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("arguments",),
    ("preemption",),
    ("precision", "strategies", "data", "optim", "storage", "loggers"),
    ("task", "step", "callbacks", "checkpoint"),
    ("loops", "engine"),
    ("adapter",),
    ("rules", "evaluation"),
    ("run",),
    ("trainer",),
    ("extras",),
    ("compat",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: where it is, what it is called, and its syntax tree."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder below `hftrain` that the file lives in; empty for `hftrain/__init__.py`."""
        return "".join(self.name.split(".")[1:2])

    def at(self, node: ast.AST) -> str:
        """Word the place of a node, as an editor can open it."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@functools.cache
def modules() -> tuple[Module, ...]:
    """Parse every file of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(path, name, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return tuple(found)


def walk_outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported, and none inside a function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from walk_outside_functions(node)


def is_type_checking(node: ast.AST) -> bool:
    """Tell whether a node is an ``if TYPE_CHECKING:`` block, which never runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function and method, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def handed_on() -> dict[str, str]:
    """Return the public names that are transformers' own, with the modules there."""
    stub = (PACKAGE / "__init__.pyi").read_text(encoding="utf-8")
    return {name: home for home, name in re.findall(r"from (transformers\.\S+) import \(?\s*\w+ as (\w+)", stub)}
