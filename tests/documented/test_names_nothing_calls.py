"""Methods that nothing would ever call are named when the Trainer is built, with the name to use."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Task, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, TaskError, TaskModule, Trainer, TrainerCallback
from hftrain.core.events import EVENTS


def method(self: Any, *args: Any, **kwargs: Any) -> None: ...


# -- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("validation_step", "evaluation_step(self, batch)"),
        ("test_step", "evaluate(test_set, metric_key_prefix='test')"),
        ("predict_step", "prediction_step(self, batch)"),
        ("on_train_epoch_end", "on_epoch_end of a TrainerCallback"),
        ("on_train_end", "on_train_end of a TrainerCallback"),
        ("training_epoch_end", "on_epoch_end of a TrainerCallback"),
        ("validation_epoch_end", "on_evaluate of a TrainerCallback"),
        ("configure_optimizer", "configure_optimizers"),
        ("configure_optimisers", "configure_optimizers"),
        ("train_dataloader", "train_dataset"),
        ("val_dataloader", "eval_dataset"),
        ("train_step", "training_step"),
        ("eval_step", "evaluation_step"),
        ("configure_gradient_clipping", "max_grad_norm"),
        ("on_save_checkpoint", "ExportableState"),
    ],
)
def test_method_of_a_task_that_nothing_calls_is_warned_of(tmp_path: Path, name: str, remedy: str) -> None:
    kind = type("Mine", (Task,), {name: method})
    with pytest.warns(UserWarning, match=f"Mine defines {name}.*{re.escape(remedy)}.*not_hooks = ..{name}"):
        Trainer(kind(), make_arguments(tmp_path))
    kind.not_hooks = (name,)
    Trainer(kind(), make_arguments(tmp_path))


class Helped(Task):
    """Has helpers under ordinary names, and under one that its own step calls."""

    training_steps = 3

    def training_step(self, batch: Any) -> Any:
        return self.step_and_more(batch)

    def step_and_more(self, batch: Any) -> Any:
        return super().training_step(batch)

    def setup(self) -> None: ...

    def log(self, name: str) -> None: ...

    def prepare_data(self) -> None: ...

    def metric(self) -> None: ...

    def on_gpu(self) -> None: ...

    def count_tokens(self) -> None: ...

    def configure_optimizer_groups(self) -> None: ...


class Both(Task):
    """Serves two names with one method."""

    def validation_step(self, batch: Any) -> Any:
        return super().training_step(batch)

    evaluation_step = validation_step


@pytest.mark.parametrize("kind", [Helped, Both])
def test_helpers_of_a_task_pass(tmp_path: Path, kind: type[TaskModule]) -> None:
    rows = make_rows(6)
    trainer = Trainer(kind(), make_arguments(tmp_path, max_steps=1), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert "eval_loss" in trainer.evaluate()


class TakesMore(Task):
    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return super().training_step(batch)

    def prediction_step(self, *args: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("name", "step"), [("training_step", lambda own, batch, batch_idx: None), ("evaluation_step", lambda own: None)]
)
def test_step_that_cannot_be_called_with_the_batch_alone_is_refused(tmp_path: Path, name: str, step: Any) -> None:
    with pytest.raises(TaskError, match=rf"Takes\.{name}\(.*Define {name}\(self, batch\)"):
        Trainer(type("Takes", (Task,), {name: step})(), make_arguments(tmp_path))


def test_step_that_can_be_called_with_the_batch_alone_passes(tmp_path: Path) -> None:
    Trainer(TakesMore(), make_arguments(tmp_path))


# -- callbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("on_train_batch_end", "on_step_end"),
        ("on_train_epoch_end", "on_epoch_end"),
        ("on_train_start", "on_train_begin"),
        ("on_validation_end", "on_evaluate"),
        ("on_save_checkpoint", "on_save"),
        ("on_batch_end", "on_step_end"),
        ("on_exception", "try and except"),
        ("on_logs", "on_log"),
        ("on_evaluation_end", "on_evaluate"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_method_of_a_callback_that_nothing_calls_is_warned_of(
    tmp_path: Path, name: str, event: str, is_late: bool
) -> None:
    kind = type("Mine", (TrainerCallback,), {name: method})
    arguments = make_arguments(tmp_path)
    add = Trainer(Net(), arguments).add_callback if is_late else partial(Trainer, Net(), arguments, None, None, None)
    with pytest.warns(UserWarning, match=f"Mine defines {name}.*{event}"):
        add(kind) if is_late else add(callbacks=[kind()])
    meant = type("Meant", (TrainerCallback,), {name: method, "not_hooks": (name,)})
    add(meant) if is_late else add(callbacks=[meant()])


def test_every_event_and_helpers_of_a_callback_pass(tmp_path: Path) -> None:
    names = [*EVENTS, "on_gpu_hot", "setup", "on_custom_event", "report", "state_dict"]
    kind = type("Mine", (TrainerCallback,), dict.fromkeys(names, method))
    Trainer(Net(), make_arguments(tmp_path), callbacks=[kind])


# -- Lightning's objects ---------------------------------------------------------------------------------------------


def lightning_class(name: str, module: str, *bases: type, **methods: Any) -> type:
    """Make a class that looks like one of Lightning's from outside."""
    return type(name, bases, {"__module__": module, **methods})


LitBase = lightning_class("LightningModule", "lightning.pytorch.core.module", nn.Module)
LitCallback = lightning_class(
    "Callback", "pytorch_lightning.callbacks.callback", on_train_end=method, on_train_batch_end=method
)
LitData = lightning_class("LightningDataModule", "lightning.pytorch.core.datamodule")
LitEarlyStopping = lightning_class("EarlyStopping", "lightning.pytorch.callbacks.early_stopping", LitCallback)


class LitNet(LitBase):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)


class LitOwn(LitCallback):  # type: ignore[misc, valid-type]
    pass


def test_lightning_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"from hftrain\.TaskModule"):
        Trainer(LitNet(), make_arguments(tmp_path))
    with pytest.raises(TaskError, match="LightningModule"):
        Trainer(args=make_arguments(tmp_path), model_init=LitNet)


@pytest.mark.parametrize(("kind", "remedy"), [(LitOwn, "TrainerCallback"), (LitEarlyStopping, "EarlyStoppingCallback")])
def test_lightning_callback_is_refused(tmp_path: Path, kind: type, remedy: str) -> None:
    for callback in (kind, kind()):
        with pytest.raises(TaskError, match=f"{kind.__name__}.*Lightning.*{remedy}"):
            Trainer(Net(), make_arguments(tmp_path), callbacks=[callback])


def test_lightning_data_module_is_refused(tmp_path: Path) -> None:
    for name in ("train_dataset", "eval_dataset"):
        with pytest.raises(ConfigError, match=f"{name}.*LightningDataModule"):
            Trainer(Net(), make_arguments(tmp_path), **{name: LitData()})


# -- Trainers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fit", "train()"),
        ("validate", "evaluate()"),
        ("test", "metric_key_prefix='test'"),
        ("save_checkpoint", "save_model"),
        ("save", "save_model"),
        ("callback_metrics", "log_history"),
        ("_inner_training_loop", "There is one loop"),
        ("_hp_search_setup", "_report_to_hp_search"),
        ("traim", "no attribute 'traim'"),
    ],
)
def test_attribute_that_a_trainer_lacks_is_answered_with_the_one_to_use(tmp_path: Path, name: str, remedy: str) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path))
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        getattr(trainer, name)
