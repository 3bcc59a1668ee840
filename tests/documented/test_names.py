"""Names that scripts and client libraries read, set or override, though a plain user never meets them."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import Net, at, make_arguments, make_rows, make_trainer, train

import hftrain
from hftrain import (
    AcceleratorConfig,
    CallbackHandler,
    ConfigError,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    Logger,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from hftrain.core.elsewhere import names_elsewhere

# -- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"split_batches": True},
        '{"split_batches": true}',
        AcceleratorConfig(split_batches=True),
        SimpleNamespace(split_batches=True),
    ],
)
def test_accelerator_config_is_an_object_whatever_was_given(tmp_path: Path, given: Any) -> None:
    args = make_arguments(tmp_path, accelerator_config=given)
    assert isinstance(args.accelerator_config, AcceleratorConfig)
    assert args.accelerator_config.split_batches
    assert args.accelerator_config.even_batches
    assert args.accelerator_config.to_dict()["dispatch_batches"] is None
    again = make_arguments(tmp_path, accelerator_config=args.to_dict()["accelerator_config"])
    assert again.accelerator_config == args.accelerator_config
    json.loads(args.to_json_string())


def test_accelerator_config_is_there_when_none_was_given_and_may_be_changed(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    args.accelerator_config.dispatch_batches = False
    assert not copy.deepcopy(args).accelerator_config.dispatch_batches
    with pytest.raises(AttributeError):
        args.accelerator_config.dispatch_batch = True
    args.accelerator_config.split_batches = True
    args.gradient_accumulation_steps = 2
    assert Trainer(Net(), args).get_total_train_batch_size(args) == 8


def test_accelerator_config_of_a_file_is_an_object_once_a_trainer_has_read_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"even_batches": false}', encoding="utf-8")
    trainer = Trainer(Net(), make_arguments(tmp_path, accelerator_config=str(path)))
    assert trainer.args.accelerator_config == AcceleratorConfig(even_batches=False)
    assert AcceleratorConfig.from_json_file(path).pop("even_batches") is False
    assert AcceleratorConfig().pop("nothing", 3) == 3


@dataclass
class WithDict(TrainingArguments):
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]  # noqa: RUF012

    model_init_kwargs: dict[str, Any] | str | None = field(default=None)


def test_fields_that_a_subclass_adds_to_valid_dict_fields_are_read_as_json(tmp_path: Path) -> None:
    args = WithDict(str(tmp_path), model_init_kwargs='{"depth": "3", "is_tied": "true", "inner": {"rate": "0.5"}}')
    assert args.model_init_kwargs == {"depth": 3, "is_tied": True, "inner": {"rate": 0.5}}
    assert WithDict(str(tmp_path), model_init_kwargs="a path").model_init_kwargs == "a path"


# -- the Trainer --------------------------------------------------------------------------------------------------


make = partial(make_trainer, eval_dataset=make_rows(5))


def test_trainer_has_the_private_names_that_clients_read(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer._train_batch_size == 4
    assert trainer.deepspeed is None
    assert trainer.hp_search_backend is None
    # axolotl rewrites the methods' source code unless they are there.
    assert (Trainer._original_evaluation_loop, Trainer._original_maybe_log_save_evaluate) == ("", "")
    trainer.deepspeed = None
    with pytest.raises(ConfigError, match="strategy=DeepSpeedStrategy"):
        trainer.deepspeed = object()


def test_train_batch_size_that_is_set_is_the_size_of_batches(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer._train_batch_size = 11
    assert [len(batch["labels"]) for batch in trainer.get_train_dataloader()] == [11, 11]


class CachesLoaders(Trainer):
    """As several clients do: what is cached may have been there before the base class's constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._eval_dataloaders = {"mine": "loader"}
        super().__init__(*args, **kwargs)


