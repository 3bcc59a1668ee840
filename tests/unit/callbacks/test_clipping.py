"""GradientClipping: each type against torch's own functions, in every precision, refused where it cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import assert_same
from support.tiny import Net, StepEngine, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, GradientClipping, StrategyError, Trainer, TrainerCallback, set_seed
from hftrain.optim.extras.in_backward import UpdatesInBackward
from hftrain.strategies import SingleDeviceStrategy


class ByHand(TrainerCallback):
    """Clips as one does with transformers' Trainer."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_value_(kwargs["model"].parameters(), 0.01)


class Norms(TrainerCallback):
    """Note the norms of the groups and the largest element before each update."""

    def __init__(self) -> None:
        self.norms: list[list[float]] = []
        self.largest = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        groups = [[p.grad for p in group["params"]] for group in kwargs["optimizer"].param_groups]
        self.norms.append([float(nn.utils.get_total_norm(group)) for group in groups])
        self.largest = max([self.largest, *(float(each.abs().max()) for group in groups for each in group)])


def make(folder: Path, *callbacks: Any, kind: Any = Trainer, model: Any = None, **options: Any) -> Any:
    set_seed(3)
    parts = {name: options.pop(name) for name in ("precision", "strategy") if name in options}
    arguments = {"max_grad_norm": 0.0, "max_steps": 4, "learning_rate": 0.1, "weight_decay": 0.1, **options}
    rows = make_rows(32)
    return kind(
        model or Net(), make_arguments(folder, **arguments), train_dataset=rows, callbacks=[*callbacks], **parts
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_by_value_as_transformers_does_it_by_hand(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = make(tmp_path / "ours", GradientClipping("value", 0.01), optim="sgd")
    ours.train()
    set_seed(3)
    theirs_args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), use_cpu=True, report_to=[], max_grad_norm=0.0, max_steps=4, learning_rate=0.1,
        weight_decay=0.1, optim="sgd", per_device_train_batch_size=ours.args.per_device_train_batch_size,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip

    class Callback(transformers.TrainerCallback):
        on_pre_optimizer_step = ByHand.on_pre_optimizer_step

    theirs = transformers.Trainer(Net(), theirs_args, train_dataset=make_rows(32), callbacks=[Callback()])
    theirs.train()
    assert_same(weights(ours), {name: value.clone() for name, value in theirs.model.state_dict().items()})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_by_value_sees_unscaled_gradients(tmp_path: Path, precision: str) -> None:
    norms = Norms()
    make(tmp_path, GradientClipping("value", 0.01), norms, precision=precision, max_steps=12).train()
    assert 0.009 < norms.largest <= 0.01 + 1e-9


def test_per_group(tmp_path: Path) -> None:
    norms = Norms()
    trainer = make(tmp_path, GradientClipping("group", 0.05), norms, logging_steps=1, precision="fp16", max_steps=12)
    trainer.train()
    assert max(map(max, norms.norms)) <= 0.05 + 1e-6
    assert norms.norms[-1] == pytest.approx([0.05, 0.05], rel=1e-3)
    assert max(entry.get("grad_norm", 0.0) for entry in trainer.state.log_history) > 0.1  # before clipping


def test_group_with_a_threshold_of_its_own() -> None:
    clipping, first, second = GradientClipping("group", 1.0), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    strategy = SingleDeviceStrategy()
    norm = clipping._clip_group([{"params": [first]}, {"params": [second], "max_grad_norm": 5.0}], strategy)
    assert float(norm) == pytest.approx(125**0.5)
    assert [float(p.grad.norm()) for p in (first, second)] == pytest.approx([1.0, 5.0], rel=1e-4)


def test_adaptive_by_units() -> None:
    clipping = GradientClipping("adaptive", 0.1)
    matrix, vector = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])), nn.Parameter(torch.ones(4))
    matrix.grad = torch.tensor([[30.0, 40.0], [3.0, 4.0], [0.01, 0.0]])
    vector.grad = torch.full((4,), 2.0)
    before = matrix.grad[2].clone()
    clipping._clip_adaptive([{"params": [matrix, vector]}], None)
    assert matrix.grad[0].tolist() == pytest.approx([0.3, 0.4])
    assert matrix.grad[1].tolist() == pytest.approx([0.6e-4, 0.8e-4])
    assert torch.equal(matrix.grad[2], before)
    assert vector.grad.tolist() == pytest.approx([0.1] * 4)


@pytest.mark.parametrize(("kind", "threshold"), [("norm", 1.0), ("value", 0.0), ("adaptive", float("nan"))])
def test_settings_are_checked(kind: str, threshold: float) -> None:
    with pytest.raises(ConfigError, match="clipping_type"):
        GradientClipping(kind, threshold)


def test_second_clipping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_grad_norm=0"):
        make(tmp_path, GradientClipping("value", 1.0), max_grad_norm=1.0).train()


class Early(UpdatesInBackward, torch.optim.SGD):
    pass


def test_engines_and_early_updates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="engine"):
        make(tmp_path, GradientClipping("value", 1.0), strategy=StepEngine(use_cpu=True)).train()
    model = Net()
    trainer = make(tmp_path, GradientClipping("value", 1.0), model=model)
    trainer.optimizer = Early(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="backward"):
        trainer.train()
