"""Usual mistakes in arguments, a Trainer's construction, configs, resuming and launching, and what each is told.

The table succeeds a list of mistakes that new users made, each tried, and its message mended until it told them enough.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from support.forked import free_port
from support.mistakes import Mistake, check, table
from support.tiny import Net, Task, at, make_arguments, make_rows, make_trainer, train
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import hftrain
from hftrain import (
    EMA,
    SWA,
    EarlyStoppingCallback,
    FlightLog,
    Freeze,
    Mixture,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from hftrain.core.errors import CheckpointError, StrategyError, TaskError, UnknownArgumentError
from hftrain.core.launcher import read_launch
from hftrain.strategies.deepspeed.config import read_config

FREE_PORT = str(free_port())


def setting(name: str, value: Any, says: str, **more: Any) -> Mistake:
    """Return the row of a setting that is refused when the arguments are made."""
    return Mistake(f"{name}={value!r}", lambda folder: make_arguments(folder, **{name: value}), says, **more)


class SetsRate(TrainerCallback):
    def on_step_end(self, args: Any, *others: Any, **kwargs: Any) -> None:
        args.learning_rate = 1.0


def running(name: str, says: str, error: type[Exception] = hftrain.ConfigError, **options: Any) -> Mistake:
    """Return the row of a Trainer that is refused at the latest when it trains."""
    return Mistake(name, lambda folder: train(folder, max_steps=1, **options), says, error)


def trainer_of(name: str, says: str, error: type[Exception] = hftrain.ConfigError, **parts: Any) -> Mistake:
    """Return the row of a Trainer that is refused when it is made."""

    def make(folder: Path) -> None:
        Trainer(**{"model": Net(), "args": make_arguments(folder), **parts})

    return Mistake(name, make, says, error)


def resuming(name: str, file: str, says: str) -> Mistake:
    """Return the row of a run that is to continue from a file or folder that is no checkpoint."""

    def make(folder: Path) -> None:
        if "." in file:
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_text("weights")
        train(folder, max_steps=1, resume=file)

    return Mistake(name, make, says, CheckpointError)


def missing_name(name: str, says: str) -> Mistake:
    return Mistake(f"hftrain.{name}", lambda folder: getattr(hftrain, name), says, AttributeError)


def launched(
    name: str,
    says: str,
    make: Any = lambda folder: read_launch(),
    error: type[Exception] = hftrain.ConfigError,
    **variables: str,
) -> Mistake:
    """Return the row of an environment that no launcher leaves; torch's variables are unset but these."""
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return Mistake(name, make, says, error, environment={**unset, **variables})


def fsdp(name: str, config: Any, says: str) -> Mistake:
    return Mistake(name, lambda folder: train(folder, max_steps=1, strategy="fsdp", fsdp_config=config), says)