def test_evaluation_loaders_with_persistent_workers_are_named(tmp_path: Path) -> None:
    trainer = make(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    loader = trainer.get_eval_dataloader()
    assert trainer._eval_dataloaders == {"eval": loader}
    assert make(tmp_path).get_eval_dataloader() is not None
    assert CachesLoaders(Net(), make_arguments(tmp_path))._eval_dataloaders == {"mine": "loader"}


def test_search_backend_is_known_during_a_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    seen = []

    class Looks(Trainer):
        def call_model_init(self, trial: Any = None) -> Any:
            seen.append(self.hp_search_backend)
            return super().call_model_init(trial)

    trainer = Looks(
        args=make_arguments(tmp_path, max_steps=1),
        model_init=lambda trial=None: Net(),
        train_dataset=make_rows(),
        eval_dataset=make_rows(5),
    )
    trainer.hyperparameter_search(n_trials=1, backend="optuna", hp_space=lambda trial: {})
    assert seen[0] is None
    assert seen[-1] == "optuna"
    assert trainer.hp_search_backend is None


def test_trainer_without_a_model_raises_as_documented() -> None:
    with pytest.raises(RuntimeError, match="`Trainer` requires either a `model` or `model_init` argument") as raised:
        Trainer()
    assert isinstance(raised.value, ConfigError)


# -- callbacks ----------------------------------------------------------------------------------------------------


class Own(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None: ...


class Mine(Logger):
    name = "mine"

    def log(self, metrics: Any, step: int) -> None:
        """Do nothing."""


def test_callbacks_of_the_user_come_between_the_flow_and_the_display(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), callbacks=[Own], loggers=[Mine()])
    names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert names == ["DefaultFlowCallback", "MineCallback", "Own", "PrinterCallback"]


def test_improvement_is_judged_by_an_overridden_check(tmp_path: Path) -> None:
    seen: list[float] = []

    class Never(EarlyStoppingCallback):
        def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: float) -> None:
            seen.append(metric_value)
            self.early_stopping_patience_counter += 1

    trainer = train(
        tmp_path, eval_dataset=make_rows(5), callbacks=[Never(2)], eval_strategy="steps", eval_steps=1,
        metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    assert trainer.state.global_step == 2
    assert seen == [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def test_handler_has_the_documented_methods() -> None:
    handler = CallbackHandler([DefaultFlowCallback, PrinterCallback()], "model", "tool", "optimizer", "schedule")
    assert (handler.model, handler.processing_class, handler.tokenizer) == ("model", "tool", "tool")
    assert (handler.optimizer, handler.lr_scheduler, handler.train_dataloader) == ("optimizer", "schedule", None)
    handler.add_callback(Own)
    assert handler.callback_list == "DefaultFlowCallback\nPrinterCallback\nOwn"
    assert isinstance(handler.pop_callback(Own), Own)
    handler.remove_callback(PrinterCallback)
    assert handler.callback_list == "DefaultFlowCallback"
    control = TrainerControl(should_log=True, should_training_stop=True, should_epoch_stop=True)
    handler.on_train_begin(None, TrainerState(), control)
    handler.on_epoch_begin(None, TrainerState(), control)
    assert not handler.on_step_begin(None, TrainerState(), control).should_log
    assert not control.should_training_stop
    assert not control.should_epoch_stop


class Widened(CallbackHandler):
    """As TRL's handler: one more constructor argument, and the documented methods through `super()`."""

    def __init__(self, callbacks: Any, model: Any, extra: Any, tool: Any, optimizer: Any, schedule: Any) -> None:
        super().__init__(callbacks, model, tool, optimizer, schedule)
        self.extra = extra

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> Any:
        return super().on_log(args, state, control, logs=logs, **kwargs)


def test_handler_of_a_subclass_serves_the_run(tmp_path: Path) -> None:
    seen: list[Any] = []
    look = at(
        "on_step_end", lambda args, state, control, **kwargs: seen.append((args, state.global_step, kwargs["model"]))
    )
    trainer = make(tmp_path, max_steps=2)
    old = trainer.callback_handler
    trainer.callback_handler = Widened(old.callbacks, trainer.model, "more", None, None, None)
    trainer.add_callback(look)
    trainer.train()
    assert seen == [(trainer.args, 1, trainer.model), (trainer.args, 2, trainer.model)]
    with pytest.raises(ConfigError, match="Derive it from hftrain"):
        trainer.callback_handler = SimpleNamespace()


# -- names that hftrain does not have -------------------------------------------------------------------------------


TRANSFORMERS_NAMES = names_elsewhere("transformers_names")


@pytest.mark.parametrize("name", TRANSFORMERS_NAMES)
def test_name_that_hftrain_does_not_have_is_answered_with_what_to_use(name: str) -> None:
    remedy = TRANSFORMERS_NAMES[name]
    with pytest.raises(ImportError, match=re.escape(remedy)):
        exec(f"from hftrain import {name}")


def test_remedies_name_what_is_there() -> None:
    words = " ".join(TRANSFORMERS_NAMES.values())
    named = re.findall(r"\b(?:(?:nested_|get_)\w+|default_hp\w+|\w+Callback|LengthGrouped\w+|GreedyLR)\b", words)
    stubs = Path(hftrain.__file__).with_suffix(".pyi").read_text("utf-8")  # has those of transformers, too
    assert {name for name in named if f" as {name}\n" not in stubs} == {"get_base_model"}
