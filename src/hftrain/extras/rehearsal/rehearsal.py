"""`fast_dev_run`: run a few batches of every stage, save and resume included, and clean up afterwards."""

from __future__ import annotations

import contextlib
import copy
import gc
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import TrainerCallback
from hftrain.checkpoint.manifest import checkpoint_name
from hftrain.core.devices import empty_cache
from hftrain.core.errors import TaskError
from hftrain.core.extras import extra
from hftrain.core.preserve import preserved
from hftrain.core.seed import preserved_rng
from hftrain.core.types import TrainOutput
from hftrain.data.datasets import preserved_data
from hftrain.run.parts import TrainerHooks, TrainerPart
from hftrain.trainer.parts import TrainerParts


def rehearse(
    trainer: TrainerHooks,
    parts: TrainerParts,
    run: Callable[[Path | None], TrainOutput],
    *,
    num_batches: int,
    resume: Path | None,
    existing: Path,
) -> TrainOutput:
    """Train, evaluate, save and resume with copies, restore everything, and return the training's result; collective.

    Args:
        found: The existing part of the output folder's path when `train` was called, see `existing_part`.
    """
    args, strategy, output_dir = trainer.args, trainer.strategy, trainer.output_dir
    size = trainer.get_total_train_batch_size(args)
    # In the folder the real run saves to, unless that is remote: only the real run writes to a store.
    parent = output_dir if "://" not in str(output_dir) else Path.cwd()
    folder = parent / str(strategy.broadcast_object(f".rehearsal-{uuid.uuid4().hex[:8]}"))
    # A process may have created folders that another one then found, so the shortest path is taken.
    existing = Path(min(strategy.gather_object(str(existing)), key=len))
    # Initialise the device: its generators can be saved only once they exist.
    torch.empty(0, device=strategy.device)
    first, second = _Director(num_batches, acts=True), _Director(1, acts=False)
    start_s = time.perf_counter()
    try:
        with copies(trainer, parts, folder, first):
            output = run(resume)
        _free()
        if first.saved_step is not None and not args.save_only_model:
            with copies(trainer, parts, folder, second):
                run(folder / checkpoint_name(first.saved_step))
    finally:
        # The process that wrote the files deletes them.
        if strategy.is_local_main if args.save_on_each_node else strategy.is_main:
            clear(folder, output_dir, existing=existing)
        _free()
    # No process continues before the files are deleted.
    strategy.barrier()
    if strategy.is_main:
        print(_summary(args, first, second, size=size, took_s=time.perf_counter() - start_s))
    return output


@contextlib.contextmanager
def copies(trainer: TrainerHooks, parts: TrainerParts, folder: Path, director: TrainerCallback) -> Iterator[None]:
    """Train copies, into another folder and with an extra callback; restore all attributes of a Trainer afterwards."""
    handler, callbacks = trainer.callback_handler, list(trainer.callback_handler.callbacks)
    eval_sets = trainer.eval_dataset
    datasets = [trainer.train_dataset, *(eval_sets.values() if isinstance(eval_sets, Mapping) else [eval_sets])]
    try:
        own_parts = (part for part in vars(parts).values() if isinstance(part, TrainerPart))
        stateful = trainer, parts, *own_parts, trainer.args, trainer.state, trainer.control, *callbacks
        with preserved(*stateful), preserved_data(*datasets), preserved_rng(), warnings.catch_warnings():
            # A copied optimizer lacks the wrapper around `step` with which torch's schedules detect its calls.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            _copy_parts(trainer, parts)
            trainer.args.output_dir, trainer.args.push_to_hub = str(folder), False
            # With fast_dev_run the constructor added no trackers, but a finder may still have them.
            handler.callbacks[:] = [*extra("trackers").without_trackers(callbacks), director]
            handler.refresh(model=trainer.model, optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler)
            yield
    finally:
        handler.callbacks[:] = callbacks
        handler.refresh(model=trainer.model, optimizer=trainer.optimizer, lr_scheduler=trainer.lr_scheduler)


