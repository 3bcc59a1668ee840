"""The losses of the samples of an observed step."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.tiny import Task, make_arguments
from torch import nn
from torch.nn import functional as F

from hftrain import Trainer, TrainerCallback, set_seed
from hftrain.cli.replay import SampleObserver
from hftrain.extras.flight.observing import Observer
from hftrain.extras.flight.reading import EXACT, read_ledger


class Inner(NamedTuple):
    """A part of a batch."""

    x: Any
    names: Any


class Net(nn.Module):
    """Has a buffer that is replaced, dropout and batch normalization; its batches are nested."""

    def __init__(self, dropout: float = 0.0, *, has_norm: bool = False) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if has_norm else nn.Identity()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inner: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls = self.calls + 1
        logits = self.last(self.dropout(self.norm(torch.tanh(self.first(inner.x + 0.01 * self.calls)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make_data(num: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randint(0, 3, (), generator=generator)}
        for _ in range(num)
    ]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    inner = Inner(torch.stack([row["x"] for row in rows]), [str(row["labels"]) for row in rows])
    return {"inner": inner, "labels": torch.stack([row["labels"] for row in rows])}


class Keep(TrainerCallback):
    """Keep weights and buffers from before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.state = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}


def observe(folder: Path, make_model: Any, kind: Any = SampleObserver, **options: Any) -> tuple[dict[str, Any], Any]:
    """Observe step 5, and return what was written about its samples, and the state from before."""
    set_seed(3)
    args = {"num_train_epochs": 4, "per_device_train_batch_size": 3, "learning_rate": 0.1}
    args["remove_unused_columns"] = False
    arguments = make_arguments(folder, **{**args, **options.pop("arguments", {})})
    options = {"train_dataset": make_data(), "data_collator": collate, "flight_log": True, **options}
    keep = Keep()
    trainer = Trainer(make_model(), arguments, callbacks=[keep], **options)
    trainer.add_callback(kind(5, folder, trainer) if kind is SampleObserver else kind(5, folder))
    trainer.train()
    path = folder / "samples-rank0.json"
    return json.loads(path.read_text()) if path.exists() else {}, keep.state


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_and_norms_are_those_of_each_sample_before_the_update(tmp_path: Path, accumulation: int) -> None:
    found, state = observe(tmp_path, Net, arguments={"gradient_accumulation_steps": accumulation})
    assert found["problem"] is None
    line = read_ledger(tmp_path)[5][0]
    samples = [each for micro_step in line["samples"] for each in micro_step]
    assert [(each["micro_batch"], each["row"]) for each in found["samples"]] == [
        (number, row) for number in range(accumulation) for row in range(3)
    ]
    data = make_data()
    for sample, each in zip(samples, found["samples"], strict=True):
        net = Net()
        net.load_state_dict(state)
        loss = net(**collate([data[sample]]))["loss"]
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).norm()
        assert each["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert each["norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_observed_step_is_as_without_them(tmp_path: Path, accumulation: int) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    found, _ = observe(tmp_path / "a", partial(Net, 0.3, has_norm=True), arguments=options)
    observe(tmp_path / "b", partial(Net, 0.3, has_norm=True), Observer, arguments=options)
    assert len(found["samples"]) == 3 * accumulation
    modules = [(tmp_path / name / "modules-rank0.json").read_text() for name in "ab"]
    assert modules[0] == modules[1]
    lines = [read_ledger(tmp_path / name) for name in "ab"]
    assert list(lines[0]) == list(lines[1]) == [1, 2, 3, 4, 5]
    for step in lines[0]:
        one, two = ({name: line.get(name) for name in EXACT} for line in (lines[0][step][0], lines[1][step][0]))
        assert one == two


def test_random_numbers_are_the_same_for_each_sample(tmp_path: Path) -> None:
    twins = [make_data()[0]] * 24
    found, _ = observe(tmp_path, partial(Net, 0.5, has_norm=True), train_dataset=twins)
    assert len({(each["loss"], each["norm"]) for each in found["samples"]}) == 1


def join(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a batch whose tensors have different lengths."""
    return {"inner": Inner(torch.stack([row["x"] for row in rows]), None), "labels": rows[0]["labels"].reshape(1)}


class Joined(Net):
    def forward(self, inner: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(Inner(inner.x.mean(0, keepdim=True), None), labels)


def test_a_batch_that_cannot_be_divided_is_one_whole(tmp_path: Path) -> None:
    found, _ = observe(tmp_path, Joined, data_collator=join)
    assert [each["row"] for each in found["samples"]] == [None]
    assert found["samples"][0]["loss"] == pytest.approx(read_ledger(tmp_path)[5][0]["losses"][0], rel=1e-5)


class Picky(Net):
    def forward(self, inner: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(labels) == 1:
            raise ValueError("one row is not enough")
        return super().forward(inner, labels)


def test_what_cannot_be_computed_alone_is_said(tmp_path: Path) -> None:
    found, _ = observe(tmp_path, Picky)
    assert found == {"samples": [], "problem": "A sample alone cannot be computed: ValueError: one row is not enough"}
    assert (tmp_path / "modules-rank0.json").exists()


class Own(Task):
    automatic_optimization = False

    def training_step(self, batch: Any) -> Any:
        output = super().training_step(batch)
        self.optimizers["net"].minimize(output.loss)
        return output

    def configure_optimizers(self) -> Any:
        return {"net": torch.optim.SGD(self.model.parameters(), lr=0.1)}


def test_tasks_have_losses_unless_they_step_their_optimizers(tmp_path: Path) -> None:
    found, _ = observe(tmp_path / "a", Task, data_collator=None)
    assert (len(found["samples"]), found["problem"]) == (3, None)
    mean = sum(each["loss"] for each in found["samples"]) / 3
    assert mean == pytest.approx(read_ledger(tmp_path / "a")[5][0]["losses"][0], rel=1e-5)
    found, _ = observe(tmp_path / "b", Own, data_collator=None)
    assert found == {"samples": [], "problem": "Own steps its optimizers itself, or ZeRO-3 has split its weights."}
