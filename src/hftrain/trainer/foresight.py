"""What would fail late in a run, or run for nothing, and can be told before anything is launched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.adapter.data import eval_loader_config, train_loader_config
from hftrain.adapter.optim import schedule_config
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import EarlyStoppingCallback
from hftrain.checkpoint.fitting import group_settings
from hftrain.checkpoint.layout import OPTIMIZER, WEIGHTS
from hftrain.checkpoint.parts import check_complete
from hftrain.checkpoint.weights import check_saveable
from hftrain.core.errors import CheckpointError, ConfigError, TaskError
from hftrain.core.seed import preserved_rng
from hftrain.core.tree import map_tensors
from hftrain.data.collators import default_data_collator
from hftrain.data.columns import known_columns
from hftrain.data.loaders import build_eval_loader, build_train_loader
from hftrain.data.sending import check_sendable
from hftrain.data.sizes import has_length
from hftrain.optim.schedules import build_schedule
from hftrain.storage.files import check_writable
from hftrain.storage.tensors import plain_containers, tensor_shapes
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import forward_parameters
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule
from hftrain.trainer.capture import task_state
from hftrain.trainer.checks import check_best_metric
from hftrain.trainer.eval_sets import EvalSet
from hftrain.trainer.signatures import accepts

_PREPARE = ("_prepare_inputs", "_prepare_input")


@dataclass(frozen=True)
class Given:
    """The data of a training and the functions that are called in it; the names are those of a Trainer."""

    train_dataset: Any
    eval_dataset: Any
    eval_sets: Mapping[str, EvalSet]
    data_collator: Any
    label_names: Sequence[str]
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    compute_loss_func: Any
    callbacks: Sequence[Any]
    is_overridden: Callable[[str], bool]
    """Tells whether the user's class has a hook of its own."""
    count_steps: Callable[[Any], int]
    """Returns how many updates a run makes with a loader."""

    def overrides(self, *names: str) -> bool:
        """Tell whether the user's class has any of some hooks of its own."""
        return any(map(self.is_overridden, names))


def check_ahead(
    args: TrainingArguments,
    strategy: Strategy,
    task: TaskModule,
    model: nn.Module,
    given: Given,
    *,
    optimizers: tuple[Any, Any],
    learning_rate: float,
    spill_dir: Path | None,
) -> None:
    """Refuse a training that cannot come to a good end; reads no data and launches nothing.

    Args:
        args: The run's.
        strategy: Not launched yet.
        task: About to be trained.
        model: Its own, unwrapped.
        given: What it is trained with.
        optimizers: (optimizer, schedule); None where the run makes it.
        learning_rate: Where a schedule begins.
        spill_dir: Where predictions wait, if they do.

    Raises:
        HFTrainError: It names what would fail, and what to do.
    """
    _check_functions(args, given)
    _check_metric(args, task, given)
    for callback in given.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.check_settings(args)
    makes_own = type(task).configure_optimizers is not TaskModule.configure_optimizers
    is_made = makes_own or "optimizer" in strategy.makes or optimizers[0] is not None
    makes_optimizer = not (is_made or given.overrides("create_optimizer", "create_optimizer_and_scheduler"))
    is_made = optimizers[1] is not None or "scheduler" in strategy.makes or given.overrides("create_scheduler")
    with preserved_rng():
        _check_inputs(task, model, given)
        datasets = _eval_datasets(args, given)
        _check_workers(args, given, datasets)
        if not given.overrides("get_train_dataloader", "_get_train_sampler", "set_initial_training_values"):
            _check_plan(args, strategy, given, rate=learning_rate if makes_optimizer and not is_made else None)
        if args.eval_strategy != "no" and spill_dir is not None:
            check_writable(spill_dir)
        for name, dataset in datasets.items():
            _check_batches(args, strategy, given, name, dataset)
            _check_columns(args, task, model, given, name, dataset)
    if args.save_strategy != "no":
        _check_saves(args, strategy, task, model, given)
    if makes_optimizer and not any(parameter.requires_grad for parameter in model.parameters()):
        asked = f"{type(model).__name__} was to be trained."
        raise ConfigError(asked, "None of its parameters requires a gradient.", "Unfreeze some.")


