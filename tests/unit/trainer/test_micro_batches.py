"""`auto_find_batch_size`: memory runs out, and the mathematics stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.resuming import StopAt
from support.tiny import Net, Task, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, StepOutput, TaskError, Trainer, set_seed
from hftrain.extras.batch_size.micro_batches import split_batch


class Limited(Net):
    """A network in double precision with dropout-free layers and memory for `limit` samples."""

    def __init__(self, limit: int = 1000, limit_later: int | None = None) -> None:
        super().__init__()
        self.limit, self.limit_later = limit, limit_later
        self.sizes: list[int] = []
        self.double()

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        if self.training:
            self.sizes.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        if self.limit_later is not None and len(self.sizes) > 8:
            self.limit = self.limit_later
        return super().forward(x.double(), labels)


class LimitedTask(Task):
    """The same as a task that reports numbers of its own."""

    def __init__(self, limit: int = 1000) -> None:
        super().__init__()
        self.model = Limited(limit)

    def training_step(self, batch: Any) -> StepOutput:
        loss, _ = self.model(**batch)
        return StepOutput(loss=loss, logs={"one": 1.0})


def train(folder: Path, model: Any, *, resume: bool = False, callbacks: Any = (), **options: Any) -> Trainer:
    """Train two epochs of 22 samples in batches of 8, the last of them short."""
    given = {"per_device_train_batch_size": 8, "lr_scheduler_type": "cosine", "warmup_steps": 2, **options}
    trainer = Trainer(model, make_arguments(folder, **given), train_dataset=make_rows(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [
        {name: entry[name] for name in ("loss", "grad_norm", "learning_rate", "epoch", "one") if name in entry}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def assert_equal(ours: Trainer, theirs: Trainer) -> None:
    assert ours.state.global_step == theirs.state.global_step
    for one, other in zip(logged(ours), logged(theirs), strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=1e-12)
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, theirs.model.state_dict()[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [Limited, LimitedTask])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("limit", "found"), [(8, 8), (5, 4), (3, 2), (1, 1)])
def test_gradients_schedule_and_steps_stay(
    tmp_path: Path, kind: Any, accumulation: int, limit: int, found: int
) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    set_seed(1)
    undisturbed = train(tmp_path, kind(), **options)
    set_seed(1)
    fitted = train(tmp_path, kind(limit), auto_find_batch_size=True, **options)
    assert_equal(fitted, undisturbed)
    assert fitted.state.train_batch_size == found
    assert max(fitted.model.sizes[-3:]) <= limit


class OwnStep(Trainer):
    """A step that is written out, and knows nothing of a batch's parts."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class Divided(Limited):
    """Divides by the item count that it is given."""

    def forward(self, x: torch.Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:
        loss, logits = super().forward(x, labels)
        return (loss if num_items_in_batch is None else loss * len(x) / num_items_in_batch), logits


def test_parts_that_a_step_of_the_users_own_would_not_weigh_are_refused(tmp_path: Path) -> None:
    def run(model: Any, **options: Any) -> Trainer:
        arguments = make_arguments(tmp_path, per_device_train_batch_size=8, max_steps=3, **options)
        trainer = OwnStep(model, arguments, train_dataset=make_rows())
        trainer.train()
        return trainer

    with pytest.raises(ConfigError, match=r"training_step of OwnStep does not call it.*smaller_batch"):
        run(Limited(5), auto_find_batch_size=True)
    run(Limited(5), auto_find_batch_size="smaller_batch")
    # Nothing is cut, or the model divides by the items of the whole step.
    for limits in ((8, 8), (5, 1000)):
        set_seed(1)
        fitted = run(Divided(limits[0]), auto_find_batch_size=True)
        set_seed(1)
        assert_equal(fitted, run(Divided(limits[1])))


def test_random_numbers_stay_where_nothing_is_cut(tmp_path: Path) -> None:
    set_seed(1)
    undisturbed = train(tmp_path, Net(dropout=0.5))
    set_seed(1)
    fitted = train(tmp_path, Net(dropout=0.5), auto_find_batch_size=True)
    for one, other in zip(logged(fitted), logged(undisturbed), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_running_statistics_do_not_see_the_rehearsal(tmp_path: Path) -> None:
    def make() -> Net:
        set_seed(1)
        model = Net()
        model.layers[1] = nn.BatchNorm1d(8)
        return model

    undisturbed, fitted = train(tmp_path, make()), train(tmp_path, make(), auto_find_batch_size=True)
    ours, theirs = fitted.model.layers[1], undisturbed.model.layers[1]
    assert ours.num_batches_tracked == theirs.num_batches_tracked
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_memory_that_runs_out_later_cuts_further(tmp_path: Path, accumulation: int) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    set_seed(1)
    undisturbed = train(tmp_path, Limited(), **options)
    set_seed(1)
    fitted = train(tmp_path, Limited(4, limit_later=2), auto_find_batch_size=True, **options)
    assert_equal(fitted, undisturbed)
    assert fitted.state.train_batch_size == 2


def test_found_size_is_recorded_and_reused(tmp_path: Path) -> None:
    set_seed(1)
    undisturbed = train(tmp_path / "a", Limited())
    set_seed(1)
    train(tmp_path / "b", Limited(3), callbacks=[StopAt(4)], auto_find_batch_size=True)
    state = json.loads((tmp_path / "b" / "checkpoint-4" / "trainer_state.json").read_text("utf-8"))
    assert state["train_batch_size"] == 2
    model = Limited(3)
    resumed = train(tmp_path / "b", model, resume=True, auto_find_batch_size=True)
    assert_equal(resumed, undisturbed)
    assert resumed.state.train_batch_size == 2
    assert max(model.sizes) == 2  # nothing was tried that does not fit


def test_single_sample_that_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="single sample per micro-batch"):
        train(tmp_path, Limited(0), auto_find_batch_size=True)


@pytest.mark.parametrize("setting", [True, "smaller_batch"])
def test_other_errors_pass(tmp_path: Path, setting: Any) -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        train(tmp_path, Broken(), auto_find_batch_size=setting)


def test_batch_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(TaskError, match="cannot be cut"):
        split_batch(object(), 2)


def test_lists_with_an_entry_for_each_sample_are_cut_with_the_tensors() -> None:
    names, boxes, layers = list("abcde"), [torch.ones(n, 4) for n in range(5)], [torch.ones(5, 1)] * 5
    batch = {"x": torch.arange(5), "names": names, "boxes": boxes, "layers": layers, "ids": numpy.arange(5), "of": "x"}
    parts = split_batch(batch, 2)
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert [[len(box) for box in part["boxes"]] for part in parts] == [[0, 1], [2, 3], [4]]
    assert [[len(layer) for layer in part["layers"]] for part in parts] == [[2] * 5, [2] * 5, [1] * 5]
    assert [part["ids"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["of"] for part in parts] == ["x"] * 3
    pairs = split_batch((torch.arange(5), names), 3)
    assert [(pair[0].tolist(), pair[1]) for pair in pairs] == [([0, 1, 2], names[:3]), ([3, 4], names[3:])]


def test_smaller_batch_starts_again_with_half_the_size(tmp_path: Path) -> None:
    trainer = train(tmp_path, Limited(3), auto_find_batch_size="smaller_batch", save_strategy="epoch")
    assert trainer.state.global_step == 22  # 11 batches of 2 in each of two epochs
    assert trainer.state.train_batch_size == 2
    assert trainer.args.per_device_train_batch_size == 8
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == list(range(1, 23))
    model = Limited(3)
    resumed = train(
        tmp_path, model, resume=True, auto_find_batch_size="smaller_batch", save_strategy="epoch", num_train_epochs=3
    )
    assert resumed.state.global_step == 33
    assert max(model.sizes) == 2
