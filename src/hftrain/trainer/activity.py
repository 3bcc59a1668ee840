"""Which documented method runs, and what is open meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from hftrain.arguments.training import resolve
from hftrain.core.devices import move
from hftrain.core.errors import listed
from hftrain.core.extras import extra
from hftrain.core.log import refusing_broadcast, sharing_verbosity, warn_once
from hftrain.core.seed import preserved_rng
from hftrain.core.signatures import Hooks
from hftrain.evaluation.preparation import cast_weights, full_eval_dtype, keeps_cache, switch_cache_off
from hftrain.run.build import report_late_ranks
from hftrain.run.parts import RunParts, TrainerHooks
from hftrain.task.metric_state import checked_metrics, reset
from hftrain.task.model_task import ModelTask
from hftrain.task.modes import evaluation_weights, preserved_modes
from hftrain.task.module import know_state, without_model
from hftrain.trainer.training_steps import TrainingSteps

# Arguments that a run reads at its start alone.
_READ_ONCE = ("learning_rate", "weight_decay", "warmup_steps", "max_steps", "num_train_epochs", "logging_steps",
              "eval_steps", "save_steps")  # fmt: skip
_STAGES = {"eval": "evaluate", "predict": "predict"}


class Activity:
    """Launch the strategy and open the precision while `train`, `evaluate` or `predict` runs; these may be nested.

    Attributes:
        depth: How many of these calls run.
        name: The innermost: ``"train"``, which is also the value between calls, ``"eval"`` or ``"predict"``.
        run_parts: The parts of the current run, None between runs.
    """

    run_parts: RunParts | None

    def __init__(self, trainer: TrainerHooks, hooks: Hooks, steps: TrainingSteps, memory: Any) -> None:
        self._trainer, self._hooks, self.steps, self._memory = trainer, hooks, steps, memory
        self.run_parts = None
        self.depth, self.name = 0, "train"
        # Whether the precision has been prepared for steps outside of these calls.
        self._is_prepared = False

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Run a documented method; explain its errors."""
        trainer, previous = self._trainer, self.name
        self.name = name
        self.depth += 1
        try:
            if self.depth == 1:
                self._open()
            with sharing_verbosity(), refusing_broadcast():
                yield
            asked, settings = _READ_ONCE if name == "train" and self.depth == 1 else (), self._checked_settings
            if changed := [each for each in asked if getattr(trainer.args, each) != settings[each]]:
                warn_once(
                    f"{listed(changed)} in args changed during the run, which had read it at its start: it had no "
                    "effect. Change optimizer.param_groups, the schedule or the attributes of state instead."
                )
        except Exception as error:
            if isinstance(error, RuntimeError):
                report_late_ranks(trainer.strategy, error)
            loss_maker = f"{type(trainer).__name__}.compute_loss" if self._hooks.is_overridden("compute_loss") else None
            loss_maker = loss_maker or (None if trainer.compute_loss_func is None else "compute_loss_func")
            has_eval_collator = self.name != "train" and trainer.eval_collator is not None
            makers = {"loss_maker": loss_maker, "collator": "eval_collator" if has_eval_collator else "data_collator"}
            extra("mistakes").explain_mistake(error, trainer.task, trainer.model, trainer=type(trainer), **makers)
            raise
        finally:
            self.depth -= 1
            self.name = previous
            if self.depth == 0:
                self.steps.stop_observing()
                trainer.compiler.close()
                trainer.precision.close()
                if self._memory is not None:
                    self._memory.stop()

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Measure the memory of the Trainer's constructor, as of a stage."""
        if self._memory is not None:
            self._memory.start("init")
        try:
            yield
        finally:
            if self._memory is not None:
                self._memory.stop()
            self._checked_settings = dict(vars(self._trainer.args))

    def check_arguments(self) -> None:
        """Check the settings again if some were assigned since."""
        if vars(self._trainer.args) != self._checked_settings:
            resolve(self._trainer.args)
            self._checked_settings = dict(vars(self._trainer.args))

    def place(self) -> None:
        """Give a model that is not being trained the dtype and the place in which it is evaluated."""
        trainer = self._trainer
        if self.run_parts is None:
            trainer.model = trainer.task.model = trainer.precision.convert(trainer.model)
            self._place()

    def _open(self) -> None:
        trainer, strategy, task = self._trainer, self._trainer.strategy, self._trainer.task
        self.check_arguments()
        self.steps.resolve()  # again, because scripts may assign hooks to the instance
        if self._memory is not None:
            self._memory.start("test" if self.name == "predict" else self.name)
        strategy.launch()
        trainer.precision.open(strategy.device, strategy.scaler_factory)
        if isinstance(task, ModelTask):
            task.label_names, task.can_return_loss = list(trainer.label_names), trainer.can_return_loss
        trainer.compiler.open()
        if strategy.watch is not None:
            strategy.watch.where = self.whereabouts
            strategy.watch.meet(_STAGES.get(self.name, self.name))

    @contextmanager
    def evaluating(self, name: str) -> Iterator[None]:
        """Evaluate the unwrapped model in evaluation mode; weights, modes and random numbers are restored."""
        trainer = self._trainer
        optimizer_weights = evaluation_weights(trainer.optimizer)
        with self.running(name), preserved_rng(), optimizer_weights, trainer.callback_handler.evaluation_weights():
            is_training = self.run_parts is not None
            if not is_training:
                trainer.model = trainer.task.model = trainer.precision.convert(trainer.model)
            dtype = full_eval_dtype(trainer.args) if self.steps.computing.input_dtype is None else None
            # Cast before placing: the original weights stay in host memory, and the device holds only the copies.
            with cast_weights(trainer.model, dtype, keep_on=None if is_training else torch.device("cpu")):
                if not is_training:
                    self._place()
                with preserved_modes(trainer.task), self._in_evaluation_mode(dtype):
                    yield

    @contextmanager
    def _in_evaluation_mode(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Evaluate the task's unwrapped model, with inputs cast to a dtype if there is one."""
        trainer, task, computing = self._trainer, self._trainer.task, self.steps.computing
        wrapped = task.model
        task.model = self._hooks.wrap_model(wrapped, training=False)
        know_state(task, trainer.state)
        task.eval()
        metrics = checked_metrics(task, "eval")
        reset(metrics)
        former_settings = computing.past, computing.input_dtype, computing.autocast
        computing.past = None
        if dtype is not None:
            computing.input_dtype, computing.autocast = dtype, nullcontext
        restore_cache = None if keeps_cache(trainer.args) else switch_cache_off(trainer.model)
        try:
            yield
        finally:
            reset(metrics)  # not before: callbacks may read them in `on_evaluate`
            if restore_cache is not None:
                restore_cache()
            computing.past, computing.input_dtype, computing.autocast = former_settings
            if getattr(task.model, "training", False):
                warn_once(
                    f"{type(task.model).__name__} was put into training mode during the evaluation: dropout and batch "
                    "statistics were active. Remove .train() from the evaluation; modes are set for you."
                )
            trainer.strategy.after_evaluation(wrapped)
            task.model = wrapped

    def _place(self) -> None:
        """Prepare the forward pass of a model that is not being trained."""
        self._place_task()
        self._trainer.compiler.compile(self._trainer.model)
        self.steps.cast_model()

    def place_idle(self) -> None:
        """Launch the strategy and place the model, for a step that a script calls outside of these methods."""
        strategy = self._trainer.strategy
        strategy.launch()
        if not self._is_prepared:
            self._trainer.precision.prepare(strategy.device, strategy.scaler_factory)
            self._is_prepared = True
        self._place_task()

    def _place_task(self) -> None:
        """Move the task's metrics and other parts to the device, and place the model."""
        task, strategy = self._trainer.task, self._trainer.strategy
        with without_model(task):
            move(task, strategy.device)
        task.model = strategy.place(task.model)

    def report_memory(self, metrics: dict[str, Any]) -> None:
        """Add the memory report of the current method, unless another one called it."""
        if self._memory is not None and self.depth == 1:
            metrics.update(self._memory.stop())

    def whereabouts(self) -> str:
        """Return what the Trainer does, such as ``"train step 12"`` or ``"save checkpoint-20"``; from any thread."""
        parts, step = self.run_parts, self._trainer.state.global_step
        if self.depth == 0:
            return "between training and evaluations"
        phase = None if parts is None else parts.phase
        return phase or _STAGES.get(self.name) or f"train step {step + 1}"
