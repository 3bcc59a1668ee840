"""The documented rules of the training loop: what a model is given, how steps are cut, and where a run ends."""

from __future__ import annotations

import math
import os
import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.tiny import Net, Stream, make_arguments, make_rows, make_trainer, train
from torch import nn
from torch.nn.functional import cross_entropy

from hftrain import TaskError, Trainer, TrainerCallback, set_seed
from hftrain.strategies.single import SingleDeviceStrategy


class Acts(TrainerCallback):
    """Run one function at one event."""

    def __init__(self, event: str, function: Any) -> None:
        setattr(self, event, lambda args, state, control, **kwargs: function(state, control))


# -- seeds -----------------------------------------------------------------------------------------------------------


def scramble() -> None:
    random.seed()
    numpy.random.seed()
    torch.seed()


def test_weights_of_model_init_follow_the_seed_alone(tmp_path: Path) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        scramble()
        trainer = make_trainer(tmp_path, model_init=Net, seed=seed, max_steps=1, learning_rate=0.0)
        made = [p.detach().clone() for p in trainer.model.parameters()]
        scramble()
        trainer.train()
        assert all(torch.equal(ours, first) for ours, first in zip(trainer.model.parameters(), made, strict=True))
        return made

    first, again, other = weights(7), weights(7), weights(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "FLASH_ATTENTION_DETERMINISTIC": "1",
    "ASCEND_LAUNCH_BLOCKING": "1", "HCCL_DETERMINISTIC": "1",
}  # fmt: skip


@pytest.fixture
def determinism_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what full determinism changes in the whole process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.mark.parametrize("is_full", [True, False])
def test_full_determinism_is_for_the_process_and_only_on_request(
    tmp_path: Path, determinism_put_back: None, is_full: bool
) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    torch.backends.cudnn.benchmark = True
    train(tmp_path, full_determinism=is_full, max_steps=1)
    assert {name: os.environ.get(name) for name in VARIABLES} == (VARIABLES if is_full else dict.fromkeys(VARIABLES))
    assert torch.are_deterministic_algorithms_enabled() is is_full
    assert torch.backends.cudnn.deterministic is is_full
    assert torch.backends.cudnn.benchmark is not is_full
    with pytest.raises(RuntimeError, match="deterministic") if is_full else nullcontext():
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


# -- what a model is given -------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


class Holder(Mapping[str, Any]):
    """A mapping that can only be read, and is made of nothing but a dict."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_ = values

    def __getitem__(self, key: str) -> Any:
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


class Nested(nn.Module):
    """Take inputs of every shape, and see where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[Any] = []

    def forward(self, x: Any = None, pair: Any = None, parts: Any = None, extra: Any = None, **rest: Any) -> Any:
        self.seen.append((x, pair, parts, extra))
        return {"loss": (self.net.layers[0].weight * 0).sum() + 1.0}


@pytest.mark.parametrize("wrap", [dict, UserDict, Holder, OrderedDict])
def test_nested_inputs_are_moved_and_keep_their_form(tmp_path: Path, wrap: Any) -> None:
    one = torch.ones(4, 2)
    batch = {
        "x": one,
        "pair": Pair(one, [one, "text"]),
        "parts": [{"a": one}, {"a": (one, None)}],
        "extra": wrap({"inner": wrap({"deep": one})}),
    }
    model = Nested()
    trainer = train(
        tmp_path, model, train_dataset=[0] * 4, data_collator=lambda samples: wrap(batch), max_steps=1,
        remove_unused_columns=False,
    )  # fmt: skip
    # On the meta device a tensor that was moved can be told from one that was not.
    trainer.strategy = SingleDeviceStrategy(device="meta")
    trainer.strategy.launch()
    moved = trainer._prepare_inputs(wrap(batch))
    assert type(moved) is wrap
    (_, pair, parts, extra), found = model.seen[0], moved
    assert isinstance(pair, Pair)
    assert isinstance(found["pair"], Pair)
    assert found["pair"].left.is_meta
    assert found["pair"].right[0].is_meta
    assert found["pair"].right[1] == "text"
    assert found["parts"][0]["a"].is_meta
    assert found["parts"][1]["a"][0].is_meta
    assert type(extra) is type(found["extra"]) is wrap
    assert found["extra"]["inner"]["deep"].is_meta
    assert parts[1]["a"][1] is None
    assert not one.is_meta


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_empty_batch_names_the_columns_that_the_model_takes(tmp_path: Path, verb: str) -> None:
    rows = make_rows(4)
    trainer = make_trainer(tmp_path, train_dataset=rows, eval_dataset=rows, data_collator=lambda samples: {})
    with pytest.raises(TaskError, match=r"It is empty: no column .* Net\.forward takes \(.*x.*labels"):
        getattr(trainer, verb)()


# -- how steps are cut, and who divides ------------------------------------------------------------------------------


class Words(nn.Module):
    """A loss that is the mean over labels; with `config` and `save_pretrained` it passes for one of transformers."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def save_pretrained(self, folder: str) -> None:
        """Nothing is saved here."""

    def forward(self, x: torch.Tensor, labels: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.linear(x)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("position", [0, 1, 2])
def test_micro_batch_without_labels_has_no_share_and_spoils_no_gradient(tmp_path: Path, position: int) -> None:
    """Also where it is the first, by which it cannot be told whether the model divides."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"x": torch.randn(5, 4, generator=generator), "labels": torch.randint(0, 3, (5,), generator=generator)}
        for _ in range(3)
    ]
    order = torch.randperm(3, generator=torch.Generator().manual_seed(42)).tolist()
    rows[order[position]]["labels"] = torch.full((5,), -100)
    set_seed(0)
    model = Words()
    model(torch.stack([r["x"] for r in rows]), torch.stack([r["labels"] for r in rows]))["loss"].backward()
    expected = model.linear.weight.grad.clone()  # type: ignore[union-attr]
    found: list[torch.Tensor] = []
    arguments = make_arguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=1, max_grad_norm=0.0
    )
    keep = Acts("on_pre_optimizer_step", lambda state, control: found.append(model.linear.weight.grad.clone()))
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[keep])
    assert trainer.model_accepts_loss_kwargs
    trainer.train()
    torch.testing.assert_close(found[0], expected)