def _copy_parts(trainer: TrainerHooks, trainer_parts: TrainerParts) -> None:
    """Copy model, optimizer, schedule and loops together because they refer to each other."""
    adopted = trainer_parts.model
    try:
        if trainer.model_init is not None:
            trainer.loops = copy.deepcopy(trainer.loops)
            return
        parts = trainer.task, adopted.outermost, trainer.optimizer, trainer.lr_scheduler, trainer.loops
        trainer.task, adopted.outermost, trainer.optimizer, trainer.lr_scheduler, trainer.loops = copy.deepcopy(parts)
    except Exception as error:
        what_else = ", its optimizer or its loop" if trainer.loops else " or its optimizer"
        raise TaskError(
            f"Cannot use fast_dev_run={trainer.fast_dev_run}.",
            f"It trains a copy, and {type(trainer.model).__name__}{what_else} cannot be copied: {error!r}.",
            "Pass model_init=, a function that makes the model, or leave fast_dev_run out.",
        ) from error
    trainer.model, trainer.model_wrapped = trainer.task.model, adopted.outermost


@dataclass(eq=False)
class _Director(TrainerCallback):
    """Stop after a few steps, the last of which logs, evaluates and saves if it `acts`; measure the times."""

    num_steps: int
    acts: bool
    step_s: list[float] = field(default_factory=list)
    evaluated: dict[str, float] = field(default_factory=dict)
    saved_step: int | None = None
    save_s: float = 0.0
    planned_steps: int = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.planned_steps = state.max_steps
        self._stop_at = min(state.global_step + self.num_steps, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_s.append(time.perf_counter() - self._since_s)
        self._since_s = time.perf_counter()
        if state.global_step < self._stop_at:
            return
        control.should_training_stop = True
        control.should_log = self.acts
        control.should_evaluate = self.acts and args.eval_strategy != "no"
        control.should_save = self.acts and args.save_strategy != "no"

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        runtimes = {name[: -len("_runtime")]: value for name, value in (metrics or {}).items()}
        self.evaluated |= {name: runtimes[name] for name in runtimes if f"{name}_runtime" in (metrics or {})}
        self._since_s = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_step, self.save_s = state.global_step, time.perf_counter() - self._since_s

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:
            control.should_log = control.should_evaluate = control.should_save = False


def _free() -> None:
    gc.collect()
    empty_cache()


def clear(folder: Path, output_dir: Path, *, existing: Path) -> None:
    """Delete the files written."""
    shutil.rmtree(folder, ignore_errors=True)
    # These folders were created to check that they are writable; folders that are not empty are kept.
    with contextlib.suppress(OSError):
        for folder_made in takewhile(existing.__ne__, (output_dir, *output_dir.parents)):
            folder_made.rmdir()


def _summary(args: TrainingArguments, first: _Director, second: _Director, *, size: int, took_s: float) -> str:
    num_batches = first.num_steps
    steady = first.step_s[1:] or first.step_s
    step_s = sum(steady) / len(steady) if steady else 0.0
    lines = [f"Dry run with fast_dev_run={num_batches} took {took_s:.1f} s; its files were removed."]
    lines.append(f"  train     {len(first.step_s)} steps of {size} samples, {step_s:.3g} s each after the first")
    for name, runtime_s in first.evaluated.items():
        lines.append(f"  evaluate  {num_batches} batches for {name}_*, {runtime_s:.3g} s")
    if first.saved_step is None:
        lines.append(f"  save      not rehearsed: save_strategy={str(args.save_strategy)!r}")
    else:
        lines.append(f"  save      {checkpoint_name(first.saved_step)}, {first.save_s:.3g} s")
        resumed = "not rehearsed: save_only_model=True" if args.save_only_model else "from it"
        lines.append(f"  resume    {resumed}{f', then {len(second.step_s)} more step' if second.step_s else ''}")
    num_steps = first.planned_steps
    if num_steps > 0:
        lines.append(
            f"  A run of {num_steps:,} steps takes about {num_steps * step_s:,.0f} s, not counting evaluations."
        )
    return "\n".join(lines)