def _check_metric(args: TrainingArguments, task: TaskModule, given: Given) -> None:
    """Raise where nothing reports `metric_for_best_model`; not before a training, for metrics may be set until then."""
    listeners = (getattr(callback, "on_evaluate", None) for callback in given.callbacks)
    # A callback's own on_evaluate may add to the metrics that it is given.
    roots = {getattr(listener, "__module__", "").partition(".")[0] for listener in listeners if listener is not None}
    hooks = ("evaluate", "_evaluate", "evaluation_loop", "prediction_loop", "log", "_determine_best_metric")
    if given.overrides(*hooks) or roots - {"hftrain", "transformers"}:
        return
    own = next((entry.metrics for entry in given.eval_sets.values() if entry.metrics is not None), None)
    metrics = given.compute_metrics or own
    check_best_metric(args, task=task, compute_metrics=metrics, eval_dataset=given.eval_dataset)


def check_fits(model: nn.Module, folder: Path | None, *, is_split: bool, is_overridden: Callable[[str], bool]) -> None:
    """Raise where a checkpoint plainly holds another model; whether it holds all of this one is seen when it is loaded.

    Args:
        model: Unwrapped.
        folder: The checkpoint; None starts again.
        is_split: Whether processes hold parts of a layer.
        is_overridden: Tells whether the user's class has a hook of its own.

    Raises:
        CheckpointError: Weights of the same name have other shapes, or no name is the same; or it holds only weights.
    """
    if folder is not None:
        check_complete(folder, OPTIMIZER)
    if folder is None or not (folder / WEIGHTS).is_file() or is_overridden("_load_from_checkpoint"):
        return
    found = tensor_shapes(folder / WEIGHTS)
    # What ZeRO-3 has split, in an evaluation or a training before, is empty in itself.
    own = {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in model.named_parameters()}
    others = [f"{name} is {found[name]}, not {own[name]}" for name in own if found.get(name, own[name]) != own[name]]
    if others and not is_split:
        raise CheckpointError(
            f"Resuming from {folder} was asked for.",
            f"It holds another model than this {type(model).__name__}: {'; '.join(others[:3])}.",
            "Build the model as it was, or name another checkpoint.",
        )


def _check_functions(args: TrainingArguments, given: Given) -> None:
    """Raise where something that is to be called cannot be, or not so."""
    names = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")
    functions = {name: getattr(given, name) for name in names}
    functions |= {f"the metrics of {name!r}": entry.metrics for name, entry in given.eval_sets.items()}
    for name, function in functions.items():
        is_loss = name == "compute_loss_func"
        if function is None or (is_loss and not callable(function) and given.overrides("compute_loss")):
            continue
        if not callable(function):
            more = ", or override compute_loss to return a loss that is divided already" if is_loss else ""
            raise ConfigError(f"Cannot use {name}={function!r}:", "it is not callable.", f"Pass a function{more}.")
        is_by_batch = args.batch_eval_metrics and "metrics" in name and not name.startswith("preprocess")
        if is_by_batch and not accepts(function, "compute_result"):
            raise ConfigError(
                "batch_eval_metrics=True was asked for.",
                f"{name} is called with each batch, and takes no compute_result, which tells it the last one.",
                "Give it the argument compute_result, or leave batch_eval_metrics out.",
                batch_eval_metrics=True,
            )


# -- data ------------------------------------------------------------------------------------------------------------


def _eval_datasets(args: TrainingArguments, given: Given) -> dict[str, Any]:
    """Return what is evaluated while training, by name."""
    datasets = given.eval_dataset
    if args.eval_strategy == "no" or datasets is None or given.overrides("get_eval_dataloader"):
        return {}
    return dict(datasets) if isinstance(datasets, Mapping) else {"eval_dataset": datasets}


