"""How many files of ours one batch, one save, one resume and one evaluation run through: who follows one reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.source import PACKAGE, ROOT
from torch import nn

from hftrain import TaskModule, Trainer, TrainingArguments

# docs/design/architecture.md names them. Limits may fall, never rise.
LIMITS = {"step": 18, "save": 52, "resume": 114, "evaluation": 49}


class Walks:
    """Note which files run while something is walked."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {}
        self._name: str | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename) if event == "call" and self._name is not None else None
        if path is not None and self._name is not None and path.is_relative_to(PACKAGE):
            self.files.setdefault(self._name, set()).add(str(path.relative_to(PACKAGE)))

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
        self.walks.begin("step" if self.num_steps == 2 else None)
        return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.walks.walking("save"):
            super()._save_checkpoint(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.walks.walking("evaluation"):
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
    found.begin("resume")
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    found.begin(None)
    resumed.evaluate()
    sys.setprofile(None)
    return found.files


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    # In a process of its own: what other tests leave in this one may run along.
    report = tmp_path_factory.mktemp("walks") / "files.json"
    code = f"import json; from arch.test_walks import walk; found = walk({str(report.parent)!r}); "
    code += f"json.dump({{name: sorted(files) for name, files in found.items()}}, open({str(report)!r}, 'w'))"
    path = os.pathsep.join([str(ROOT / "tests"), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
    return {name: set(files) for name, files in json.loads(report.read_text("utf-8")).items()}


def described() -> dict[str, set[str]]:
    """Return the files that the page on the architecture names in each walk."""
    page = (ROOT / "docs/design/architecture.md").read_text("utf-8")
    found = re.findall(r"<!-- walk: (\w+) -->\n```text\n(.*?)```", page, re.DOTALL)
    return {name: set(re.findall(r"[\w/]+\.py", text)) for name, text in found}


def test_page_names_files_that_there_are() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text("utf-8")
    inside = {name for name in re.findall(r"[\w/]+/[\w/]+\.py", page) if not name.startswith("docs/")}
    assert sorted(name for name in inside if not (PACKAGE / name).is_file()) == []


@pytest.mark.parametrize("name", ["step", "save", "resume"])
def test_page_describes_the_walk(walks: dict[str, set[str]], name: str) -> None:
    assert sorted(described()[name] - walks[name]) == []


@pytest.mark.parametrize("name", LIMITS)
def test_walk_goes_through_few_files(walks: dict[str, set[str]], name: str) -> None:
    assert 0 < len(walks[name]) <= LIMITS[name], sorted(walks[name])
