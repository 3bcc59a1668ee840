"""Trainer methods that collect the parts of a run and prepare the model for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.adapter.plan import TrainPlan
from hftrain.checkpoint.fitting import restoring
from hftrain.core.errors import ConfigError
from hftrain.core.progress import Progress
from hftrain.core.seed import set_seed
from hftrain.loops.window import LogWindow
from hftrain.rules.evaluation import check_cadences
from hftrain.rules.optimizer import check_optimizer
from hftrain.run.capture import saved_tool
from hftrain.run.counting import Take
from hftrain.run.journal import Journal
from hftrain.run.model_changes import ModelChanges
from hftrain.run.outside_weights import OutsideWeights
from hftrain.run.parts import Ready, RunHooks, RunParts
from hftrain.run.plan import RunPlan, find_geometry, plan_run
from hftrain.run.setup import loss_window, place_task, reset, start_state
from hftrain.step.assemble import assemble_stepper
from hftrain.task.modes import TrainingMode
from hftrain.trainer.micro_batches import MicroBatches, found_size
from hftrain.trainer.run_methods import RunMethods


class SetUpMethods(RunMethods):
    """Collect the parts of a run and prepare its model."""

    def _make_run_parts(self, ignore_keys: list[str] | None) -> RunParts:
        """Return the parts that exist before a run is built."""
        self._loss_window = loss_window(
            self.args,
            self.strategy,
            gather=self._nested_gather if self._is_overridden("_nested_gather") else None,
            is_live=self._is_overridden("_maybe_log_save_evaluate"),
        )
        self._journal = Journal()
        return RunParts(
            args=self.args,
            save_policy=self.save_policy,
            strategy=self.strategy,
            precision=self.precision,
            computing=self._computing,
            loops=self.loops,
            output=self._output,
            state=self.state,
            control=self.control,
            events=self.callback_handler,
            losses=self._loss_window,
            logs=LogWindow(gather_object=self.strategy.gather_object),
            trial=self._trial,
            ignore_keys=ignore_keys,
            journal=self._journal,
        )

    def _make_run_hooks(self) -> RunHooks:
        """Return hooks that look up the documented methods at each call, since scripts may assign them during a run."""

        def late(name: str) -> Callable[..., Any]:
            return lambda *args, **options: getattr(self, name)(*args, **options)

        return RunHooks(
            owner=type(self).__name__,
            is_overridden=self._is_overridden,
            where=self._whereabouts,
            make_manager=self._make_manager,
            make_model=self._make_model,
            open_loader=self._open_training_data,
            plan=self._plan_run,
            start_state=self._start_state,
            ready=self._ready,
            holders=lambda: [
                ("trainer", self),
                ("task", self.task),
                *((type(each).__name__, each) for each in self.callback_handler.callbacks),
            ],
            dataset=lambda: self.train_dataset,
            processing_class=lambda: self.processing_class,
            tool=lambda: saved_tool(self.processing_class, self.data_collator),
            optimizer=lambda: self.optimizer,
            schedule=lambda: self.lr_scheduler,
            count_parameters=late("get_num_trainable_parameters"),
            mark_sync=self._note_sync,
            count_flos=self.floating_point_ops,
            add_flos=self._add_flos,
            store_flos=late("store_flos"),
            read_metrics=self._read_metrics,
            learning_rate=self._ask_learning_rate,
            log=self._slot_log,
            evaluate=late("evaluate"),
            evaluate_once=late("_evaluate"),
            is_best=late("_determine_best_metric"),
            step_end=lambda: self._maybe_log_save_evaluate,
            save=late("_save_checkpoint"),
            save_model=lambda folder: self.save_model(folder, _internal_call=True),
            save_optimizer=late("_save_optimizer_and_scheduler"),
            load_model=late("_load_from_checkpoint"),
            load_optimizer=late("_load_optimizer_and_scheduler"),
            load_numbers=late("_load_rng_state"),
            load_best=late("_load_best_model"),
            rotate=late("_rotate_checkpoints"),
            push=late("_push_from_checkpoint"),
            push_at_end=self._hub.after_training,
            finish=self._finish_training,
        )

    def _make_model(self) -> nn.Module:
        """Return the bare model, rebuilt if there is a `model_init`."""
        if self.model_init is not None:
            set_seed(self.args.seed)
            with self.strategy.building():
                self._adopt_model(self.call_model_init(self._trial))
            self.optimizer = self.lr_scheduler = None
        return self.model

    def _open_training_data(self, *dataset: Any) -> Any:
        """Return this rank's training batches, or those of another dataset if one is given."""
        before = self.train_dataset
        try:
            if dataset:
                (self.train_dataset,) = dataset
            return self._sharded(self.get_train_dataloader(), is_training=True)
        finally:
            if dataset:
                self.train_dataset = before

    def _plan_run(self, folder: Path | None, loader: Any, progress: Progress) -> RunPlan:
        """Plan a run that starts from a checkpoint or from the beginning; see `plan_run`."""
        args, strategy, total = self.args, self.strategy, self.get_total_train_batch_size(self.args)
        length = TrainPlan(*self.set_initial_training_values(args, loader, total))
        grouping, policy, split = self._length_config(is_training=True), self.precision.policy, self.get_tp_size()
        geometry = find_geometry(args, strategy, policy, loader, self.train_dataset, grouping=grouping, split=split)
        return plan_run(
            args, strategy, folder, loader, length, total_batch_size=total, progress=progress, geometry=geometry
        )

    def _start_state(self, resume: Path | None, plan: RunPlan) -> None:
        """Set the documented state for the start of a run, from a checkpoint if there is one."""
        start_state(self.state, self.args, self._new_state(), resume, plan)
        if self._trial_run is not None:
            self._trial_run.describe(self.state)
        check_cadences(self.args, self._eval_sets, eval_steps=self.state.eval_steps)
        reset(self.control)
        self.current_flos = 0

    def _finish_training(self, metrics: dict[str, Any]) -> None:
        self.is_in_train = False
        self._report_memory(metrics)

    @contextmanager
    def _ready(self, resume: Path | None, plan: RunPlan) -> Iterator[Ready]:
        """Prepare the model for training, and restore the bare one at the end. Collective."""
        changes = ModelChanges(self.args, self.strategy)
        try:
            yield self._set_up(resume, plan.max_steps, changes)
        finally:
            changes.undo()
            self.task.model = self.model
            self._computing.use(self.precision, None)
            if self._training_mode is not None:
                self._training_mode.close()
                self._training_mode = None
            self._note_sync(True)

    def _set_up(self, resume: Path | None, max_steps: int, changes: ModelChanges) -> Ready:
        """Place and wrap the model, create optimizer and schedule, and assemble the step."""
        strategy, precision, task = self.strategy, self.precision, self.task
        # Before the weights are loaded: loading rounds them to the dtype of the parameters.
        model = self.model = task.model = precision.convert(self.model)
        if resume is not None:
            with restoring(resume):
                self._load_from_checkpoint(str(resume))
        place_task(task, strategy, is_model_placed=True)
        self._align_special_tokens()
        noise = None if self.neftune_noise_alpha is None else (self._activate_neftune, self._deactivate_neftune)
        changes.apply(model, noise_hooks=noise)
        self._forget_schedule()
        strategy.plan(num_steps=max_steps, num_warmup_steps=self.args.get_warmup_steps(max_steps))
        outside = OutsideWeights(strategy)
        wrapped, optimizer, unheld = self._wrap_to_train(max_steps, outside)
        self.compiler.compile(model)
        self._cast_model()
        self._adopt_schedule(max_steps, optimizer)
        self._check_in_backward(optimizer)
        # An interrupted run or the user may have left gradients.
        model.zero_grad()
        self.optimizer = optimizer
        task.model = self.model_wrapped = wrapped
        self._shares, self._training_mode = self._make_shares(), TrainingMode(task, optimizer)
        stepper = assemble_stepper(
            strategy=strategy,
            precision=precision,
            optimizer=optimizer,
            args=self.args,
            unclipped=outside.parameters,
            unheld=unheld,
            average_unclipped=outside.average if outside.is_averaged else None,
            computing=self._computing,
        )
        self._computing.use(stepper, optimizer)
        take, step = self._steps(resume)
        return Ready(
            task=task,
            model=model,
            wrapped=wrapped,
            optimizer=optimizer,
            stepper=stepper,
            take=take,
            training_step=step,
            outside=outside,
            changes=changes,
            facts=(self._shares.found.fact,),
        )

    def _adopt_schedule(self, max_steps: int, optimizer: torch.optim.Optimizer) -> None:
        """Use the schedule that an engine made, or create one for the optimizer that it made."""
        if "scheduler" in self.strategy.makes:
            self.lr_scheduler = self.strategy.schedule
        elif "optimizer" in self.strategy.makes:
            self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)

    def _steps(self, resume: Path | None) -> tuple[Take, Callable[[nn.Module, Any, Any], torch.Tensor]]:
        """Return the functions that take a step's batches and train on one; both split batches if set to."""
        if self.args.auto_find_batch_size is not True or self._run_parts is None:
            return self._shares.take, self._slot_training_step
        fitting = MicroBatches(
            training_step=self._slot_training_step,
            shares=self._shares,
            owner=type(self).__name__,
            strategy=self.strategy,
            task=self.task,
            model=self.model,
            state=self.state,
            logs=self._run_parts.logs,
            size=found_size(self.args, resume),
        )
        return fitting.take, fitting.step

    def _wrap_to_train(
        self, max_steps: int, outside: OutsideWeights
    ) -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
        """Wrap the model and create the optimizer in `_wrap_model`, or after it if an override did not.

        Returns:
            The wrapped model, the optimizer, and the task's parameters that the optimizer does not hold.
        """
        strategy, precision, task = self.strategy, self.precision, self.task
        made: list[torch.optim.Optimizer] = []
        unheld: list[torch.Tensor] = []

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            if "scheduler" in strategy.makes:
                self.create_optimizer()
            else:
                self.create_optimizer_and_scheduler(num_training_steps=max_steps)
            assert self.optimizer is not None
            # Checked here because a strategy may later put its own parameters into the groups.
            check_optimizer(self.optimizer, self.lr_scheduler, self.model)
            outside.find(self.optimizer, task)
            for parameter in outside.parameters:
                parameter.grad = None  # an interrupted run may have left it
            held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            unheld[:] = [p for p in task.parameters() if id(p) not in held]
            return precision.attach(self.model, self.optimizer)

        def wrap(model: nn.Module) -> nn.Module:
            wrapped, optimizer = strategy.setup(model, make_optimizer, precision.policy)
            assert optimizer is not None
            made[:] = [optimizer]
            return wrapped

        # The user's own wrapper, if it still holds the model.
        outermost = self._outermost if strategy.unwrap(self._outermost) is self.model else self.model
        self._strategy_wrap = wrap
        try:
            wrapped = self._wrap_model(outermost)
        finally:
            self._strategy_wrap = None
        if not made:
            wrapped = wrap(wrapped)
        if strategy.unwrap(wrapped) is not self.model:
            raise ConfigError(
                f"{type(self).__name__}._wrap_model returned a {type(wrapped).__name__}.",
                f"strategy={strategy.name!r} cannot look through it to the model.",
                "Wrap the model before it is given to the Trainer, or return what super()._wrap_model returned.",
            )
        if not hasattr(made[0], "optimizer"):
            # accelerate wraps optimizers, and code for transformers looks into the wrapper.
            made[0].optimizer = made[0]  # type: ignore[attr-defined]
        return wrapped, made[0], unheld

    def _ask_learning_rate(self, used: float) -> float:
        """Return the result of `_get_learning_rate`, whose base method returns `used`, the rate of the last step."""
        self._used_rate = used
        try:
            return self._get_learning_rate()
        finally:
            self._used_rate = None