def _columns(task: TaskModule, given: Given, dataset: Any) -> set[str] | None:
    """Return the keys of a batch, where the default collator makes it of columns that are known unread; else None."""
    if given.data_collator is not default_data_collator or not isinstance(task, ModelTask):
        return None
    columns = known_columns(dataset)
    if columns is None:
        return None
    names = set(columns)
    if type(dataset) in (list, tuple):
        names = {name for name, value in dataset[0].items() if value is not None and not isinstance(value, str)}
    return names | ({"labels"} if names & {"label", "label_ids"} else set())


def _check_inputs(task: TaskModule, model: nn.Module, given: Given) -> None:
    """Raise where the model needs an input that no column of the data gives."""
    own = ("get_train_dataloader", "training_step", "compute_loss", "get_batch_samples", *_PREPARE)
    columns = None if given.overrides(*own) else _columns(task, given, given.train_dataset)
    if columns is None:
        return
    missing = [
        name
        for name, parameter in forward_parameters(model).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in columns
    ]
    if missing:
        raise TaskError(
            "A dataset was given.",
            f"{type(model).__name__}.forward needs {', '.join(missing)}, and the columns that make a batch "
            f"are {', '.join(sorted(columns))}.",
            "Add the column, rename one, or pass a data_collator that makes it.",
        )


def _check_workers(args: TrainingArguments, given: Given, datasets: Mapping[str, Any]) -> None:
    parts: dict[str, Any] = {f"eval_dataset {name!r}": dataset for name, dataset in datasets.items()}
    if not given.overrides("get_train_dataloader"):
        parts |= {"train_dataset": given.train_dataset, "data_collator": given.data_collator}
    check_sendable(parts, num_workers=args.dataloader_num_workers, method=args.dataloader_multiprocessing_context)


def _check_batches(args: TrainingArguments, strategy: Strategy, given: Given, name: str, dataset: Any) -> None:
    """Raise where an evaluation would find no batch."""
    config = eval_loader_config(args, has_accelerator=False)
    if not config.drop_last or not has_length(dataset) or given.overrides("_get_eval_sampler"):
        return
    n, samples = strategy.world_size, range(len(dataset))
    if not any(len(build_eval_loader(samples, config, collate=list, rank=rank, world_size=n)) for rank in range(n)):
        raise ConfigError(
            f"eval_strategy={str(args.eval_strategy)!r} was asked for.",
            f"The evaluation set {name!r} gives no full batch, and incomplete ones are left out.",
            "Make per_device_eval_batch_size smaller, or set dataloader_drop_last=False.",
            dataloader_drop_last=True,
            per_device_eval_batch_size=config.batch_size,
        )


def _check_columns(
    args: TrainingArguments, task: TaskModule, model: nn.Module, given: Given, name: str, dataset: Any
) -> None:
    """Raise where an evaluation would find batches that the metrics cannot be computed from."""
    own = ("evaluate", "evaluation_loop", "prediction_loop", "prediction_step", *_PREPARE)
    columns = None if given.overrides(*own) else _columns(task, given, dataset)
    entry = given.eval_sets.get(name)
    if columns is None or (given.compute_metrics is None and (entry is None or entry.metrics is None)):
        return
    labels, main, lacking = list(given.label_names), getattr(model, "main_input_name", "input_ids"), None
    if labels and not set(labels) <= columns:
        lacking = f"labels ({', '.join(labels)})"
        remedy = "Name the label columns in label_names, add them to the data, or leave compute_metrics out."
    elif "inputs" in args.include_for_metrics and main not in columns:
        lacking = f"main input {main!r}"
        remedy = "Set main_input_name on the model to the column that it is to get."
    if lacking:
        reason = f"The evaluation set {name!r} has no {lacking} for it, only {', '.join(sorted(columns))}."
        raise TaskError("compute_metrics was given.", reason, remedy)


