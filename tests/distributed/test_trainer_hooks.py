"""What scripts and subclasses do with a Trainer, on two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer, set_seed

pytestmark = pytest.mark.distributed


def make(folder: str, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    set_seed(7)
    return kind(
        Net(),
        make_arguments(Path(folder), max_steps=2, **options),
        train_dataset=make_rows(),
        eval_dataset=make_rows(9),
    )


def use_accelerator(folder: str) -> dict[str, Any]:
    trainer = make(folder, gradient_accumulation_steps=2)
    accelerator = trainer.accelerator
    before = [accelerator.num_processes, accelerator.process_index, accelerator.device.type]
    trainer.train()
    accelerator.wait_for_everyone()
    return {
        "before": before,
        "is_main": [accelerator.is_main_process, trainer.is_world_process_zero(), accelerator.is_local_main_process],
        "gathered": accelerator.gather(torch.tensor([float(trainer.strategy.rank)])).tolist(),
        "unwrapped": accelerator.unwrap_model(trainer.model_wrapped) is trainer.model is not trainer.model_wrapped,
        "accumulation": accelerator.gradient_accumulation_steps,
        "nested": [t.tolist() for t in trainer._nested_gather([torch.tensor(trainer.strategy.rank)])],
    }


def test_accelerator_knows_both_processes(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(use_accelerator, folder=str(tmp_path))
    for rank, found in enumerate(both):
        assert found["before"] == [2, rank, "cpu"]
        assert found["is_main"] == [rank == 0] * 3
        assert found["gathered"] == [0, 1]
        assert found["unwrapped"]
        assert found["accumulation"] == 1
        assert found["nested"] == [[0, 1]]


class Gathers(Trainer):
    """Downstream trainers gather in every evaluation step."""

    seen: int = 0

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        self.seen += len(self.accelerator.gather_for_metrics(inputs["labels"]))
        inputs.pop("unused", None)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


def evaluate_in_step(folder: str) -> dict[str, Any]:
    trainer = make(folder, Gathers)
    _ = trainer.accelerator
    metrics = trainer.evaluate()
    found = trainer.predict(make_rows(9))
    try:
        trainer.predict(make_rows(1))
    except ConfigError as error:
        refused = str(error)
    return {
        "loss": metrics["eval_loss"],
        "seen": trainer.seen,
        "labels": found.label_ids.tolist(),
        "refused": refused,
    }


def test_steps_that_gather_do_not_wait_for_a_process_without_batches(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(evaluate_in_step, folder=str(tmp_path))
    alone = make(str(tmp_path / "alone"))
    assert both[0]["labels"] == both[1]["labels"] == [int(row["labels"]) for row in make_rows(9)]
    assert both[0]["loss"] == pytest.approx(alone.evaluate()["eval_loss"])
    assert both[0]["seen"] == both[1]["seen"] == 2 * (9 + 4)  # the shorter share's batch of 4 is repeated
    assert all("one sample per process" in found["refused"] for found in both)


class Overrides(Trainer):
    """Hooks that are collective within: all must be called by every rank."""

    called: list[str]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.called.append("save")
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        self.called.append("load")
        super()._load_optimizer_and_scheduler(checkpoint)

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        self.called.append("gather")
        return super()._nested_gather(tensors, name)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return model if training else super()._wrap_model(model, training, dataloader)


def override_hooks(folder: str, is_plain: bool) -> dict[str, Any]:
    kind = Trainer if is_plain else Overrides
    Overrides.called = []
    saves = {"save_strategy": "steps", "save_steps": 1}
    make(folder, kind, **saves).train()
    trainer = make(folder, kind, **saves)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "called": sorted(set(Overrides.called)),
        "losses": losses,
        "wrapper": type(trainer.model_wrapped).__name__,
        "weights": [p.sum().item() for p in trainer.model.parameters()],
    }


def test_overridden_hooks_change_nothing_on_two_processes(tmp_path: Path, run_distributed: Any) -> None:
    ours = run_distributed(override_hooks, folder=str(tmp_path / "a"), is_plain=False)
    plain = run_distributed(override_hooks, folder=str(tmp_path / "b"), is_plain=True)
    for found, expected in zip(ours, plain, strict=True):
        assert found["called"] == ["gather", "load", "save"]
        # The override returned the bare model; the strategy wrapped it all the same.
        assert found["wrapper"] == expected["wrapper"] == "DistributedDataParallel"
        assert found["losses"] == pytest.approx(expected["losses"])
        assert found["weights"] == pytest.approx(expected["weights"])
