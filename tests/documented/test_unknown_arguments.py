"""Arguments that do not exist, or are of a kind that a Trainer cannot use, are refused with what to use instead."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Noisy, Stream, make_arguments, make_rows
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from hftrain import ConfigError, EvalSet, Seq2SeqTrainer, Trainer, loggers, precisions, strategies

SETS = TensorDataset(torch.zeros(4, 2)), TensorDataset(torch.zeros(4, 2))


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer, type("Mine", (Trainer,), {})])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train_data", "Did you mean 'train_dataset'"),
        ("devices", "torchrun"),
        ("learning_rate", "learning_rate in TrainingArguments"),
        ("logger", "loggers="),
        ("xyzzy", "Known names: "),
    ],
)
def test_unknown_keyword_of_a_trainer_is_refused_with_the_one_to_use(
    tmp_path: Path, kind: type[Trainer], name: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*{re.escape(remedy)}"):
        kind(Net(), make_arguments(tmp_path), **{name: 2})


def test_signature_stays_the_documented_one() -> None:
    assert list(inspect.signature(Trainer.__init__).parameters)[:6] == [
        "self", "model", "args", "data_collator", "train_dataset", "eval_dataset",
    ]  # fmt: skip
    kinds = {parameter.kind for parameter in inspect.signature(Trainer.__init__).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


class Frame:
    """Looks like pandas' DataFrame."""

    iloc = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, column: str) -> Any:
        raise KeyError(column)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (DataLoader(SETS[0]), "override get_train_dataloader"),
        (list(SETS), "ConcatDataset"),
        ([make_rows(3), make_rows(3)], "ConcatDataset"),
        ("imdb", "load it"),
        (Frame(), "Dataset.from_pandas"),
        (iter(make_rows(3)), "list"),
    ],
)
def test_training_data_of_another_kind_is_refused(tmp_path: Path, given: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"train_dataset.*{remedy}"):
        Trainer(Net(), make_arguments(tmp_path), train_dataset=given)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (DataLoader(SETS[0]), "override get_eval_dataloader"),
        (list(SETS), "dict"),
        (SETS, "dict"),
        ([make_rows(3), make_rows(3)], "dict"),
        ([EvalSet(make_rows(3))], "dict"),
        ({"a": DataLoader(SETS[0])}, "override get_eval_dataloader"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_evaluation_data_of_another_kind_is_refused(tmp_path: Path, given: Any, remedy: str, is_late: bool) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path))
    with pytest.raises(ConfigError, match=f"dataset.*{remedy}"):
        trainer.evaluate(given) if is_late else Trainer(Net(), make_arguments(tmp_path), eval_dataset=given)


def test_prediction_data_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="override get_test_dataloader"):
        Trainer(Net(), make_arguments(tmp_path)).predict(DataLoader(SETS[0]))


class Odd(Dataset[Any]):
    """Has no length, which an override of get_train_dataloader need not ask for."""

    def __getitem__(self, index: int) -> Any:
        return make_rows(1)[0]


class Rereadable(Noisy):
    """Can be indexed, and be iterated by hand as well."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    "given",
    [
        make_rows(3),
        [(torch.zeros(2), 1), (torch.ones(2), 0)],
        [[torch.zeros(2), 1]],
        [torch.zeros(2)],
        Stream(make_rows(3)),
        ConcatDataset(SETS),
        Odd(),
        Rereadable(make_rows(3)),
        [({"x": torch.zeros(2)}, 1), ({"x": torch.ones(2)}, 0)],
        [({"x": torch.zeros(2)}, {"x": torch.ones(2)})] * 3,
        [[{"x": torch.zeros(2)}, {"x": torch.ones(2)}]] * 3,
        [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]],
        [],
        (),
    ],
)
def test_usual_kinds_of_data_pass(tmp_path: Path, given: Any) -> None:
    Trainer(Net(), make_arguments(tmp_path), train_dataset=given, eval_dataset=given)
    Trainer(Net(), make_arguments(tmp_path), eval_dataset={"a": given, "b": EvalSet(given)})


def test_loader_that_an_override_reads_passes(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.train_dataset

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return self.eval_dataset if eval_dataset is None else eval_dataset

    loader: Any = DataLoader(make_rows(8), batch_size=4)  # type: ignore[arg-type]
    trainer = Own(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=loader, eval_dataset=loader)
    assert trainer.train().global_step == 2
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.parametrize(
    ("registry", "name", "ours"),
    [
        (precisions, "bf16-mixed", "bf16"),
        (precisions, "16-mixed", "fp16"),
        (precisions, "32-true", "fp32"),
        (strategies, "dp", "data_parallel"),
        (strategies, "ddp_spawn", "ddp"),
        (loggers, "comet", "comet_ml"),
    ],
)
def test_name_that_other_libraries_use_is_answered_with_ours(registry: Any, name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{ours}'\\?"):
        registry.resolve(name)
