"""One call of `Trainer.train`: set up, run the loop, act between its steps, finish."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.adapter.checkpoint import checkpoint_config
from hftrain.adapter.data import data_seed
from hftrain.adapter.plan import fit_config
from hftrain.checkpoint.layout import MANIFEST, checkpoint_name
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import Manifest, check_geometry, read_manifest
from hftrain.checkpoint.parts import (
    load_optimizer,
    load_rng,
    load_scaler,
    load_scheduler,
    load_trainer_state,
    save_optimizer,
    save_rng,
    save_scaler,
    save_scheduler,
    save_trainer_state,
)
from hftrain.checkpoint.weights import load_task_state, load_weights
from hftrain.core.errors import CheckpointError, ConfigError, explain, suggest
from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.core.seed import capture_rng, restore_rng, set_seed
from hftrain.core.types import TrainOutput
from hftrain.data.feed import TrainFeed
from hftrain.loops.fit import FitConfig, FitLoop, FitSlots
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.optim.schedules import is_metric_driven
from hftrain.step.assemble import assemble_stepper
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule
from hftrain.trainer.checks import best_metric_key
from hftrain.trainer.reports import speed_metrics

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class _Silence:
    """Events that nobody hears, for rehearsals."""

    heard: frozenset[str] = frozenset()

    def fire(self, event: str, **extra: Any) -> None:
        """Tell nobody."""


class TrainSession:
    """Hold what exists only while a run lasts.

    Args:
        trainer: Whose hooks the loop calls; its `task.model`, `model_wrapped`, optimizer and schedule are replaced.
        resume: A checkpoint to continue from.
        ignore_keys: Outputs that evaluations leave out of the predictions.
    """

    def __init__(self, trainer: Trainer, *, resume: Path | None, ignore_keys: list[str] | None) -> None:
        self.trainer = trainer
        self.resume = resume
        self.ignore_keys = ignore_keys
        self.progress = Progress()
        self.manager = make_manager(trainer)
        strategy = trainer.strategy
        self.logs = LogWindow(gather_object=strategy.gather_object)
        self.losses = LossWindow(
            filters_nonfinite=trainer.args.logging_nan_inf_filter,
            reduce=lambda loss: strategy.reduce(loss, op="mean"),
        )
        self._rng: Mapping[str, Any] | None = None
        self._saved_step: int | None = None
        self.optimizer: torch.optim.Optimizer

    def run(self) -> TrainOutput:
        """Train to the end; collective."""
        trainer, args = self.trainer, self.trainer.args
        trainer.is_in_train = True
        self.resume = _path(trainer.strategy.broadcast_object(None if self.resume is None else str(self.resume)))
        manifest = _manifest(self.resume)
        if trainer.model_init is not None:
            set_seed(args.seed)
            trainer._adopt_model(trainer.call_model_init())
            trainer.optimizer = trainer.lr_scheduler = None
        loader = trainer._sharded(trainer.get_train_dataloader(), is_training=True)
        batch_size = trainer.get_total_train_batch_size(args)
        plan = trainer.set_initial_training_values(args, loader, batch_size)
        num_epochs, max_steps = plan[0], plan[6]
        self._start_state(max_steps=max_steps, num_epochs=num_epochs, manifest=manifest)
        stepper = self._set_up(max_steps)
        if self.resume is not None:
            self._load_parts(self.resume)
        trainer.callback_handler.refresh(
            model=trainer.model,
            optimizer=trainer.optimizer,
            lr_scheduler=trainer.lr_scheduler,
            train_dataloader=loader,
        )
        self._rehearse_best_metric()
        logger.info("***** Running training: %d steps, %d samples each *****", max_steps, batch_size)
        start_s, first_step = time.perf_counter(), self.progress.step
        trainer.task.train()
        trainer.callback_handler.fire("on_train_begin")
        config = fit_config(args, max_steps=max_steps, num_batches=plan[5], world_size=trainer.strategy.world_size)
        self._loop(config, loader, stepper).run()
        has_trained = self.progress.step > first_step
        if args.save_strategy == "steps" and has_trained and self._saved_step != self.progress.step:
            # Stopped by the evaluation of the last epoch's end, after which no event follows.
            self._save()
        return self._finish(start_s=start_s, num_samples=plan[3], num_steps=self.progress.step - first_step)

    def close(self) -> None:
        """Put the unwrapped model back and mark the run as over; safe after an error."""
        trainer = self.trainer
        trainer.task.model = trainer.model
        trainer._backward, trainer._autocast = trainer.precision.backward, trainer.precision.autocast
        trainer.is_in_train = False

    # -- set-up --------------------------------------------------------------------------------------------------

    def _start_state(self, *, max_steps: int, num_epochs: int, manifest: Manifest | None) -> None:
        """Reset the documented state in place (callbacks hold it), or load it from the checkpoint."""
        trainer = self.trainer
        fresh = trainer._new_state() if self.resume is None else load_trainer_state(self.resume)
        flags = trainer._new_state()
        fresh.is_local_process_zero, fresh.is_world_process_zero = (
            flags.is_local_process_zero,
            flags.is_world_process_zero,
        )
        vars(trainer.state).update(vars(fresh))
        state = trainer.state
        state.max_steps, state.num_train_epochs = max_steps, num_epochs
        state.train_batch_size = trainer.args.train_batch_size
        state.compute_steps(trainer.args, max_steps)
        for flag in vars(trainer.control):
            setattr(trainer.control, flag, False)
        if self.resume is None:
            return
        if manifest is None:
            raise CheckpointError(
                explain(
                    f"Resuming from {str(self.resume)!r} was asked for.",
                    "It was not written by hftrain (it has no manifest), and this version resumes only its own.",
                    "Load its weights into the model and start a new run.",
                )
            )
        check_geometry(manifest, **self._geometry())
        self.progress.load_state_dict(manifest.facts["progress"])

    def _geometry(self) -> dict[str, int]:
        args = self.trainer.args
        return {
            "world_size": self.trainer.strategy.world_size,
            "batch_size": args.train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
        }

    def _set_up(self, max_steps: int) -> Any:
        """Place and wrap the model, make optimizer and schedule, assemble the step."""
        trainer, strategy, precision = self.trainer, self.trainer.strategy, self.trainer.precision
        if self.resume is not None:
            load_weights(trainer.model, self.resume)
            self._load_task_state(self.resume)
        place_task(trainer.task, strategy, is_model_placed=True)
        self._enable_checkpointing(trainer.model)
        trainer.model = precision.convert(trainer.model)
        if trainer._schedule_is_own:
            # That of an earlier train() has run out; the optimizer goes on.
            trainer.lr_scheduler = None

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
            assert trainer.optimizer is not None
            return trainer.optimizer

        wrapped, optimizer = strategy.setup(trainer.model, make_optimizer, precision.policy)
        assert optimizer is not None
        trainer.optimizer = self.optimizer = optimizer
        trainer.task.model = trainer.model_wrapped = wrapped
        trainer._decide_weighing()
        stepper = assemble_stepper(
            strategy=strategy,
            precision=precision,
            optimizer=optimizer,
            max_grad_norm=trainer.args.max_grad_norm,
        )
        trainer._backward, trainer._autocast = stepper.backward, stepper.autocast
        return stepper

    def _enable_checkpointing(self, model: nn.Module) -> None:
        args = self.trainer.args
        if not args.gradient_checkpointing:
            return
        # transformers 5 renamed the method, and warns about the older name.
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        enable = getattr(model, f"{kind}_checkpointing_enable", None)
        if enable is None:
            raise ConfigError(
                explain(
                    "gradient_checkpointing=True was asked for.",
                    f"{type(model).__name__} has no gradient_checkpointing_enable method.",
                    "Add one, or use torch.utils.checkpoint inside the model.",
                )
            )
        options = args.gradient_checkpointing_kwargs
        enable(**{f"{kind}_checkpointing_kwargs": options}) if options else enable()

    def _loop(self, config: FitConfig, loader: Any, stepper: Any) -> FitLoop:
        trainer, strategy = self.trainer, self.trainer.strategy
        schedule = trainer.lr_scheduler
        if schedule is not None and is_metric_driven(str(trainer.args.lr_scheduler_type)):
            schedule = None
        slots = FitSlots(
            get_batch_samples=trainer._take_window,
            training_step=trainer._training_step,
            restore_rng=self._restore_rng,
            log=self._log,
            evaluate=self._evaluate,
            save=self._save,
            empty_cache=_empty_cache,
        )
        return FitLoop(
            config,
            slots=slots,
            feed=TrainFeed(loader, seed=data_seed(trainer.args)),
            stepper=stepper,
            model=trainer.model_wrapped,
            optimizer=self.optimizer,
            schedule=schedule,
            no_sync=strategy.no_sync,
            device=strategy.device,
            progress=self.progress,
            state=trainer.state,
            control=trainer.control,
            events=trainer.callback_handler,
            losses=self.losses,
        )

    # -- what the loop calls between steps -----------------------------------------------------------------------

    def _restore_rng(self) -> None:
        """Put the checkpoint's random numbers back, once the first epoch's data is open."""
        if self._rng is not None:
            restore_rng(dict(self._rng))
            self._rng = None

    def _log(self, logs: dict[str, Any]) -> None:
        logs.update(self.logs.read())
        for name, metric in self.trainer.task.metrics("train").items():
            value = metric.compute()
            metric.reset()
            logs.update({k: float(v) for k, v in (value if isinstance(value, Mapping) else {name: value}).items()})
        self.trainer._log(logs)

    def _evaluate(self) -> None:
        trainer = self.trainer
        metrics = trainer.evaluate(ignore_keys=self.ignore_keys)
        if trainer.args.metric_for_best_model is not None and trainer.state.global_step > 0:
            self._note_best(metrics, trainer.args.metric_for_best_model)
        if is_metric_driven(str(trainer.args.lr_scheduler_type)) and trainer.state.global_step > 0:
            trainer.lr_scheduler.step(self._metric(metrics, trainer.args.metric_for_best_model or "loss"))

    def _note_best(self, metrics: Mapping[str, Any], wanted: str) -> None:
        """Remember the best evaluation so far; with save_strategy="best" it asks for a save."""
        state, args = self.trainer.state, self.trainer.args
        value = self._metric(metrics, wanted)
        best = state.best_metric
        is_better = best is None or (value > best if args.greater_is_better else value < best)
        if is_better:
            state.best_metric, state.best_global_step = value, state.global_step
        if args.save_strategy == "best" and is_better:
            self.trainer.control.should_save = True

    @staticmethod
    def _metric(metrics: Mapping[str, Any], wanted: str) -> float:
        key = best_metric_key(wanted)
        if key not in metrics:
            raise ConfigError(
                explain(
                    f"metric_for_best_model={wanted!r} was asked for.",
                    f"An evaluation reported no {key!r}.",
                    f"Available: {', '.join(sorted(metrics))}. {suggest(key, metrics)}",
                    metric_for_best_model=wanted,
                )
            )
        return float(metrics[key])

    def _rehearse_best_metric(self) -> None:
        """Evaluate one batch to see that the metric that picks the best model exists, before hours are spent."""
        trainer = self.trainer
        wanted = trainer.args.metric_for_best_model
        if wanted is None or trainer.args.eval_strategy == "no" or best_metric_key(wanted) == "eval_loss":
            return
        datasets = trainer.eval_dataset
        names = list(datasets) if isinstance(datasets, Mapping) else [None]
        found: dict[str, Any] = {}
        with trainer._evaluating("eval"):
            for name in names:
                loader = trainer._sharded(trainer.get_eval_dataloader(name), is_training=False)
                loop = trainer._evaluate_loop(
                    loss_only=trainer.compute_metrics is None, ignore_keys=self.ignore_keys, events=_Silence()
                )
                try:
                    metrics = loop.run(islice(iter(loader), 1)).metrics
                except Exception as error:
                    # One batch may lack what a metric needs (a second class, say): the full evaluation decides.
                    logger.warning("The rehearsal of metric_for_best_model on one batch failed: %r", error)
                    return
                prefix = "eval" if name is None else f"eval_{name}"
                found.update({key if key.startswith(prefix) else f"{prefix}_{key}": v for key, v in metrics.items()})
        self._metric(found, wanted)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.trainer._save_checkpoint(self.trainer.model_wrapped, None)

    def save_checkpoint(self) -> None:
        """Commit a checkpoint of everything a resume needs, then rotate; collective."""
        trainer, args, state, strategy = self.trainer, self.trainer.args, self.trainer.state, self.trainer.strategy
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self.manager.config.output_dir / checkpoint_name(state.global_step))
        state.stateful_callbacks = trainer.callback_handler.stateful_states()
        each = [lambda folder: trainer.save_model(str(folder), _internal_call=True)]
        main = [lambda folder: save_trainer_state(state, folder)]
        if not args.save_only_model:
            optimizer = strategy.optimizer_state(trainer.model_wrapped, self.optimizer)
            main.append(lambda folder: save_optimizer(optimizer, folder))
            if trainer.lr_scheduler is not None:
                main.append(lambda folder: save_scheduler(trainer.lr_scheduler.state_dict(), folder))
            if trainer.precision.state_dict():
                main.append(lambda folder: save_scaler(trainer.precision.state_dict(), folder))
            # Each rank's random numbers, and its part of the open logging window.
            rng = {**capture_rng(), "loss_window": self.losses.state_dict()}
            each.append(lambda folder: save_rng(rng, folder, rank=strategy.rank, world_size=strategy.world_size))
        facts = {
            "progress": self.progress.state_dict(),
            "geometry": self._geometry(),
        }
        self.manager.save(state.global_step, main=main, each=each, facts=facts)
        self.manager.rotate(best=_path(state.best_model_checkpoint))
        self._saved_step = state.global_step
        trainer.callback_handler.fire("on_save")

    def _load_task_state(self, folder: Path) -> None:
        own = task_state(self.trainer.task)
        self.trainer.task.load_state_dict(load_task_state(folder, own.keys()), strict=False)

    def _load_parts(self, folder: Path) -> None:
        """Load what the optimizer and its company had reached."""
        trainer, strategy = self.trainer, self.trainer.strategy
        strategy.load_optimizer_state(trainer.model_wrapped, self.optimizer, load_optimizer(folder))
        if trainer.lr_scheduler is not None:
            trainer.lr_scheduler.load_state_dict(load_scheduler(folder))
        if trainer.precision.state_dict():
            trainer.precision.load_state_dict(load_scaler(folder))
        rng = load_rng(folder, rank=strategy.rank, world_size=strategy.world_size)
        self.losses.load_state_dict(rng.pop("loss_window", {}), device=strategy.device)
        if trainer.args.ignore_data_skip:
            # Documented: start the epoch's data over, with random numbers as they come.
            self.progress.micro_steps_in_epoch = 0
        else:
            self._rng = rng
        trainer.callback_handler.restore(
            trainer.state.stateful_callbacks, is_full=trainer.args.restore_callback_states_from_checkpoint
        )

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self, *, start_s: float, num_samples: int, num_steps: int) -> TrainOutput:
        trainer = self.trainer
        self.losses.read()
        training_loss = self.losses.mean_over_run()
        trainer.task.model = trainer.model
        if trainer.args.load_best_model_at_end:
            self._load_best()
        share = num_steps / max(trainer.state.max_steps, 1)
        metrics = speed_metrics("train", start_s, num_samples=round(num_samples * share), num_steps=num_steps)
        metrics["train_loss"] = training_loss
        trainer.is_in_train = False
        trainer._log(metrics)
        best = _path(trainer.state.best_model_checkpoint)
        if trainer.args.save_total_limit == 1 and trainer.args.load_best_model_at_end and best is not None:
            self.manager.keep_only(best)
        trainer.callback_handler.fire("on_train_end")
        return TrainOutput(trainer.state.global_step, training_loss, metrics)

    def _load_best(self) -> None:
        """Load the best checkpoint's weights; saying so if there is none."""
        best = _path(self.trainer.state.best_model_checkpoint)
        if best is None or not best.is_dir():
            logger.warning("load_best_model_at_end=True found no saved best model (%s); the last one stays.", best)
            return
        self.manager.open(best)
        load_weights(self.trainer.model, best)
        self._load_task_state(best)
        logger.info("Loaded the best model from %s (%s).", best, self.trainer.state.best_metric)


