"""The house in numbers: `python tests/arch/house.py` prints each figure beside its ceiling and what is aimed at."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from arch.ceilings import CEILINGS, NOT_CORE
from support.source import PACKAGE, ROOT, Module, functions, modules
from torch import nn


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
    for function in functions(module.tree):
        arguments = function.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if each.annotation is not None and ast.unparse(each.annotation).strip("'\"") == "Trainer":
                yield f"{module.at(function)} {function.name}"


def private_reaches(module: Module) -> Iterator[str]:
    """Yield where a file reads or writes an underscored attribute that no object of this file has."""
    own = {function.name for function in functions(module.tree)}
    own |= {node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute) or _is_self(node.value) or node.attr in own:
            continue
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            yield f"{module.at(node)}: {ast.unparse(node)}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def lengths() -> dict[str, int]:
    """Return the number of lines of each source file, by its path in the package."""
    return {
        module.path.relative_to(PACKAGE).as_posix(): len(module.path.read_text("utf-8").splitlines())
        for module in modules()
    }


def imported_names(module: Module) -> int:
    return sum(len(node.names) for node in ast.walk(module.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))


def run_apart(code: str) -> Any:
    """Run code that may import from `tests` in a process of its own; return what it prints last, read as JSON."""
    path = os.pathsep.join([str(ROOT / "tests"), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    return json.loads(done.stdout.splitlines()[-1])


def train_plainly(folder: str, *, is_task: bool) -> None:
    """Train, evaluate, save and resume a small classifier with default settings."""
    from hftrain import TaskModule, Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Task(TaskModule):
        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(batch["x"]), batch["labels"])

    rows = [{"x": x, "labels": int(x.norm() < 1)} for x in torch.randn(64, 2)]
    settings = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "report_to": "none"}
    arguments = TrainingArguments(folder, disable_tqdm=True, **settings)
    for resumes in (False, True):
        model = Task(nn.Linear(2, 2)) if is_task else Net()
        Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train(resume_from_checkpoint=resumes or None)


def loaded_files(*, is_task: bool) -> list[str]:
    """Return the source files that a plain run loads, in a process of its own."""
    code = f"""
import json, sys, tempfile
from arch.house import train_plainly
with tempfile.TemporaryDirectory() as folder:
    train_plainly(folder, is_task={is_task})
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "hftrain"]
print(json.dumps([module.__file__ for module in ours if getattr(module, "__file__", None)]))
"""
    return [Path(name).relative_to(PACKAGE).as_posix() for name in run_apart(code)]


def walks() -> dict[str, set[str]]:
    """Return the files that a step, a save, a resume and an evaluation run through, and what `untyped` holds."""
    code = """
import json, tempfile
from arch.walks import walk
with tempfile.TemporaryDirectory() as folder:
    found = walk(folder)
print(json.dumps({name: sorted(each) for name, each in found.items()}))
"""
    return {name: set(found) for name, found in run_apart(code).items()}


def figures(walked: dict[str, set[str]]) -> dict[str, int]:
    """Measure everything that has a ceiling.

    Args:
        walked: What `walks` returns.
    """
    lines, facade = lengths(), next(module for module in modules() if module.name == "hftrain.trainer.trainer")
    core = {name: number for name, number in lines.items() if not name.startswith(NOT_CORE)}
    loaded = max(sum(lines[name] for name in loaded_files(is_task=is_task)) for is_task in (False, True))
    reaches = [place for module in modules() for place in private_reaches(module)]
    tests = (path.read_text("utf-8").splitlines() for path in (ROOT / "tests").rglob("*.py"))
    return {
        "source lines": sum(lines.values()),
        "source files": len(lines),
        "core lines": sum(core.values()),
        "lines that a plain run loads": loaded,
        "private reaches": len(reaches) + len(walked["untyped"]),
        "names imported by trainer.py": imported_names(facade),
        **{f"files of {each}": len(walked[each]) for each in ("a step", "a save", "a resume", "an evaluation")},
        "test lines": sum(map(len, tests)),
    }


def main() -> None:
    """Print the figures, and where the most lines and private reaches are."""
    walked = walks()
    print(f"{'':36}{'today':>8}{'ceiling':>9}{'goal':>8}")
    for name, number in figures(walked).items():
        print(f"{name:36}{number:8,}{CEILINGS[name].now:9,}{CEILINGS[name].goal:8,}")
    lines, loaded = lengths(), loaded_files(is_task=False)
    rooms = Counter(name.partition("/")[0] for name in lines)
    rooms_loaded: Counter[str] = Counter()
    for room in rooms:
        rooms[room] = sum(number for name, number in lines.items() if name.partition("/")[0] == room)
        rooms_loaded[room] = sum(lines[name] for name in loaded if name.partition("/")[0] == room)
    print("\nlines of each room, and of those, the lines that a plain run loads")
    for room, number in rooms.most_common():
        print(f"{room:20}{number:8,}{rooms_loaded[room]:8,}")
    reaches = Counter(
        module.path.relative_to(PACKAGE).as_posix() for module in modules() for _ in private_reaches(module)
    )
    print("\nprivate reaches: " + ", ".join(f"{name} {number}" for name, number in reaches.most_common()))
    print("\nuntyped parameters given an object of a higher floor: " + ", ".join(sorted(walked["untyped"])))


if __name__ == "__main__":
    main()
