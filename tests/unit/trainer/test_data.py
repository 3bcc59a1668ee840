"""The Trainer's data: order by length, lasting evaluation workers, columns, samples of a step."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny import Net, Stream, make_arguments, make_rows, make_trainer

from hftrain import ConfigError, Seq2SeqTrainingArguments, TaskError, Trainer, TrainerCallback


class Watch(TrainerCallback):
    """Looks at this process after each evaluation."""

    def __init__(self) -> None:
        self.seen: list[tuple[frozenset[int], int, int]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        process = psutil.Process()
        children = frozenset(child.pid for child in process.children())
        self.seen.append((children, process.num_threads(), process.num_fds()))


def test_evaluation_workers_persist_without_leaking_and_end_with_the_run(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests have left would end during this one
    watch, before = Watch(), len(psutil.Process().children())
    arguments = make_arguments(
        tmp_path, eval_strategy="steps", eval_steps=1, max_steps=25, dataloader_num_workers=1,
        dataloader_persistent_workers=True,
    )  # fmt: skip
    sets = {"a": make_rows(6), "b": make_rows(4)}
    trainer = Trainer(Net(), arguments, train_dataset=make_rows(8), eval_dataset=sets, callbacks=[watch])
    trainer.train()
    assert len(watch.seen) == 50
    assert set(watch.seen[1:]) == {watch.seen[1]}
    assert len(watch.seen[1][0]) == before + 3
    assert len(psutil.Process().children()) == before


def test_other_evaluation_data_or_collator_gets_other_workers(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer, rows = Trainer(Net(), arguments), make_rows(5)
    first = trainer.get_eval_dataloader(rows)
    assert trainer.get_eval_dataloader(rows) is first
    assert trainer.get_eval_dataloader(make_rows(5)) is not first
    trainer.data_collator = lambda features: features
    assert trainer.get_eval_dataloader(rows) is not first
    for _ in range(3):
        stream = trainer.get_eval_dataloader(Stream(rows))
        assert len(list(stream)) == len(list(stream)) == 2


@pytest.mark.parametrize(
    ("options", "data", "message"),
    [
        ({"group_by_length": True}, make_rows(8), "'input_ids' with a length"),
        ({"group_by_length": True, "max_steps": 2}, Stream(make_rows(8)), "own order"),
        ({"sortish_sampler": True}, make_rows(8), "'input_ids' with a length"),
        ({"sortish_sampler": True, "group_by_length": True}, make_rows(8), "Keep one of the two"),
    ],
)
def test_order_by_length_that_cannot_be_is_refused_before_launch(
    tmp_path: Path, options: dict[str, Any], data: Any, message: str
) -> None:
    arguments = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", **options)
    trainer = Trainer(Net(), arguments, train_dataset=data)
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    with pytest.raises(Exception, match="launch"):
        _ = trainer.strategy.device


def test_order_by_length_measures_what_the_processing_class_names(tmp_path: Path) -> None:
    class Tool:
        model_input_names = ("x",)

    trainer = make_trainer(tmp_path, train_dataset=make_rows(9), processing_class=Tool(), group_by_length=True)
    assert sorted(trainer._get_train_sampler()) == list(range(9))
    assert trainer.train().global_step == 6


class Table(list[Any]):
    """Samples that know their columns."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.column_names = ["x", "labels", "difficulty"]

    def remove_columns(self, names: Any) -> list[Any]:
        return [{name: value for name, value in row.items() if name not in names} for row in self]


def test_order_of_an_evaluation_may_follow_a_column_that_the_model_does_not_take(tmp_path: Path) -> None:
    class ByDifficulty(Trainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            return sorted(range(len(eval_dataset)), key=lambda index: eval_dataset[index]["difficulty"])

    rows = Table({**row, "difficulty": -index} for index, row in enumerate(make_rows(4)))
    trainer = ByDifficulty(Net(), make_arguments(tmp_path), eval_dataset=rows)
    (batch,) = trainer.get_eval_dataloader()
    assert batch["x"].tolist() == [row["x"].tolist() for row in reversed(rows)]
    assert "difficulty" not in batch


def test_columns_that_somebody_asked_for_are_kept(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def collate(rows: Any) -> Any:
        seen.append(sorted(rows[0]))
        return {key: [row[key] for row in rows] for key in rows[0]}

    rows = [{**row, "extra": 1, "text": "a"} for row in make_rows(4)]
    trainer = Trainer(Net(), make_arguments(tmp_path), data_collator=collate, train_dataset=rows)
    next(iter(trainer.get_train_dataloader()))
    trainer._signature_columns = ["x", "labels", "extra"]
    next(iter(trainer.get_train_dataloader()))
    trainer._signature_columns = None
    next(iter(trainer.get_train_dataloader()))
    assert seen == [["labels", "x"], ["extra", "labels", "x"], ["extra", "labels", "text", "x"]]


@pytest.mark.parametrize("give", [lambda batches: batches, lambda batches: (batches[0], None), lambda batches: None])
def test_wrong_samples_of_a_step_are_named(tmp_path: Path, give: Any) -> None:
    class Own(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any = None) -> Any:
            return give(super().get_batch_samples(epoch_iterator, num_batches, device)[0])

    with pytest.raises(TaskError, match="not a pair of a list of batches"):
        Own(Net(), make_arguments(tmp_path), train_dataset=make_rows(4)).train()


def test_fewer_samples_than_asked_for_make_a_shorter_step(tmp_path: Path) -> None:
    class Short(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any = None) -> Any:
            return super().get_batch_samples(epoch_iterator, 1, device)

    arguments = make_arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    output = Short(Net(), arguments, train_dataset=make_rows(16)).train()
    assert output.global_step == 2


def test_resume_without_data_skip_starts_the_epochs_data_over(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    class Noting(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            seen.append(inputs["x"][:, 0].tolist())
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    arguments = make_arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    Noting(Net(), arguments, train_dataset=make_rows(24)).train()
    arguments = make_arguments(tmp_path, max_steps=3, ignore_data_skip=True)
    trainer = Noting(Net(), arguments, train_dataset=make_rows(24))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen[3:] == seen[:1]