def yaml_as_fsdp_config(folder: Path) -> None:
    (folder / "accelerate.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    train(folder, max_steps=1, strategy="fsdp", fsdp_config="accelerate.yaml")


def resume_other(folder: Path) -> None:
    train(folder, max_steps=1, save_strategy="steps", save_steps=1)
    train(folder, max_steps=2, resume=str(folder / "checkpoint-1"), optim="sgd")


def port_in_use(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
        train(folder, max_steps=1)


def unknown_host(folder: Path) -> None:
    with suppress(StrategyError):  # once the time is over
        Trainer(Net(), make_arguments(folder, max_steps=1, ddp_timeout=1), train_dataset=make_rows(8)).train()


def without_weights() -> Net:
    with torch.device("meta"):
        return Net()


class WithMean(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        outputs = super().forward(x, labels)
        return (*outputs, outputs[-1].mean())


def own(make: Any, **attributes: Any) -> Any:
    """Return a task that makes its optimizers, and a schedule, in its own way."""
    task = type("Own", (Task,), {"configure_optimizers": lambda self: make(SGD(self.parameters(), 0.1)), **attributes})
    return task()


def assign(folder: Path, name: str, value: Any, method: str = "train") -> None:
    trainer = make_trainer(folder, eval_dataset=make_rows(4))
    setattr(trainer.args, name, value)
    getattr(trainer, method)()


def under_no_grad(folder: Path) -> None:
    with torch.no_grad():
        train(folder, max_steps=1)


UNKNOWN: Any = {"error": UnknownArgumentError}
NAMES = [
    setting("learning_rte", 1, "Did you mean 'learning_rate'?", **UNKNOWN),
    setting("batch_size", 8, "'per_device_train_batch_size'", **UNKNOWN),
    setting("gradient_cliping", 1.0, "Did you mean 'max_grad_norm'?", **UNKNOWN),
    setting("precission", "bf16", "precision=... to the Trainer", **UNKNOWN),
    trainer_of("lerning_rate", "Set learning_rate in TrainingArguments", lerning_rate=1.0),
    setting("betas", (0.9, 0.99), "adam_beta1 and adam_beta2", **UNKNOWN),
    setting("mixed_precision", "bf16", "precision=", **UNKNOWN),
    setting("zero_stage", 2, "strategy='deepspeed_stage_2'", **UNKNOWN),
    setting("precision", "bf16", "to the Trainer", **UNKNOWN),
    setting("callbacks", [], "to the Trainer", **UNKNOWN),
    setting("devices", 2, "torchrun --nproc_per_node", **UNKNOWN),
    setting("xyzzy", 1, "help(TrainingArguments)", **UNKNOWN),
    trainer_of("collate_fn", "data_collator", collate_fn=1),
    trainer_of("loss_fn", "training_step", loss_fn=1),
    Mistake(
        "positional settings",
        lambda folder: TrainingArguments("out", True, 5e-5),  # type: ignore[misc]
        "learning_rate=5e-5",
        UnknownArgumentError,
    ),
    Mistake("train(epochs=3)", lambda folder: make_trainer(folder).train(epochs=3), "TrainingArguments", TypeError),
    missing_name("TrainingArgs", "'TrainingArguments'"),
    missing_name("Fabric", "Use Engine"),
    missing_name("rank_zero_only", "is_world_process_zero"),
]
VALUES = [
    setting("eval_strategy", True, "epoch, no, steps"),
    setting("optim", "adam", "'adamw_torch'"),
    setting("optim", torch.optim.SGD, "optimizers=(optimizer, None)"),
    setting("learning_rate", "1e-3", "YAML"),
    setting("learning_rate", "fast", "must be a number"),
    setting("learning_rate", None, "must be a number"),
    setting("num_train_epochs", "3", "Write num_train_epochs=3"),
    setting("num_train_epochs", 0, "max_steps above 0"),
    setting("per_device_train_batch_size", 8.0, "Write per_device_train_batch_size=8."),
    setting("per_device_train_batch_size", None, "an integer"),
    setting("gradient_accumulation_steps", 2.5, "must be an integer"),
    setting("warmup_ratio", 5, "set warmup_steps=5"),
    setting("weight_decay", None, "must be a number"),
    setting("save_steps", 10.5, "save_steps=10"),
    setting("logging_steps", 0, "logging_strategy='no'"),
    setting("save_total_limit", -2, "-1 for none"),
    setting("load_best_model_at_end", "True", "quotation marks"),
    setting("greater_is_better", "yes", "True or False"),
    setting("metric_for_best_model", 3, "must be text"),
    setting("fsdp", 3, "text or a list"),
    setting("report_to", ["none", "wandb"], "'none' turns all trackers off"),
    setting("lr_scheduler_kwargs", [1], "a dict"),
    setting("accelerator_config", {"split_batch": True}, "'split_batches'"),
    running("optim_args with a colon", "optim_args='eps:1e-6'", optim_args="eps:1e-6"),
    running("optim_args unknown", "adam_beta1", optim_args="betta=1"),
    running("gradient_checkpointing", "layer_classes", gradient_checkpointing=True),
    running("tracker", "'tensorboard'", report_to="tensorbord"),
    Mistake("output_dir is a file", lambda folder: ((folder / "out").touch(), train(folder / "out")), "folder"),
]  # fmt: skip
PARTS = [
    trainer_of("strategy zero2", "Did you mean 'deepspeed_stage_2'?", strategy="zero2"),
    trainer_of("precision 32", "Did you mean 'fp32'?", precision=32),
    trainer_of("precision torch.bfloat16", "Did you mean 'bf16'?", precision=torch.bfloat16),
    trainer_of("name of a model", "from_pretrained", model="bert-base-uncased", error=TaskError),
    trainer_of("class of a model", "Pass Net(...)", model=Net, error=TaskError),
    trainer_of("state of a model", "load_state_dict", model=Net().state_dict(), error=TaskError),
    trainer_of("args as text", "TrainingArguments(output_dir)", args="out"),
    trainer_of("args as dict", "TrainingArguments(**settings)", args={"learning_rate": 1.0}),
    trainer_of("dataset as args", "Cannot use list as args", args=make_rows(2)),
    Mistake(
        "swapped",
        lambda folder: Trainer(make_arguments(folder), make_arguments(folder)),  # type: ignore[arg-type]
        "Trainer(model, args, ...)",
        TaskError,
    ),
    trainer_of("lone optimizer", "(optimizer, None)", optimizers=torch.optim.SGD(Net().parameters())),
    trainer_of("class of an optimizer", "optimizer_cls_and_kwargs=(SGD", optimizers=(torch.optim.SGD, None)),
    trainer_of("name of a metric", "EvalPrediction", compute_metrics="accuracy"),
    trainer_of("name of a collator", "list of samples", data_collator="default"),
    trainer_of("dataset as a collator", "train_dataset=", data_collator=make_rows(2)),
    running("no optimizer to step", "no optimizer", TaskError, model=own(lambda _: None, automatic_optimization=False)),
    running("EMA and SWA", "EMA and SWA in one training", callbacks=[EMA(), SWA()]),
    running("schedule of timm's", "step_update(count)", TaskError,
            model=own(lambda sgd: (sgd, Plain(step=lambda epoch: None)))),
    running("schedule in a list", "to say when", TaskError, model=own(lambda sgd: ([sgd], [StepLR(sgd, 1)]))),
    running("schedule without a state", "save_only_model", save_strategy="epoch",
            model=own(lambda sgd: (sgd, Plain(step=lambda: None)))),
    running("mean of losses", "for each sample", flight_log=FlightLog(sample_losses=lambda outputs, _: outputs[0])),
    Mistake("module to freeze", lambda folder: Freeze(nn.Linear(2, 2), until=1), "named_modules()"),  # type: ignore[arg-type]
    Mistake("mixture of a list", lambda folder: Mixture([make_rows(2)]), "Pass a dict"),  # type: ignore[arg-type]
    running("model without weights", "from_pretrained()", model=without_weights()),
    Mistake("rate assigned", lambda folder: assign(folder, "learning_rate", "1e-3"), "Write learning_rate=0.001"),
    Mistake("rate assigned in a run", lambda folder: make_trainer(folder, max_steps=1, callbacks=[SetsRate()]).train(),
            "optimizer.param_groups", UserWarning),
    Mistake("size assigned", lambda folder: assign(folder, "per_device_eval_batch_size", "4", "evaluate"),
            "without quotation marks"),
    Mistake("train() under no_grad", under_no_grad, "outside of torch.no_grad()", TaskError),
    Mistake("train(dataset)", lambda folder: make_trainer(folder).train(make_rows(2)), "a list"),
]  # fmt: skip
RESUMING = [
    resuming("resume 'true'", "true", "Pass True without quotation marks"),
    resuming("Lightning's last", "last", "True for the newest in output_dir"),
    resuming("resume from Lightning's file", "last.ckpt", "load them into the model"),
    resuming("resume from a file of a checkpoint", "checkpoint-7/model.safetensors", "Pass its folder"),
    Mistake("resume another optimizer", resume_other, "'AdamW'", CheckpointError),
]  # fmt: skip
LAUNCHING = [
    launched("no address", "torchrun", lambda folder: train(folder, max_steps=1),
             RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"),
    launched("empty address", "unset WORLD_SIZE", lambda folder: train(folder, max_steps=1),
             WORLD_SIZE="2", MASTER_ADDR=""),
    launched("no port", "port number", lambda folder: train(folder, max_steps=1),
             RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1"),
    launched("port is text", "from 1 to 65535", lambda folder: train(folder, max_steps=1),
             RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="abc"),
    launched("port in use", "torchrun --standalone", port_in_use, StrategyError,
             RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"),
    launched("a rank that never starts", "Start all ranks",
             lambda folder: train(folder, max_steps=1, ddp_timeout=1), StrategyError,
             RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=FREE_PORT),
    launched("unknown host", "ddp_timeout", unknown_host, UserWarning,
             RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="nowhere.invalid", MASTER_PORT=FREE_PORT),
    launched("sharding of accelerate launch", "'full_shard'",
             lambda folder: train(folder, max_steps=1),
             ACCELERATE_USE_FSDP="true", ACCELERATE_DYNAMO_USE_FULLGRAPH="False", FSDP_SHARDING_STRATEGY="FULL"),
    launched("strategy against accelerate launch", "torchrun",
             lambda folder: train(folder, max_steps=1, strategy="single"),
             ACCELERATE_USE_FSDP="true", ACCELERATE_DYNAMO_USE_FULLGRAPH="False"),
    launched("precision of accelerate launch", "'bf16'", lambda folder: train(folder, max_steps=1),
             ACCELERATE_MIXED_PRECISION="bf17", ACCELERATE_DYNAMO_USE_FULLGRAPH="False"),
    running("fsdp in one process", "torchrun", fsdp="full_shard"),
    fsdp("accelerate's key", {"distributed_type": "FSDP"}, "`accelerate launch --config_file`"),
    Mistake("accelerate's file", yaml_as_fsdp_config, "`accelerate launch --config_file`"),
    fsdp("sharding in the config", {"fsdp_sharding_strategy": "FULL_SHARD"}, "fsdp='full_shard'"),
    fsdp("absent config", "nope.json", "No such file"),
    Mistake("stage as text", lambda _: read_config({"zero_optimization": {"stage": "3"}}), "Write the number 3."),
]  # fmt: skip


@table([*NAMES, *VALUES, *PARTS, *RESUMING, *LAUNCHING])
def test_mistake_is_told_in_words_that_help(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(mistake, tmp_path, monkeypatch)


WARNED = [
    Mistake("model and model_init", lambda folder: Trainer(Net(), make_arguments(folder), model_init=Net),
            "Both model and model_init are set", UserWarning),
    Mistake("two callbacks of a kind", lambda folder: Trainer(Net(), make_arguments(folder), callbacks=[
            EarlyStoppingCallback(), EarlyStoppingCallback()]), "two callbacks of the type Early", UserWarning),
    Mistake("setting without effect", lambda folder: TrainingArguments("out", hub_strategy="end"),
            "push_to_hub=True", UserWarning),
    Mistake("misspelled event", lambda folder: Trainer(Net(), make_arguments(folder), callbacks=[
            type("Own", (TrainerCallback,), {"on_stepend": print})]), "Did you mean 'on_step_end'", UserWarning),
    Mistake("names of the Trainer in a log", lambda folder: make_trainer(folder).log({"epoch": 7.0, "step": 1}),
            "names are taken: epoch, step", UserWarning),
    Mistake("schedule stepped in a callback, too", lambda folder: make_trainer(folder, callbacks=[
            at("on_step_end", lambda *_, lr_scheduler, **__: lr_scheduler.step())], max_steps=2).train(),
            "other code steps it", UserWarning),
    Mistake("output without samples", lambda folder: make_trainer(folder, WithMean()).predict(make_rows(22)),
            "for 22 samples: the model's output has no sample", UserWarning),
    Mistake("manual optimization without steps", lambda folder: make_trainer(
            folder, own(lambda sgd: sgd, automatic_optimization=False), max_steps=1).train(),
            "stepped no optimizer", UserWarning),
    Mistake("old name", lambda folder: TrainingArguments("out", evaluation_strategy="no", per_gpu_eval_batch_size=2),
            "per_gpu_eval_batch_size is deprecated", FutureWarning),
]  # fmt: skip


@table(WARNED)
def test_warning_points_at_the_line_of_the_mistake(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(mistake, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_steps": 1, "num_train_epochs": 7}, "num_train_epochs=7 has no effect with max_steps=1"),
        ({"eval_steps": 2}, "Set eval_strategy='steps'"),
        ({"metric_for_best_model": "loss", "greater_is_better": True}, "Set greater_is_better=False"),
    ],
)
def test_setting_without_effect_is_logged(tmp_path: Path, caplog: Any, options: dict[str, Any], says: str) -> None:
    Trainer(Net(), make_arguments(tmp_path, **options))
    assert says in caplog.text
