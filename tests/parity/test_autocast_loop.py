"""bf16 and fp16 equal a loop with `torch.autocast` and `GradScaler` written by hand, to the last bit."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Rows, at, make_arguments, make_rows
from torch import nn

from hftrain import Trainer, TrainerCallback, default_data_collator, set_seed
from hftrain.core.errors import TaskError
from hftrain.optim.groups import decay_parameter_names

NUM_STEPS = 50
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def batches(rows: Rows) -> Any:
    """Yield batches of 4 in the documented order, epoch after epoch."""
    epoch = 0
    while True:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        # As a DataLoader does.
        torch.empty((), dtype=torch.int64).random_()
        for start in range(0, len(rows), 4):
            yield default_data_collator([rows[i] for i in order[start : start + 4]])
        epoch += 1


def by_hand(
    model: nn.Module, rows: Rows, dtype: torch.dtype, max_norm: float, *, is_own: bool = False
) -> list[tuple[float, ...]]:
    """Train 50 steps with fused AdamW and a linear schedule; return loss, norm and rate of each."""
    decaying, named = set(decay_parameter_names(model)), list(model.named_parameters())
    # In the documented groups, for the norm is a sum in the optimizer's order.
    parameters = [p for n, p in named if n in decaying] + [p for n, p in named if n not in decaying]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (NUM_STEPS - step) / NUM_STEPS))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    history = []
    for _, batch in zip(range(NUM_STEPS), batches(rows), strict=False):
        with torch.autocast("cpu", dtype=dtype):
            loss, logits = model(**batch)
        if is_own:
            loss = contrast(logits.float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        rate, before = schedule.get_last_lr()[0], scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
        history.append((loss.item(), norm.item(), rate))
    return history


def contrast(logits: torch.Tensor) -> torch.Tensor:
    """Return a loss whose value depends on the dtype it is computed in."""
    assert logits.dtype == torch.float32
    logits.detach().numpy()
    return nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Contrasts(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        outputs = model(**inputs)
        loss = contrast(outputs[1])
        return (loss, outputs) if return_outputs else loss


class Steps(Trainer):
    def training_step(self, model: Any, inputs: Any, *options: Any) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = contrast(model(**inputs)[1])
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("settings", [{"fp16": True}, {"bf16": True, "torch_compile": True}, {"bf16": True}], ids=str)
@pytest.mark.parametrize("kind", [Contrasts, Steps, None])
def test_loss_of_the_users_own_is_computed_in_float32(tmp_path: Path, kind: Any, settings: Any) -> None:
    rows = make_rows(22)
    set_seed(5)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    expected = by_hand(twin, rows, DTYPES[next(iter(settings))], 0.5, is_own=True)
    options = {"torch_compile_backend": "eager"} if "torch_compile" in settings else {}
    arguments = make_arguments(
        tmp_path, max_steps=NUM_STEPS, max_grad_norm=0.5, weight_decay=0.0, **settings, **options
    )
    function = {} if kind else {"compute_loss_func": lambda outputs, labels: contrast(outputs[-1])}
    trainer = (kind or Trainer)(model, arguments, train_dataset=rows, **function)
    trainer.train()
    assert [e["loss"] for e in trainer.state.log_history if "loss" in e] == [loss for loss, *_ in expected]
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("name", DTYPES)
def test_losses_norms_rates_and_weights_are_those_of_a_hand_written_loop(tmp_path: Path, name: str) -> None:
    rows = make_rows(22)
    set_seed(5)
    model, twin = Net(dropout=0.2), Net(dropout=0.2)
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(9)
    expected = by_hand(twin, rows, DTYPES[name], 0.5)
    reseed = at("on_train_begin", lambda args, state, control, **kwargs: torch.manual_seed(9))
    arguments = make_arguments(tmp_path, max_steps=NUM_STEPS, max_grad_norm=0.5, weight_decay=0.0, **{name: True})
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[reseed])
    trainer.train()
    logged = [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    assert len(logged) == NUM_STEPS
    assert logged == expected
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


class Overflowing(Net):
    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.num_calls = at, 0

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        self.num_calls += 1
        loss, logits = super().forward(x, labels)
        if self.num_calls in self.at:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss, logits


def test_overflow_skips_its_step_and_schedule_step_and_is_logged(tmp_path: Path) -> None:
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights = [p.detach().clone() for p in kwargs["model"].parameters()]
            seen.append((kwargs["lr_scheduler"].last_epoch, state.global_step, weights))

    arguments = make_arguments(tmp_path, fp16=True, max_steps=6)
    trainer = Trainer(Overflowing(3, 5), arguments, train_dataset=make_rows(24), callbacks=[Watch()])
    trainer.train()
    assert [each[:2] for each in seen] == [(1, 1), (2, 2), (2, 3), (3, 4), (3, 5), (4, 6)]
    moved = [not all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True)) for one, other in pairwise(seen)]
    assert moved == [True, False, True, False, True]
    logged = [entry for entry in trainer.state.log_history if "loss_scale" in entry]
    assert [entry["skipped_steps"] for entry in logged] == [0, 0, 1, 1, 2, 2]
    assert [entry["loss_scale"] for entry in logged] == [2.0**k for k in (16, 16, 15, 15, 14, 14)]


class Clips(Trainer):
    at_every_micro_batch = False

    def training_step(self, *inputs: Any) -> torch.Tensor:
        loss = super().training_step(*inputs)
        if self.accelerator.sync_gradients or self.at_every_micro_batch:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
        return loss


class ClipsLate(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.accelerator.clip_grad_norm_(kwargs["model"].parameters(), 0.1)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("max_norm", [0.0, 1e9])
@pytest.mark.parametrize("is_late", [False, True])
def test_accelerators_clipping_sees_gradients_that_are_unscaled_once(
    tmp_path: Path, name: str, max_norm: float, is_late: bool
) -> None:
    rows = make_rows(22)
    set_seed(5)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    expected = by_hand(twin, rows, DTYPES[name], 0.1)
    arguments = make_arguments(
        tmp_path, max_steps=NUM_STEPS, max_grad_norm=max_norm, weight_decay=0.0, optim="adamw_torch", **{name: True}
    )
    late = ClipsLate()
    kind = Trainer if is_late else Clips
    trainer = late.trainer = kind(model, arguments, train_dataset=rows, callbacks=[late] if is_late else [])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([loss for loss, *_ in expected], rel=1e-5)


def test_clipping_scaled_gradients_before_all_are_there_is_refused(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, fp16=True, gradient_accumulation_steps=2)
    trainer = Clips(Net(), arguments, train_dataset=make_rows(24))
    trainer.train()
    trainer.at_every_micro_batch = True
    with pytest.raises(TaskError, match="sync_gradients is True"):
        trainer.train()
