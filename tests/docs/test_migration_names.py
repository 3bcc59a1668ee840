"""Every name on hftrain's side of the migration guides' tables must exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.source import ROOT, handed_on

import hftrain
from hftrain import (
    Engine,
    SchedulerType,
    StepOutput,
    TaskModule,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    loggers,
    precisions,
    strategies,
)
from hftrain.core.events import EVENTS
from hftrain.optim.optimizers import optimizers

GUIDES = ("from_lightning.md", "from_accelerate_composer.md", "from_transformers.md")
# The values that a setting can have, where they are names.
VALUES: dict[str, set[str]] = {
    "strategy": {"auto", *strategies.names()},
    "precision": set(precisions.names()),
    "optim": set(optimizers.names()),
    "report_to": {"none", "all", *loggers.names()},
    "loggers": set(loggers.names()),
    "lr_scheduler_type": {member.value for member in SchedulerType},
}
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
KEYWORDS = FIELDS | set(inspect.signature(Trainer).parameters)


class Line(TaskModule):
    def training_step(self, batch: Any) -> StepOutput:
        return StepOutput(loss=self.model(batch).mean())


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return what the first parts of dotted names stand for."""
    args = TrainingArguments(str(tmp_path_factory.mktemp("run")), report_to="none", use_cpu=True)
    with Engine(strategy="single") as engine:
        yield {
            **dict.fromkeys(handed_on()),  # without transformers, they cannot be had
            **{name: getattr(hftrain, name) for name in dir(hftrain) if not name.startswith("_")},
            "args": args,
            "control": TrainerControl(),
            "engine": engine,
            "state": TrainerState(),
            "trainer": Trainer(Line(torch.nn.Linear(1, 1)), args),
            "strategies": strategies,
            "torch": torch,
        }


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the code in the cells of columns headed "hftrain" of tables that compare, with line numbers."""
    column = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if column is None:
            is_names = "hftrain" in cells and cells[-1] in ("notes", "purpose")
            column = cells.index("hftrain") if is_names else -1
        elif column >= 0 and not set(cells[column]) <= set("- "):
            for span in re.findall(r"`([^`]+)`", cells[column]):
                yield number, span


def missing(span: str, roots: dict[str, Any]) -> str | None:
    """Return what of a piece of code does not exist; None if all does."""
    if re.fullmatch(r"\w+=", span):  # a keyword without a value
        return None if span[:-1] in KEYWORDS else span
    try:
        node = ast.parse(f"_({span})", mode="eval").body
    except SyntaxError:
        return span
    assert isinstance(node, ast.Call)
    wrong = [_missing_keyword(each, KEYWORDS) for each in node.keywords]
    wrong += [_missing_name(each, roots) for each in node.args]
    return next((each for each in wrong if each), None)


def _missing_keyword(keyword: ast.keyword, known: set[str]) -> str | None:
    name = keyword.arg or "**"
    if name not in known:
        return f"{name}="
    values = [node.value for node in ast.walk(keyword.value) if isinstance(node, ast.Constant)]
    wrong = [value for value in values if value not in VALUES.get(name, set(values))]
    return f"{name}={wrong[0]!r}" if wrong else None


def _missing_name(node: ast.expr, roots: dict[str, Any]) -> str | None:
    if isinstance(node, ast.Call):
        wrong = _missing_name(node.func, roots)
        if wrong or not node.keywords:
            return wrong
        known = set(inspect.signature(_resolve(ast.unparse(node.func), roots)).parameters)
        return next((found for each in node.keywords if (found := _missing_keyword(each, known))), None)
    name = ast.unparse(node)
    if name in EVENTS or name in KEYWORDS:
        return None
    try:
        _resolve(name, roots)
    except (AttributeError, KeyError):
        return name
    return None


def _resolve(name: str, roots: dict[str, Any]) -> Any:
    first, *others = name.split(".")
    found, path = roots[first], first
    for part in others:
        path = f"{path}.{part}"
        if not hasattr(found, part) and inspect.ismodule(found):
            try:
                importlib.import_module(path)
            except ImportError:
                raise AttributeError(path) from None
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("guide", GUIDES)
def test_names_of_the_guide_exist(guide: str, roots: dict[str, Any]) -> None:
    found = list(spans(ROOT / "docs" / guide))
    wrong = [f"line {number}: {name}" for number, span in found if (name := missing(span, roots))]
    assert wrong == []
    assert len(found) >= 10


@pytest.mark.parametrize("guide", GUIDES[:2])
def test_what_has_no_name_comes_with_a_word_and_a_reason(guide: str) -> None:
    rows = re.findall(
        r"^\|.*\| (?!hftrain)([a-z ]+) \|(.*)\|$", (ROOT / "docs" / guide).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {word for word, _ in rows} <= {"automatic", "by hand", "not possible"}
    assert len(rows) >= 15
    assert all(reason.strip() for _, reason in rows)


@pytest.mark.parametrize(
    ("span", "wrong"),
    [
        ("max_epochs=3", "max_epochs="),
        ("Trainer(precision='bf16-mixed')", "precision='bf16-mixed'"),
        ("strategy='ddp_spawn'", "strategy='ddp_spawn'"),
        ("SavePolicy(keep=3)", "keep="),
        ("trainer.fit()", "trainer.fit"),
        ("on_train_batch_end", "on_train_batch_end"),
        ("torch.nn.Missing", "torch.nn.Missing"),
        ("engine.setup", None),
    ],
)
def test_a_wrong_name_is_found(span: str, wrong: str | None, roots: dict[str, Any]) -> None:
    assert missing(span, roots) == wrong