def test_function_that_ignores_the_count_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def ignores(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return cross_entropy(outputs[0], labels) + 1  # not the cross-entropy itself, whose kind of mean is proved

    def divides(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return cross_entropy(outputs[0], labels, reduction="sum") / num_items_in_batch

    for function, accumulation, is_named in ((divides, 3, False), (ignores, 1, False), (ignores, 3, True)):
        caplog.clear()
        train(tmp_path, compute_loss_func=function, gradient_accumulation_steps=accumulation, max_steps=1)
        assert ("Cannot prove what the loss of compute_loss_func is a mean over" in caplog.text) is is_named


@pytest.mark.parametrize("reduction", ["mean", "keyword"])
def test_loss_function_may_be_a_module_or_take_any_keyword(tmp_path: Path, reduction: str) -> None:
    class Criterion(nn.Module):
        def forward(self, outputs: Any, labels: Any) -> torch.Tensor:
            return cross_entropy(outputs[0], labels)

    def any_keyword(outputs: Any, labels: Any, **kwargs: Any) -> torch.Tensor:
        return cross_entropy(outputs[0], labels, reduction="sum") / kwargs["num_items_in_batch"]

    function = Criterion() if reduction == "mean" else any_keyword
    losses = []
    for size, accumulation in ((12, 1), (4, 3)):
        set_seed(0)
        trainer = train(
            tmp_path, train_dataset=make_rows(24), compute_loss_func=function, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, max_steps=2,
        )  # fmt: skip
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -- where a run ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_train_begin", "on_epoch_begin"])
def test_stop_ends_the_run_and_its_mean_loss_counts_every_step(tmp_path: Path, event: str) -> None:
    def stop(state: Any, control: Any) -> None:
        control.should_training_stop = state.global_step >= (12 if event == "on_step_end" else 0)

    arguments = make_arguments(tmp_path, num_train_epochs=2, logging_steps=5, learning_rate=0.0)
    set_seed(0)
    trainer = Trainer(Net(), arguments, train_dataset=make_rows(), callbacks=[Acts(event, stop)])
    output = trainer.train()
    # In the very last step; after the first epoch; before the first step; and within a step that ends as usual.
    steps = {"on_step_end": 12, "on_epoch_end": 6, "on_train_begin": 0, "on_epoch_begin": 1}[event]
    assert output.global_step == trainer.state.global_step == steps
    set_seed(0)
    each = train(tmp_path, max_steps=max(steps, 1), learning_rate=0.0)
    losses = [entry["loss"] for entry in each.state.log_history if "loss" in entry][:steps]
    # Those since the last log are counted; without a step there is nothing to divide by.
    assert output.training_loss == pytest.approx(sum(losses) / steps if steps else 0.0)
    assert all(math.isfinite(value) for value in output.metrics.values())


@pytest.mark.parametrize("max_steps", [2, 6, 7, 15])
def test_stream_is_read_again_until_max_steps(tmp_path: Path, max_steps: int) -> None:
    # 22 samples in batches of 4: 6 batches, the last of 2; with 2 to a step, 3 steps a pass.
    passes = []

    class Counting(Stream):
        def __iter__(self) -> Any:
            passes.append(1)
            return super().__iter__()

    arguments = make_arguments(tmp_path, max_steps=max_steps, gradient_accumulation_steps=2)
    trainer = Trainer(Net(), arguments, train_dataset=Counting(make_rows(22)))
    output = trainer.train()
    assert output.global_step == max_steps
    assert len(passes) == math.ceil(max_steps / 3)
    whole, rest = divmod(max_steps, 3)
    samples = output.metrics["train_samples_per_second"] * output.metrics["train_runtime"]
    # Counted as they came: 22 a pass and not 24.
    assert samples == pytest.approx(22 * whole + 8 * rest, rel=0.02)


def test_short_batches_of_an_evaluation_count_their_samples(tmp_path: Path) -> None:
    rows = make_rows(9)
    for data in (rows, Stream(rows)):
        trainer = Trainer(Net(), make_arguments(tmp_path), eval_dataset=data)
        output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation", prediction_loss_only=False)
        assert output.num_samples == 9
        assert len(output.predictions) == 9


# -- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_smoothing_keeps_labels_for_the_metrics(tmp_path: Path, is_stream: bool) -> None:
    rows = make_rows(9)
    seen: list[Any] = []

    class Sees(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            seen.append(labels)
            return super().forward(x, labels)

    def score(prediction: Any) -> dict[str, float]:
        assert prediction.label_ids.tolist() == [int(row["labels"]) for row in rows]
        return {"seen": len(prediction.label_ids)}

    set_seed(0)
    trainer = Trainer(
        Sees(), make_arguments(tmp_path, label_smoothing_factor=0.3), compute_metrics=score,
        eval_dataset=Stream(rows) if is_stream else rows,
    )  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_seen"] == 9
    assert seen == [None] * 3  # the labels were taken out, and the loss was made of the logits
    logits = trainer.model(torch.stack([row["x"] for row in rows]))[0]
    expected = cross_entropy(logits, torch.stack([row["labels"] for row in rows]), label_smoothing=0.3)
    assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
