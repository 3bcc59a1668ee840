"""Checks that checkpoints can be written, ranked and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.base import ExportableState
from hftrain.checkpoint.fitting import group_settings
from hftrain.checkpoint.weights import check_saveable
from hftrain.checkpoint.writer import SavePolicy
from hftrain.core.errors import CheckpointError, ConfigError, refuse
from hftrain.core.notes import describe
from hftrain.storage.tensors import plain_containers
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule, task_state

_STATE_REMEDY = "Let state() return {'args': {...}, 'attributes': {...}} of numbers, text, lists and dictionaries."


def check_save_policy(args: TrainingArguments, policy: SavePolicy, strategy: Strategy) -> None:
    """Raise if a `SavePolicy` cannot be applied with these arguments and this strategy."""
    is_ranked = args.metric_for_best_model is not None and args.eval_strategy != "no"
    restores = policy.on_nonfinite == "restore"
    refuse(
        (
            (
                policy.keep_best is not None and not is_ranked,
                f"Cannot use SavePolicy(keep_best={policy.keep_best}).",
                "No evaluation says which checkpoints are the best.",
                "Set metric_for_best_model, and eval_strategy to 'steps' or 'epoch'.",
                {"metric_for_best_model": args.metric_for_best_model, "eval_strategy": str(args.eval_strategy)},
            ),
            (
                policy.on_exception and args.auto_find_batch_size == "smaller_batch",
                "Cannot use SavePolicy(on_exception=True) with auto_find_batch_size='smaller_batch'.",
                "That starts the run again after an error, while a checkpoint is for going on.",
                "Use auto_find_batch_size=True, which cuts the batches of the step instead.",
            ),
            (
                restores and args.save_only_model,
                "Cannot use SavePolicy(on_nonfinite='restore') with save_only_model=True.",
                "Its checkpoints lack the optimizer's state, which a restore needs.",
                "Leave save_only_model out, or use on_nonfinite='stop'.",
            ),
            (
                restores and not strategy.restores_in_a_run,
                f"Cannot use SavePolicy(on_nonfinite='restore') with strategy={strategy.name!r}.",
                "Its engine loads weights only when it is built, not during training.",
                "Use on_nonfinite='stop', and resume from the last finite checkpoint.",
            ),
        )
    )


def watch_states(
    args: TrainingArguments,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    loops: Mapping[str, Any],
    *,
    read_own: Callable[[], Any],
    pending: list[Callable[[], None]],
    is_overridden: Callable[[str], bool],
) -> None:
    """Raise if the optimizer, the schedule or the data has a state that cannot be saved in a checkpoint.

    Checks now, before the first step, and again after it, when the optimizer has its state.

    Args:
        read_own: Returns the other state that each process saves.
        pending: Functions that the loop calls at the end of each step, see `FitParts`; mutated.
    """

    def check() -> None:
        used_loops = [loop for stage, loop in loops.items() if stage != "fit" or loop.is_attached]
        states: dict[str, Any] = {f"the state of {type(loop).__name__}": loop.state_dict for loop in used_loops}
        states["the state of the training data"] = read_own
        if not is_overridden("_save_optimizer_and_scheduler"):
            # A sharded optimizer's state is gathered at each save; only its settings are checked here.
            read = optimizer.state_dict if not strategy.shards_model else partial(group_settings, optimizer)
            states[f"the state of {type(optimizer).__name__}"] = read
            if schedule is not None:
                # Without a state_dict(), it cannot be saved itself.
                states[f"the state of {type(schedule).__name__}"] = getattr(schedule, "state_dict", lambda: schedule)
        _check_states(states)

    def check_again() -> None:
        pending.remove(check_again)
        check()

    if not args.save_only_model:
        check()
        pending.append(check_again)


def _check_states(states: Mapping[str, Callable[[], Any]]) -> None:
    for name, read_state in states.items():
        try:
            state = read_state()
        except Exception:
            # Some objects have no state before they are used.
            continue
        try:
            plain_containers(state)
        except CheckpointError as error:
            remedy = "Or set save_only_model=True; such a run cannot be resumed."
            raise ConfigError(f"Cannot save {name} in each checkpoint.", str(error), remedy) from error


def check_saves(
    args: TrainingArguments,
    strategy: Strategy,
    task: TaskModule,
    model: nn.Module,
    callbacks: Sequence[Any],
    *,
    saves_itself: bool,
) -> None:
    """Raise if the state of the model, the task or a callback cannot be saved.

    Args:
        saves_itself: Whether the user's class writes checkpoints or models itself.
    """
    if not saves_itself:
        # A split model's weights are gathered at each save; only its configurations are checked here.
        check_saveable(model, {} if strategy.shards_model else model.state_dict(), safe=bool(args.save_safetensors))
    foreign_names = [name for name, value in task_state(task).items() if not isinstance(value, torch.Tensor)]
    if foreign_names and not saves_itself:
        raise CheckpointError(
            f"Cannot save what {type(task).__name__} holds next to its model:",
            f"{', '.join(foreign_names)} is not a tensor.",
            "Return a tensor from get_extra_state(), or keep the state in buffers that are written in place.",
        )
    for callback in callbacks:
        if callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None)):
            try:
                state = callback.state()
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"Cannot save the state of the callback {type(callback).__name__}:",
                    f"it cannot be written as JSON: {error}.",
                    _STATE_REMEDY,
                ) from error
            except NotImplementedError as error:
                raise ConfigError("Cannot save the state of a callback.", str(error), _STATE_REMEDY) from error
            except Exception:
                # Some callbacks have no state before the run begins.
                continue
            owner = next((parent for parent in type(callback).__mro__ if "from_state" in vars(parent)), None)
            if owner is ExportableState and (not isinstance(state, Mapping) or state.keys() - {"args", "attributes"}):
                raise ConfigError(
                    f"Cannot restore the state of the callback {type(callback).__name__}:",
                    f"its state() returned {describe(state)}, and only 'args' and 'attributes' are restored.",
                    _STATE_REMEDY,
                )
