"""Mistakes get a clear error before any device or process group is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_rows, train
from torch import nn

from hftrain import CheckpointError, ConfigError, TaskError, TaskModule
from hftrain.strategies.base import Strategy


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a strategy takes its device, except in tests that say a first forward pass is needed."""
    launched = []
    take = Strategy._take

    def spy(self: Strategy, device: torch.device) -> None:
        launched.append(device)
        take(self, device)

    monkeypatch.setattr(Strategy, "_take", spy)
    yield
    assert bool(launched) == ("forward" in request.node.name), "launched" if launched else "not launched"


ROWS = make_rows(4)
SETS = {"train": make_rows(), "test": ROWS}
SGD = torch.optim.SGD(Net().parameters(), lr=0.1)
BEST: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": ROWS}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "ddp", "deepspeed": {"zero": 3}}, "strategy='ddp'.*deepspeed"),
        ({"strategy": "single", "fsdp": "full_shard"}, "strategy='single'.*fsdp"),
        ({"precision": "bf16", "fp16": True}, "precision='bf16'.*fp16=True"),
        ({"neftune_noise_alpha": 5.0}, "get_input_embeddings"),
        ({"eval_strategy": "epoch", "eval_dataset": {}}, "There is no eval_dataset"),
        ({"eval_strategy": "epoch", "eval_dataset": {"a": ROWS, "b": []}}, r"eval_strategy='epoch'\. b is empty"),
        ({"data_collator": 3}, "Cannot use an int as data_collator: it is not callable"),
        (
            {"optimizers": (None, object()), "model_init": Net},
            r"Cannot use optimizers=\(\.\.\.\) together with model_init",
        ),
        ({"optimizers": (SGD, None), "model_init": Net}, r"Cannot use optimizers=\(\.\.\.\) together with model_init"),
        (
            {"optimizers": (SGD, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            "together with optimizer_cls_and_kwargs",
        ),
        ({"optimizers": (None,)}, "must be a pair of an optimizer and a schedule"),
        ({"model_init": lambda trial, other: Net()}, "takes more than the trial"),
        ({"model_init": lambda: None}, "it is None"),
        ({"model_init": 3}, r"Cannot use an int as model_init: it must be a function"),
        ({"tokenizer": object(), "processing_class": object()}, "processing_class and tokenizer"),
        ({"optim": "adalomo"}, "CUDA devices only"),
        ({**BEST, "metric_for_best_model": "los"}, "Cannot use metric_for_best_model='los'.*to 'eval_loss'"),
        ({**BEST, "metric_for_best_model": "eval_c_loss", "eval_dataset": {"a": ROWS}}, "'eval_a_loss'"),
        (
            {**BEST, "metric_for_best_model": "loss", "eval_dataset": {"a": ROWS}, "compute_metrics": len},
            "to 'eval_a_loss'",
        ),
        ({"model": Task(), "label_smoothing_factor": 0.1}, "Cannot use label_smoothing_factor with Task"),
        ({"model": Task(), "label_names": ["y"]}, "Cannot use label_names with Task"),
        (
            {"model": Task(), "label_names": ["y"], "compute_loss_func": len},
            "Cannot use compute_loss_func, label_names with Task.* A task computes its own loss",
        ),
        ({"train_dataset": None}, "no train_dataset"),
        ({"train_dataset": SETS}, r"Cannot use a dict as one dataset: .* the keys 'train', 'test'"),
        ({"train_dataset": SETS, "model": Task()}, r"Cannot use a dict as one dataset: .* the keys 'train', 'test'"),
    ],
)
def test_contradictory_or_unknown_setting_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, **given)


def test_dict_of_samples_by_number_passes_at_the_first_forward(tmp_path: Path) -> None:
    train(tmp_path, train_dataset=dict(enumerate(ROWS)))


@pytest.mark.parametrize("value", [[1, 2], "high"])
def test_best_metric_that_is_no_number_is_refused_after_a_first_forward_pass(tmp_path: Path, value: Any) -> None:
    parts = {"eval_dataset": ROWS, "compute_metrics": lambda prediction: {"f1": value}}
    with pytest.raises(ConfigError, match=rf"reported 'eval_f1' as a {type(value).__name__}, .* not a single number"):
        train(tmp_path, eval_strategy="epoch", metric_for_best_model="f1", **parts)


@pytest.mark.parametrize("content", ["nothing", "an empty folder", "other files", "a file"])
def test_resume_from_what_is_no_checkpoint_is_refused(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "elsewhere"
    if content == "a file":
        folder.write_text("x")
    elif content != "nothing":
        folder.mkdir()
    if content == "other files":
        (folder / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        train(tmp_path, resume=str(folder))


def test_resume_without_any_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        train(tmp_path, resume=True)


def test_name_too_long_for_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give a folder in which this user may create files"):
        train(tmp_path / ("x" * 300), max_steps=1, save_strategy="steps")


class Outside(TaskModule):
    """Has a trainable parameter that no strategy would synchronise."""

    def __init__(self) -> None:
        super().__init__(Net())
        self.temperature = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": Outside()}, r"outside its model \(temperature\)"),
        ({"model": TaskModule()}, "no child called 'model'"),
        ({"model": lambda: Net()}, "Cannot use a function as model"),
    ],
)
def test_model_or_task_that_cannot_be_used_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        train(tmp_path, **given)