def _check_plan(args: TrainingArguments, strategy: Strategy, given: Given, *, rate: float | None) -> None:
    """Raise where the data gives no batch, or the schedule, if one begins at a rate, cannot be made for the run."""
    num_steps, dataset = args.max_steps, given.train_dataset
    if has_length(dataset):
        config, place = train_loader_config(args, has_accelerator=False), (strategy.rank, strategy.world_size)
        loader = build_train_loader(range(len(dataset)), config, collate=list, rank=place[0], world_size=place[1])
        num_steps = num_steps if rate is None else given.count_steps(loader)
    if rate is not None:
        stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(rate))
        build_schedule(schedule_config(args, num_training_steps=num_steps), stand_in)


# -- saving ----------------------------------------------------------------------------------------------------------


def watch_states(
    args: TrainingArguments,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    loops: Mapping[str, Any],
    *,
    own: Callable[[], Any],
    pending: list[Callable[[], None]],
    is_overridden: Callable[[str], bool],
) -> None:
    """Refuse a run whose optimizer, schedule or data has a state that no checkpoint can hold.

    Checks now, before the first step, and once after it, when the optimizer has made its state.

    Args:
        args: The run's.
        strategy: Launched.
        optimizer: Of the run about to begin.
        schedule: Its schedule, if any.
        loops: The run's, by stage.
        own: Returns what else each process saves.
        pending: What the loop calls at each step's end, see `FitParts`; mutated.
        is_overridden: Tells whether the user's class has a hook of its own.

    Raises:
        ConfigError: It names the value and its type.
    """

    def check() -> None:
        in_use = [loop for stage, loop in loops.items() if stage != "fit" or loop.is_attached]
        states: dict[str, Any] = {f"The state of {type(loop).__name__}": loop.state_dict for loop in in_use}
        states["The state of the training data"] = own
        if not is_overridden("_save_optimizer_and_scheduler"):
            # Where processes hold parts, their state is put together for a save.
            whole = optimizer.state_dict if not strategy.shards_model else partial(group_settings, optimizer)
            states[f"The state of {type(optimizer).__name__}"] = whole
            if schedule is not None:
                states[f"The state of {type(schedule).__name__}"] = schedule.state_dict
        _check_states(states)

    def check_again() -> None:
        pending.remove(check_again)
        check()

    if not args.save_only_model:
        check()
        pending.append(check_again)


def _check_states(states: Mapping[str, Callable[[], Any]]) -> None:
    for name, read in states.items():
        try:
            state = read()
        except Exception:
            # Some have no state before they are used.
            continue
        try:
            plain_containers(map_tensors(state, lambda _: None))
        except CheckpointError as error:
            remedy = "Or set save_only_model=True; such a run cannot be resumed."
            raise ConfigError(f"{name} should be saved in each checkpoint.", str(error), remedy) from error


def _check_saves(args: TrainingArguments, strategy: Strategy, task: TaskModule, model: nn.Module, given: Given) -> None:
    """Raise where the state of the model, the task or a callback cannot be written."""
    is_own = given.overrides("save_model", "_save", "_save_checkpoint")
    if not is_own and not strategy.shards_model:
        check_saveable(model, model.state_dict(), safe=bool(args.save_safetensors))
    foreign = [name for name, value in task_state(task).items() if not isinstance(value, torch.Tensor)]
    if foreign and not is_own:
        raise CheckpointError(
            f"Cannot save what {type(task).__name__} holds next to its model:",
            f"{', '.join(foreign)} is not a tensor.",
            "Return a tensor from get_extra_state(), or keep the state in buffers that are written in place.",
        )
    for callback in given.callbacks:
        if callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None)):
            try:
                json.dumps(callback.state())
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"The callback {type(callback).__name__} exports its state, to be saved in each checkpoint.",
                    f"It cannot be written as JSON: {error}.",
                    "Let state() return numbers, text, lists and dictionaries.",
                ) from error
            except Exception:
                # Some have no state before the run begins.
                pass
