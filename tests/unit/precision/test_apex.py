"""NVIDIA Apex.

Apex is on no package index, and its newest releases have no `amp`; so these tests bring a stand-in module that keeps to
the protocol Apex documents (`initialize`, `scale_loss`, `state_dict`, `load_state_dict`) and trains in float32.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer, TrainerCallback
from hftrain.adapter.precision import precision_request
from hftrain.core.errors import MissingDependencyError
from hftrain.precision.registry import precisions
from hftrain.step.legality import find_device_refusal, find_pair_refusal


class Amp(ModuleType):
    """Apex's documented protocol: a scaled loss, gradients unscaled on leaving, an overflow skips the next step."""

    def __init__(self) -> None:
        super().__init__("apex.amp")
        self.__spec__ = importlib.machinery.ModuleSpec("apex.amp", None)
        self.levels: list[str] = []
        self.scale = 8.0

    def initialize(self, model: Any, optimizer: Any, opt_level: str = "O1") -> tuple[Any, Any]:
        self.levels.append(opt_level)
        return model, optimizer

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        yield loss * self.scale
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(not p.grad.isfinite().all() for p in parameters):
            self.scale /= 2
            step = optimizer.step

            def skip(closure: Any = None) -> None:
                optimizer.step = step

            optimizer.step = skip
            for p in parameters:
                p.grad.zero_()
        else:
            for p in parameters:
                p.grad /= self.scale

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": 0}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["loss_scaler0"]["loss_scale"]


@pytest.fixture
def amp(monkeypatch: pytest.MonkeyPatch) -> Amp:
    """Install the stand-in, and allow it on the CPU."""
    apex, amp = ModuleType("apex"), Amp()
    apex.__spec__, apex.__path__, apex.amp = importlib.machinery.ModuleSpec("apex", None), [], amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    monkeypatch.setattr("hftrain.step.legality.find_device_refusal", lambda *args: None)
    return amp


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_arguments_choose_the_level(tmp_path: Path, amp: Amp, level: str) -> None:
    arguments = make_arguments(
        tmp_path, fp16=True, half_precision_backend="apex", fp16_opt_level=level, save_strategy="epoch"
    )
    trainer = Trainer(Net(), arguments, train_dataset=make_rows())
    assert trainer.precision.policy.name == f"apex_{level.lower()}"
    trainer.train()
    assert amp.levels == [level]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {entry["loss_scale"] for entry in logged} == {8.0}


def test_losses_and_clipping_are_those_of_unscaled_gradients(tmp_path: Path, amp: Amp) -> None:
    histories = []
    for options in ({}, {"fp16": True, "half_precision_backend": "apex"}):
        torch.manual_seed(3)
        trainer = Trainer(Net(), make_arguments(tmp_path, max_grad_norm=0.3, **options), train_dataset=make_rows())
        trainer.train()
        histories.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_overflow_skips_the_step_and_its_schedule_step(tmp_path: Path, amp: Amp) -> None:
    rates, weights = [], []

    class Overflow(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            loss, logits = super().forward(x, labels)
            if len(rates) == 1:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss, logits

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["lr_scheduler"].last_epoch)
            weights.append(next(kwargs["model"].parameters()).clone())

    arguments = make_arguments(
        tmp_path, fp16=True, half_precision_backend="apex", max_steps=3, logging_nan_inf_filter=True
    )
    Trainer(Overflow(), arguments, train_dataset=make_rows(), callbacks=[Watch()]).train()
    assert rates == [1, 1, 2]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert amp.scale == 4.0


def test_scale_is_saved_and_restored(tmp_path: Path, amp: Amp) -> None:
    def make() -> Trainer:
        arguments = make_arguments(tmp_path, fp16=True, half_precision_backend="apex", save_strategy="epoch")
        return Trainer(Net(), arguments, train_dataset=make_rows())

    make().train()
    amp.scale = 1.0
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert amp.scale == 8.0


def test_absent_apex_names_the_successor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    precision = precisions.create("apex_o1")
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.delitem(sys.modules, "apex")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"Apex is not installed.*successor.*precision='fp16'"):
        precision.check_available()


def test_apex_without_amp_names_the_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "apex" else None)
    with pytest.raises(MissingDependencyError, match=r"has no amp: it was removed.*successor"):
        precisions.create("apex_o2").check_available()


def test_missing_package_is_refused_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hftrain.step.legality.find_device_refusal", lambda *args: None)
    with pytest.raises(MissingDependencyError, match="apex_o1"):
        Trainer(Net(), make_arguments(tmp_path, fp16=True, half_precision_backend="apex"))


def test_only_cuda_and_a_single_process_run_apex(tmp_path: Path) -> None:
    policy = precisions.create("apex_o1").policy
    assert "CUDA devices only" in (find_device_refusal(policy, "cpu", None) or "")
    assert find_device_refusal(policy, "cuda", (7, 5)) is None
    assert "before it is distributed" in (find_pair_refusal(policy, "ddp") or "")
    assert find_pair_refusal(policy, "single") is None
    with pytest.raises(ConfigError, match="Apex runs on CUDA devices only; its successor is 'fp16'"):
        Trainer(Net(), make_arguments(tmp_path, fp16=True, half_precision_backend="apex"))


@pytest.mark.parametrize("options", [{"half_precision_backend": "apex"}, {"fp16": True, "fp16_opt_level": "O2"}])
def test_settings_of_apex_without_apex_warn(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="have no effect without both"):
        precision_request(make_arguments(tmp_path, **options), None)


def test_keyword_that_contradicts_apex_is_refused(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, fp16=True, half_precision_backend="apex")
    with pytest.raises(ConfigError, match="fp16 means 'apex_o1' here"):
        precision_request(arguments, "fp16")
