"""One dtype throughout: parameters, inputs, results, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows, make_trainer, train
from torch import nn

from hftrain import ConfigError, Trainer, set_seed
from hftrain.precision.registry import precisions
from hftrain.step.legality import find_device_refusal

CPU = torch.device("cpu")
DTYPES = {"bf16_true": torch.bfloat16, "fp16_true": torch.float16, "fp64": torch.float64}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_everything_is_in_one_dtype_and_inputs_are_cast_while_open(name: str, dtype: torch.dtype) -> None:
    precision, model = precisions.create(name), nn.BatchNorm1d(4)
    precision.open(CPU, torch.amp.GradScaler)
    assert precision.convert(precision.convert(model)) is model
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.running_mean.dtype == dtype
    assert model.num_batches_tracked.dtype == torch.int64
    assert model(torch.randn(2, 4)).dtype == model(input=torch.randn(2, 4)).dtype == dtype
    assert len(model._forward_pre_hooks) == 1
    precision.close()
    assert not model._forward_pre_hooks
    policy = precision.policy
    assert policy.param_dtype == policy.compute_dtype == policy.reduce_dtype == dtype


@pytest.mark.filterwarnings("ignore:AdamW keeps the squares")
@pytest.mark.parametrize("name", DTYPES)
def test_trainer_trains_evaluates_saves_and_resumes(tmp_path: Path, name: str) -> None:
    def make(**options: Any) -> Trainer:
        return make_trainer(
            tmp_path, eval_dataset=make_rows(7), precision=name, adam_epsilon=1e-4, eval_strategy="epoch",
            save_strategy="epoch", num_train_epochs=3, **options,
        )  # fmt: skip

    trainer = make()
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {DTYPES[name]}
    state = next(iter(trainer.optimizer.state.values()))
    assert state["exp_avg"].dtype == DTYPES[name]
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    for name_, value in trainer.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name_])


def test_float64_equals_a_plain_double_loop(tmp_path: Path) -> None:
    rows = make_rows(8)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    twin.double()
    train(
        tmp_path, model, train_dataset=rows, precision="fp64", max_steps=1, per_device_train_batch_size=8, optim="sgd",
        learning_rate=0.1, max_grad_norm=0.0,
    )  # fmt: skip
    x, labels = torch.stack([row["x"] for row in rows]).double(), torch.stack([row["labels"] for row in rows])
    twin(x, labels)[0].backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad, rtol=1e-12, atol=1e-14)


def test_epsilon_that_vanishes_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="fp16_true")
    with pytest.raises(ConfigError, match=r"eps=1e-08 is 0 in torch.float16.*Use precision='fp16'"):
        trainer.train()


def test_devices_without_the_dtype_are_named() -> None:
    assert "MPS has no float64" in (find_device_refusal(precisions.create("fp64").policy, "mps", None) or "")
    refusal = find_device_refusal(precisions.create("bf16_true").policy, "cuda", (7, 5))
    assert "compute capability 8.0" in (refusal or "")


@pytest.mark.parametrize(("precision", "epsilon", "is_near"), [("fp16", 1e-8, True), ("fp16_true", 1e-4, False)])
@pytest.mark.filterwarnings("ignore:AdamW keeps the squares")
def test_precision_that_is_advised_in_place_of_pure_float16_trains_like_float32(
    tmp_path: Path, precision: str, epsilon: float, is_near: bool
) -> None:
    """The loss is small, and so are its gradients, as they are in large models."""

    class Small(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            loss, logits = super().forward(x, labels)
            return loss * 1e-3, logits

    def weights(name: str | None, **options: Any) -> torch.Tensor:
        set_seed(3)
        model = Small()
        if name is not None:
            train(tmp_path, model, precision=name, max_grad_norm=0.0, **options)
        return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])

    expected, start = weights("fp32"), weights(None)
    distance = float((weights(precision, adam_epsilon=epsilon) - expected).norm() / (expected - start).norm())
    assert (distance < 0.1) is is_near, distance


def test_adam_in_float16_is_warned_about(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, max_steps=1, adam_epsilon=1e-4)
    with pytest.warns(UserWarning, match="AdamW keeps the squares of gradients in float16"):
        Trainer(Net(), arguments, train_dataset=make_rows(4), precision="fp16_true").train()
