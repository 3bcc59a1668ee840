"""What would fail late in a run, or run for nothing, and can be told before anything is launched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hftrain.adapter.data import eval_loader_config, train_loader_config
from hftrain.adapter.optim import schedule_config
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
from hftrain.task.introspect import forward_parameters
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule
from hftrain.trainer.capture import task_state
from hftrain.trainer.checks import check_best_metric
from hftrain.trainer.signatures import accepts

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer


def check_ahead(trainer: Trainer) -> None:
    """Refuse a training that cannot come to a good end; reads no data and launches nothing.

    Raises:
        HFTrainError: It names what would fail, and what to do.
    """
    args = trainer.args
    _check_functions(trainer)
    _check_metrics(trainer)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            callback.check_settings(args)
    with preserved_rng():
        _check_inputs(trainer)
        _check_workers(trainer)
        _check_plan(trainer)
        if args.eval_strategy != "no":
            _check_evaluations(trainer)
    if args.save_strategy != "no":
        _check_saves(trainer)
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()) and _makes_optimizer(trainer):
        raise ConfigError(
            f"{type(trainer.model).__name__} was to be trained.",
            "None of its parameters requires a gradient.",
            "Unfreeze some.",
        )


def _check_metrics(trainer: Trainer) -> None:
    """Raise where nothing reports `metric_for_best_model`; not before a training, for metrics may be set until then."""
    hooks = ("evaluate", "_evaluate", "evaluation_loop", "prediction_loop", "log", "_determine_best_metric")
    listeners = (getattr(callback, "on_evaluate", None) for callback in trainer.callback_handler.callbacks)
    # A callback's own on_evaluate may add to the metrics that it is given.
    roots = {getattr(listener, "__module__", "").partition(".")[0] for listener in listeners if listener is not None}
    if any(map(trainer._is_overridden, hooks)) or roots - {"hftrain", "transformers"}:
        return
    own = next((entry.metrics for entry in trainer._eval_sets.values() if entry.metrics is not None), None)
    metrics = trainer.compute_metrics or own
    check_best_metric(trainer.args, task=trainer.task, compute_metrics=metrics, eval_dataset=trainer.eval_dataset)


def check_fits(trainer: Trainer, folder: Path | None) -> None:
    """Raise where a checkpoint plainly holds another model; whether it holds all of this one is seen when it is loaded.

    Raises:
        CheckpointError: Weights of the same name have other shapes, or no name is the same; or it holds only weights.
    """
    if folder is not None:
        check_complete(folder, OPTIMIZER)
    if folder is None or not (folder / WEIGHTS).is_file() or trainer._is_overridden("_load_from_checkpoint"):
        return
    found = tensor_shapes(folder / WEIGHTS)
    # What ZeRO-3 has split, in an evaluation or a training before, is empty in itself.
    own = {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in trainer.model.named_parameters()}
    others = [f"{name} is {found[name]}, not {own[name]}" for name in own if found.get(name, own[name]) != own[name]]
    if others and trainer.get_tp_size() == 1:
        raise CheckpointError(
            f"Resuming from {folder} was asked for.",
            f"It holds another model than this {type(trainer.model).__name__}: {'; '.join(others[:3])}.",
            "Build the model as it was, or name another checkpoint.",
        )


def _check_functions(trainer: Trainer) -> None:
    """Raise where something that is to be called cannot be, or not so."""
    functions = {
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics,
        "compute_loss_func": trainer.compute_loss_func,
        **{f"the metrics of {name!r}": entry.metrics for name, entry in trainer._eval_sets.items()},
    }
    for name, function in functions.items():
        is_mark = name == "compute_loss_func" and trainer._is_overridden("compute_loss")
        if function is not None and not callable(function) and not is_mark:
            raise ConfigError(
                f"Cannot use {name}={function!r}:",
                "it is not callable.",
                "Pass a function."
                if name != "compute_loss_func"
                else "Pass a function, or override compute_loss to return a loss that is divided already.",
            )
        is_by_batch = trainer.args.batch_eval_metrics and "metrics" in name and not name.startswith("preprocess")
        if function is not None and is_by_batch and not accepts(function, "compute_result"):
            raise ConfigError(
                "batch_eval_metrics=True was asked for.",
                f"{name} is called with each batch, and takes no compute_result, which tells it the last one.",
                "Give it the argument compute_result, or leave batch_eval_metrics out.",
                batch_eval_metrics=True,
            )


# -- data ------------------------------------------------------------------------------------------------------------


def _eval_sets(trainer: Trainer) -> dict[str, Any]:
    """Return what is evaluated while training, by name."""
    datasets = trainer.eval_dataset
    if trainer.args.eval_strategy == "no" or datasets is None or trainer._is_overridden("get_eval_dataloader"):
        return {}
    return dict(datasets) if isinstance(datasets, Mapping) else {"eval_dataset": datasets}


def _columns(trainer: Trainer, dataset: Any) -> set[str] | None:
    """Return the keys of a batch, where the default collator makes it of columns that are known unread; else None."""
    if trainer.data_collator is not default_data_collator or not isinstance(trainer.task, ModelTask):
        return None
    columns = known_columns(dataset)
    if columns is None:
        return None
    names = set(columns)
    if type(dataset) in (list, tuple):
        names = {name for name, value in dataset[0].items() if value is not None and not isinstance(value, str)}
    return names | ({"labels"} if names & {"label", "label_ids"} else set())


def _overrides(trainer: Trainer, *names: str) -> bool:
    return any(map(trainer._is_overridden, names))


def _check_inputs(trainer: Trainer) -> None:
    """Raise where the model needs an input that no column of the data gives."""
    own = ("get_train_dataloader", "training_step", "compute_loss", "_prepare_inputs", "_prepare_input")
    columns = None if _overrides(trainer, *own, "get_batch_samples") else _columns(trainer, trainer.train_dataset)
    if columns is None:
        return
    needed = [
        name
        for name, parameter in forward_parameters(trainer.model).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise TaskError(
            "A dataset was given.",
            f"{type(trainer.model).__name__}.forward needs {', '.join(missing)}, and the columns that make a batch "
            f"are {', '.join(sorted(columns))}.",
            "Add the column, rename one, or pass a data_collator that makes it.",
        )


def _check_workers(trainer: Trainer) -> None:
    parts: dict[str, Any] = {f"eval_dataset {name!r}": dataset for name, dataset in _eval_sets(trainer).items()}
    if not trainer._is_overridden("get_train_dataloader"):
        parts |= {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    method = trainer.args.dataloader_multiprocessing_context
    check_sendable(parts, num_workers=trainer.args.dataloader_num_workers, method=method)


def _check_evaluations(trainer: Trainer) -> None:
    """Raise where an evaluation would find no batch, or batches that the metrics cannot be computed from."""
    config = eval_loader_config(trainer.args, has_accelerator=False)
    if trainer.spill_dir is not None:
        check_writable(trainer.spill_dir)
    for name, dataset in _eval_sets(trainer).items():
        if config.drop_last and has_length(dataset) and not trainer._is_overridden("_get_eval_sampler"):
            world_size = trainer.strategy.world_size
            loaders = (
                build_eval_loader(range(len(dataset)), config, collate=list, rank=rank, world_size=world_size)
                for rank in range(world_size)
            )
            if not any(map(len, loaders)):
                raise ConfigError(
                    f"eval_strategy={str(trainer.args.eval_strategy)!r} was asked for.",
                    f"The evaluation set {name!r} gives no full batch, and incomplete ones are left out.",
                    "Make per_device_eval_batch_size smaller, or set dataloader_drop_last=False.",
                    dataloader_drop_last=True,
                    per_device_eval_batch_size=config.batch_size,
                )
        own = ("evaluate", "evaluation_loop", "prediction_loop", "prediction_step", "_prepare_inputs", "_prepare_input")
        columns = None if _overrides(trainer, *own) else _columns(trainer, dataset)
        entry = trainer._eval_sets.get(name)
        has_metrics = trainer.compute_metrics is not None or (entry is not None and entry.metrics is not None)
        if columns is not None and has_metrics:
            for what, remedy in _needed_by_metrics(trainer, columns):
                raise TaskError(
                    "compute_metrics was given.",
                    f"The evaluation set {name!r} has no {what} for it, only {', '.join(sorted(columns))}.",
                    remedy,
                )


def _needed_by_metrics(trainer: Trainer, columns: set[str]) -> Iterator[tuple[str, str]]:
    """Yield what `compute_metrics` needs and the columns lack, and what to do about it."""
    names = list(trainer.label_names)
    if names and not set(names) <= columns:
        remedy = "Name the label columns in label_names, add them to the data, or leave compute_metrics out."
        yield f"labels ({', '.join(names)})", remedy
    main = getattr(trainer.model, "main_input_name", "input_ids")
    if "inputs" in trainer.args.include_for_metrics and main not in columns:
        yield f"main input {main!r}", "Set main_input_name on the model to the column that it is to get."


# -- plan, optimizer and schedule ------------------------------------------------------------------------------------


def _makes_optimizer(trainer: Trainer) -> bool:
    """Tell whether nobody but the Trainer itself makes the optimizer."""
    makes_own = type(trainer.task).configure_optimizers is not TaskModule.configure_optimizers
    hooks = ("create_optimizer", "create_optimizer_and_scheduler")
    is_made = makes_own or "optimizer" in trainer.strategy.makes or trainer.optimizer is not None
    return not (is_made or _overrides(trainer, *hooks))


def _check_plan(trainer: Trainer) -> None:
    """Raise where the data gives no batch, or the schedule cannot be made for as long as the run is."""
    args, dataset = trainer.args, trainer.train_dataset
    if _overrides(trainer, "get_train_dataloader", "_get_train_sampler", "set_initial_training_values"):
        return
    config = train_loader_config(args, has_accelerator=False)
    loader: Any = None
    if has_length(dataset):
        place = {"rank": trainer.strategy.rank, "world_size": trainer.strategy.world_size}
        loader = build_train_loader(range(len(dataset)), config, collate=list, **place)
    makes_schedule = trainer.lr_scheduler is None and "scheduler" not in trainer.strategy.makes
    if not (makes_schedule and _makes_optimizer(trainer)) or trainer._is_overridden("create_scheduler"):
        return
    num_steps = args.max_steps
    if loader is not None:
        total = trainer.get_total_train_batch_size(args)
        num_steps = trainer.set_initial_training_values(args, loader, total)[6]
    rate = (trainer.optimizer_cls_and_kwargs or (None, {}))[1].get("lr", args.learning_rate)
    stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(rate))
    build_schedule(schedule_config(args, num_training_steps=num_steps), stand_in)


# -- saving ----------------------------------------------------------------------------------------------------------


def watch_states(
    trainer: Trainer,
    optimizer: torch.optim.Optimizer,
    *,
    own: Callable[[], Any],
    pending: list[Callable[[], None]],
) -> None:
    """Refuse a run whose optimizer, schedule or data has a state that no checkpoint can hold.

    Checks now, before the first step, and once after it, when the optimizer has made its state.

    Args:
        trainer: About to train.
        optimizer: Its optimizer.
        own: Returns what else each process saves.
        pending: What the loop calls at each step's end, see `FitParts`; mutated.

    Raises:
        ConfigError: It names the value and its type.
    """

    def check_again() -> None:
        pending.remove(check_again)
        _check_states(trainer, optimizer, own=own)

    if not trainer.args.save_only_model:
        _check_states(trainer, optimizer, own=own)
        pending.append(check_again)


def _check_states(trainer: Trainer, optimizer: torch.optim.Optimizer, *, own: Callable[[], Any]) -> None:
    loops = [loop for stage, loop in trainer._loops.items() if stage != "fit" or loop.is_attached]
    states: dict[str, Callable[[], Any]] = {f"The state of {type(loop).__name__}": loop.state_dict for loop in loops}
    states["The state of the training data"] = own
    if not _overrides(trainer, "_save_optimizer_and_scheduler"):
        # Where processes hold parts, their state is put together for a save.
        whole = optimizer.state_dict if not trainer.strategy.shards_model else partial(group_settings, optimizer)
        states[f"The state of {type(optimizer).__name__}"] = whole
        if trainer.lr_scheduler is not None:
            states[f"The state of {type(trainer.lr_scheduler).__name__}"] = trainer.lr_scheduler.state_dict
    for name, read in states.items():
        try:
            state = read()
        except Exception:
            # Some have no state before they are used.
            continue
        try:
            plain_containers(map_tensors(state, lambda _: None))
        except CheckpointError as error:
            raise ConfigError(
                f"{name} should be saved in each checkpoint.",
                str(error),
                "Or set save_only_model=True; such a run cannot be resumed.",
            ) from error


def _check_saves(trainer: Trainer) -> None:
    """Raise where the model's or a callback's state cannot be written."""
    is_own = _overrides(trainer, "save_model", "_save", "_save_checkpoint")
    if not is_own and not trainer.strategy.shards_model:
        check_saveable(trainer.model, trainer.model.state_dict(), safe=bool(trainer.args.save_safetensors))
    foreign = [name for name, value in task_state(trainer.task).items() if not isinstance(value, torch.Tensor)]
    if foreign and not is_own:
        raise CheckpointError(
            f"Cannot save what {type(trainer.task).__name__} holds next to its model:",
            f"{', '.join(foreign)} is not a tensor.",
            "Return a tensor from get_extra_state(), or keep the state in buffers that are written in place.",
        )
    for callback in trainer.callback_handler.callbacks:
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
