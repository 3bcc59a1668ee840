"""What a user wrote is called for the run's own batches, as often as the documentation says and never in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.stateful import Lines
from support.tiny import MapRows, Net, Stream, make_arguments, make_rows
from torch.utils.data import Dataset, IterableDataset, default_collate

from hftrain import Trainer, TrainerCallback


class Calls(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(f"loss {'train' if model.training else 'eval'}")
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.calls.append("prepare")
        return super()._prepare_inputs(inputs)


def test_hooks_functions_and_data_are_called_for_the_runs_own_batches_only(tmp_path: Path) -> None:
    data, evaluated, sizes = MapRows(make_rows(16)), MapRows(make_rows(6, seed=2)), []

    def collate(samples: list[Any]) -> Any:
        sizes.append(len(samples))
        return default_collate(samples)

    def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        trainer.calls.append("function")
        total = torch.nn.functional.cross_entropy(outputs[0], labels, reduction="sum")
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    def metrics(prediction: Any) -> dict[str, float]:
        trainer.calls.append(f"metrics of {len(prediction.label_ids)}")
        return {"score": 1.0}

    def preprocess(logits: Any, labels: Any) -> Any:
        trainer.calls.append("preprocess")
        return logits

    arguments = make_arguments(
        tmp_path, num_train_epochs=1, gradient_accumulation_steps=2, eval_strategy="epoch",
        metric_for_best_model="score", save_strategy="epoch", load_best_model_at_end=True,
    )  # fmt: skip
    trainer = Calls(
        Net(), arguments, train_dataset=data, eval_dataset=evaluated, data_collator=collate,
        compute_loss_func=loss_of, compute_metrics=metrics, preprocess_logits_for_metrics=preprocess,
    )  # fmt: skip
    trainer.train()
    of_evaluation = ["prepare", "loss eval", "function", "preprocess"] * 2
    assert trainer.calls == [*["prepare", "loss train", "function"] * 4, *of_evaluation, "metrics of 6"]
    assert (sorted(data.read), evaluated.read) == (list(range(16)), list(range(6)))
    assert sizes == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("kind", [MapRows, Stream])
def test_hooks_that_take_and_count_batches_are_given_some(tmp_path: Path, kind: Any) -> None:
    taken, counted = [], []

    class Counts(Trainer):
        def get_batch_samples(self, *args: Any) -> Any:
            batches, count = super().get_batch_samples(*args)
            taken.append(len(batches))
            return batches, count

        def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
            counted.append(len(batch_samples))
            return torch.cat([batch["labels"] for batch in batch_samples]).numel()

    arguments = make_arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2)
    Counts(Net(), arguments, train_dataset=kind(make_rows(12))).train()
    assert counted == [2, 1, 2, 1]
    # The end of a stream is not known before it is asked for more.
    assert taken == ([2, 1, 2, 1] if kind is MapRows else [2, 1, 0, 2, 1])


class InPass(Dataset[Any]):
    """Says in which pass it is read, as a callback tells it."""

    number = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {**make_rows(4)[index], "number": self.number}


class StreamInPass(InPass, IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(self.__getitem__, range(4))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data", [InPass(), StreamInPass()])
def test_change_at_the_begin_of_an_epoch_applies_to_it(tmp_path: Path, data: Any, num_workers: int) -> None:
    class Tell(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            data.number = round(state.epoch)

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert inputs.pop("number").tolist() == [self.state.global_step] * 4
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = make_arguments(tmp_path, max_steps=3, dataloader_num_workers=num_workers, remove_unused_columns=False)
    Own(Net(), arguments, train_dataset=data, callbacks=[Tell()]).train()


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("call", ["fast_dev_run", "loader", "evaluate"])
def test_trial_leaves_a_stream_where_it_was(tmp_path: Path, call: str, goes_on: bool, is_used: bool) -> None:
    def next_rows(is_tried: bool) -> list[int]:
        stream = Lines(make_rows(24), goes_on=goes_on)
        arguments = make_arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
        trial, trainer = (
            Trainer(Net(), arguments, train_dataset=stream, eval_dataset=stream, **options)
            for options in ({"fast_dev_run": call == "fast_dev_run", "limit_eval_batches": 2}, {})
        )
        if is_used:
            trainer.train()
        if is_tried:
            tried: Any = {"fast_dev_run": trial.train, "loader": lambda: trial.tune.loader([0], num_batches=2)}
            tried.get(call, getattr(trial, call, None))()
        stream.read.clear()
        trainer.train()
        return list(stream.read)

    assert next_rows(is_tried=True) == next_rows(is_tried=False)