def make_manager(trainer: Trainer) -> CheckpointManager:
    """Return what saves and finds the run's checkpoints."""
    return CheckpointManager(checkpoint_config(trainer.args), group=trainer.strategy)


def find_resume(trainer: Trainer, resume: str | bool | None) -> Path | None:
    """Return the checkpoint to continue from, verified by the main process; nothing is launched.

    Raises:
        CheckpointError: There is no valid one, or the folder named is none.
    """
    if resume is None or resume is False or not trainer.strategy.is_main:
        return None
    manager = make_manager(trainer)
    if resume is True:
        latest = manager.latest()
        if latest is None:
            raise CheckpointError(
                explain(
                    "resume_from_checkpoint=True was asked for.",
                    f"There is no valid checkpoint in {trainer.args.output_dir!r}.",
                    "Leave resume_from_checkpoint out to start a new run, or name a checkpoint's folder.",
                )
            )
        return latest
    manager.open(Path(resume))
    return Path(resume)


def place_task(task: TaskModule, strategy: Strategy, *, is_model_placed: bool = False) -> None:
    """Move a task's metrics and what else it holds to the device, and the model unless the strategy does."""
    for name, child in task.named_children():
        if name != "model":
            child.to(strategy.device)
        elif not is_model_placed:
            strategy.place(child)


def task_state(task: TaskModule) -> dict[str, torch.Tensor]:
    """Return what the task itself holds beside its model."""
    return {name: value for name, value in task.state_dict().items() if name.partition(".")[0] != "model"}


def _manifest(folder: Path | None) -> Manifest | None:
    return read_manifest(folder) if folder is not None and (folder / MANIFEST).exists() else None


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
