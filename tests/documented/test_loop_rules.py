"""The documented rules of the training loop: what a model is given, how steps are cut, and where a run ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Stream, at, make_arguments, make_rows, make_trainer, train
from torch.nn.functional import cross_entropy

from hftrain import TaskError, Trainer, set_seed

# -- what a model is given -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_empty_batch_names_the_columns_that_the_model_takes(tmp_path: Path, verb: str) -> None:
    rows = make_rows(4)
    trainer = make_trainer(tmp_path, train_dataset=rows, eval_dataset=rows, data_collator=lambda samples: {})
    with pytest.raises(TaskError, match="labels"):
        getattr(trainer, verb)()


# -- where a run ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_train_begin", "on_epoch_begin"])
def test_stop_ends_the_run_and_its_mean_loss_counts_every_step(tmp_path: Path, event: str) -> None:
    def stop(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= (12 if event == "on_step_end" else 0)

    arguments = make_arguments(tmp_path, num_train_epochs=2, logging_steps=5, learning_rate=0.0)
    set_seed(0)
    trainer = Trainer(Net(), arguments, train_dataset=make_rows(), callbacks=[at(event, stop)])
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
