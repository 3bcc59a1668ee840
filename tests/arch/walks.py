"""Which files of ours one batch, one save, one resume and one evaluation run through, in a training that is watched."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from support.source import FLOOR_OF, PACKAGE, Module, functions, modules
from torch import nn

from hftrain import TaskModule, Trainer, TrainingArguments


def untyped_parameters() -> dict[tuple[str, int], tuple[Module, list[str]]]:
    """Return the parameters of each function that may be anything, by the file and the line where it begins."""
    found = {}
    for module in modules():
        for function in functions(module.tree):
            given = function.args
            names = [
                each.arg
                for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)
                if each.arg not in ("self", "cls")
                and (each.annotation is None or ast.unparse(each.annotation).strip("'\"") in ("Any", "object"))
            ]
            line = min(node.lineno for node in (function, *function.decorator_list))
            found[str(module.path), line] = (module, names)
    return found


def floor_of(kind: type) -> int:
    """Return the floor of a class of ours, -1 of another."""
    return FLOOR_OF.get(kind.__module__.split(".")[1], -1) if kind.__module__.startswith("hftrain.") else -1


def highest_kind(value: Any) -> type | None:
    """Return the class of ours on the highest floor that a value is of."""
    return max(filter(lambda kind: floor_of(kind) >= 0, type(value).__mro__), key=floor_of, default=None)


class Walks:
    """Note which files run while something is walked, and which parameters without a type get a higher object."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {"untyped": set()}
        self._name: str | None = None
        self._untyped = untyped_parameters()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path, line = frame.f_code.co_filename, frame.f_code.co_firstlineno
        if event != "call" or not path.startswith(str(PACKAGE)):
            return
        if self._name is not None:
            self.files.setdefault(self._name, set()).add(Path(path).relative_to(PACKAGE).as_posix())
        if (path, line) in self._untyped:
            module, names = self._untyped[path, line]
            for name in names:
                kind = highest_kind(frame.f_locals.get(name))
                if kind is not None and floor_of(kind) > FLOOR_OF.get(module.room, 0):
                    place = f"{module.path.relative_to(PACKAGE).as_posix()} {frame.f_code.co_name}"
                    self.files["untyped"].add(f"{place}({name}: {kind.__name__})")

    def begin(self, name: str | None) -> None:
        self._name = name

    @contextmanager
    def walking(self, name: str) -> Iterator[None]:
        before, self._name = self._name, name
        try:
            yield
        finally:
            self._name = before


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

    evaluation_step = training_step


class Walked(Trainer):
    """Note the files of its second step, of its saves and evaluations, and of what comes before its first step."""

    walks: Walks
    num_steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.num_steps += 1
        self.walks.begin("a step" if self.num_steps == 2 else None)
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.walks.walking("a save"):
            super()._save_checkpoint(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.walks.walking("an evaluation"):
            return super().evaluate(*args, **kwargs)


def walk(folder: str) -> dict[str, set[str]]:
    """Train, save, resume and evaluate; return the files that ran, by walk."""
    found = Walks()
    data = [{"x": torch.ones(4) * i, "y": i % 2} for i in range(16)]

    def make(**options: Any) -> Walked:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            max_steps=4,
            per_device_train_batch_size=2,
            logging_steps=10,
            **options,
        )
        trainer = Walked(Task(), args, train_dataset=data, eval_dataset=data)
        trainer.walks = found
        return trainer

    sys.setprofile(found)
    make(save_strategy="steps", save_steps=3).train()
    resumed = make(save_strategy="no")
    found.begin("a resume")
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    found.begin(None)
    resumed.evaluate()
    sys.setprofile(None)
    return found.files
