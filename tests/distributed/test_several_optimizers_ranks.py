"""Two networks with an optimizer each train on two processes as on one, and are resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gan import Gan, make, weights
from support.tiny import make_rows, make_trainer
from torch import nn

from hftrain import TaskModule, set_seed

pytestmark = pytest.mark.distributed
WRAPPED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Half"]}}


def train(folder: str, *, turns: bool = False, resume: int | None = None, **options: Any) -> Any:
    trainer = make(Path(folder), Gan(takes_turns=turns), save_strategy="steps", save_steps=1, **options)
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{resume}")
    return {"weights": weights(trainer), "logs": trainer.state.log_history[-2]}


def train_and_resume(folder: str, **options: Any) -> list[Any]:
    """Train, then go on twice from between the two steps of a pair."""
    return [train(folder, resume=resume, **options) for resume in (None, 3, 5)]


@pytest.mark.parametrize(
    ("options", "turns"), [({}, False), ({"fp16": True}, True), (WRAPPED, True)], ids=["ddp", "fp16", "fsdp"]
)
def test_a_gan_trains_on_two_processes_as_on_one(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any], turns: bool
) -> None:
    settings = {**options, "turns": turns, "gradient_accumulation_steps": 3, "max_steps": 7}
    both = []
    for whole, *resumed in run_distributed(train_and_resume, folder=str(tmp_path / "two"), **settings):
        assert resumed == [whole, whole]
        both.append(whole)
    assert both[0]["weights"] == both[1]["weights"]
    # Ranks take batches in turn, so a micro-step of two ranks has the samples of one with twice the batch size.
    alone = {name: value for name, value in settings.items() if not name.startswith("fsdp")}
    one = train(str(tmp_path / "one"), per_device_train_batch_size=4, **alone)
    for ours, theirs in zip(both[0]["weights"], one["weights"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3 if options.get("fp16") else 1e-4, abs=1e-4)
    assert both[0]["logs"]["num_updates/critic"] == one["logs"]["num_updates/critic"] == (4 if turns else 7)
    assert both[0]["logs"]["grad_norm/critic"] == pytest.approx(one["logs"]["grad_norm/critic"], rel=1e-2)


class Fitted(TaskModule):
    """A regression that LBFGS fits with its line search, which reads the loss; items differ by sample."""

    automatic_optimization = False

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.5), nn.Tanh(), nn.Linear(6, 1)))

    def configure_optimizers(self) -> Any:
        options: Any = {"lr": 0.5, "max_iter": 6, "line_search_fn": "strong_wolfe"}
        return {"net": torch.optim.LBFGS(self.model.parameters(), **options)}

    def training_step(self, batch: Any) -> torch.Tensor:
        self.model[1].eval()  # its statistics would make the ranks' halves another function than the whole

        def closure() -> torch.Tensor:
            return (self.model(batch["x"])[:, 0] - batch["labels"].float()).square().mean()

        self.optimizers["net"].step(closure)
        return closure().detach()


class Counted(Fitted):
    """Updates the statistics, and notes those that each step begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += self.model[1].running_mean.tolist()
        loss = self.model(batch["x"]).square().mean()
        self.optimizers["net"].step(lambda: self.model(batch["x"]).square().mean())
        return loss.detach()


def fit(folder: str, *, counts: bool = False, **options: Any) -> Any:
    set_seed(0)
    settings: Any = {"per_device_train_batch_size": 4, "max_steps": 4, "lr_scheduler_type": "constant", **options}
    trainer = make_trainer(
        Path(folder), Counted() if counts else Fitted(), train_dataset=make_rows(16), max_grad_norm=0.0, **settings
    )
    trainer.train()
    return weights(trainer), getattr(trainer.task, "seen", None)


def test_a_line_search_sees_the_loss_of_all_processes(tmp_path: Path, run_distributed: Any) -> None:
    """A process's own loss would end the searches differently, and the processes would wait for each other."""
    both = run_distributed(fit, folder=str(tmp_path / "two"))
    assert both[0] == both[1]
    one, _ = fit(str(tmp_path / "one"), per_device_train_batch_size=8)
    for ours, theirs in zip(both[0][0], one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-3)


def test_processes_begin_each_step_with_the_same_buffers(tmp_path: Path, run_distributed: Any) -> None:
    """As under DDP without own steps; a checkpoint holds those of rank 0."""
    both = run_distributed(fit, folder=str(tmp_path), counts=True)
    assert both[0] == both[1]
    assert len(set(both[0][1])) > 6
