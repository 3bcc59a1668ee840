"""What of a run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hftrain.adapter.checkpoint import checkpoint_config
from hftrain.adapter.data import data_seed, read_accelerator_config
from hftrain.checkpoint.fitting import check_optimizer, check_state, group_settings, naming_the_folder, restoring
from hftrain.checkpoint.layout import (
    ARGUMENTS,
    OPTIMIZER,
    SCALER,
    SCHEDULER,
    checkpoint_name,
    list_checkpoints,
)
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import check_geometry, read_manifest
from hftrain.checkpoint.parts import (
    load_arguments,
    load_optimizer,
    load_scaler,
    load_scheduler,
    save_optimizer,
    save_rng,
    save_scaler,
    save_scheduler,
    save_trainer_state,
)
from hftrain.checkpoint.ranks import fit_geometry
from hftrain.checkpoint.weights import load_task_state, load_weights
from hftrain.core.errors import CheckpointError, ConfigError, explain
from hftrain.core.log import get_logger
from hftrain.core.progress import Progress
from hftrain.core.seed import capture_rng, preserved_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.data.sizes import has_length
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.optim.schedules import refresh_rate
from hftrain.task.metric_state import metric_states, restore_metric_states
from hftrain.task.module import TaskModule
from hftrain.trainer.sharding import load_own, shard_writers

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

Writer = Callable[[Path], None]

# What the optimizer's and the schedule's state carry on, whatever the arguments say now.
_OVERRIDDEN = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# When things happen follows the present arguments, and so is no longer what it was before the resume.
_INTERVALS = ("logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps")


class RunCheckpoints:
    """Save and restore one run of a Trainer.

    Args:
        trainer: Whose model, schedule, precision, state and callbacks are saved and restored.
        progress: Where the run is.
        losses: The open logging window, likewise part of a checkpoint so that a resumed log equals the undisturbed.
        logs: The steps' own numbers in that window.
    """

    def __init__(self, trainer: Trainer, *, progress: Progress, losses: LossWindow, logs: LogWindow) -> None:
        self.trainer = trainer
        self.progress = progress
        self.losses = losses
        self.logs = logs
        self.manager = make_manager(trainer)
        self.saved_step: int | None = None
        self.epoch_rng: dict[str, Any] = {}

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Commit a checkpoint of everything a resume needs, then rotate; collective."""
        trainer, state = self.trainer, self.trainer.state
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(self.manager.config.output_dir / checkpoint_name(state.global_step))
        state.stateful_callbacks = trainer.callback_handler.stateful_states()
        each: list[Writer] = [lambda folder: trainer.save_model(str(folder), _internal_call=True)]
        main: list[Writer] = [lambda folder: save_trainer_state(state, folder)]
        if not trainer.args.save_only_model:
            if trainer._is_overridden("_save_optimizer_and_scheduler"):
                each.append(lambda folder: trainer._save_optimizer_and_scheduler(str(folder)))
            else:
                main += self._resume_writers(optimizer)
            each.append(self._rank_writer())
        each += shard_writers(trainer, optimizer)
        facts = {"progress": self.progress.state_dict(), "geometry": self._geometry(optimizer)}
        committed = self.manager.save(state.global_step, main=main, each=each, facts=facts)
        if trainer.args.push_to_hub:
            # Before rotation, which may delete it.
            trainer._hub.after_save(committed)
        trainer._rotate_checkpoints(use_mtime=True, output_dir=str(self.manager.config.output_dir))
        self.saved_step = state.global_step
        trainer.callback_handler.fire("on_save")

    def rotate(self) -> None:
        """Delete the oldest checkpoints beyond the limit."""
        self.manager.rotate(best=best_checkpoint(self.trainer))

    def write_optimizer(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Write optimizer, schedule and scaler; the main process writes, all take part. Collective."""
        writers = self._resume_writers(optimizer)
        for write in writers if self.manager.is_committer else ():
            write(folder)

    def _resume_writers(self, optimizer: torch.optim.Optimizer) -> list[Writer]:
        trainer = self.trainer
        split = trainer.strategy.optimizer_shards(trainer.model_wrapped, optimizer)
        state = split[0] if split else trainer.strategy.optimizer_state(trainer.model_wrapped, optimizer)
        writers: list[Writer] = [lambda folder: save_optimizer(state, folder)]
        if trainer.lr_scheduler is not None:
            writers.append(lambda folder: save_scheduler(trainer.lr_scheduler.state_dict(), folder))
        if trainer.precision.state_dict():
            writers.append(lambda folder: save_scaler(trainer.precision.state_dict(), folder))
        return writers

    def _rank_writer(self) -> Writer:
        """Write what differs by rank: random numbers, and this rank's part of the logging window."""
        strategy = self.trainer.strategy
        own = {
            **capture_rng(),
            "epoch_rng": self.epoch_rng,
            "loss_window": self.losses.state_dict(),
            "log_window": self.logs.state_dict(),
            "train_metrics": metric_states(self.trainer.task.metrics("train")),
            "past": self.trainer._past,
        }
        own = map_tensors(own, torch.Tensor.cpu)
        return lambda folder: save_rng(own, folder, rank=strategy.rank, world_size=strategy.world_size)

    def warn_of_others(self) -> None:
        """Say so if the folder of a run that starts anew holds checkpoints already."""
        found = list_checkpoints(self.manager.config.output_dir)
        if found and self.manager.is_committer and not self.trainer.args.overwrite_output_dir:
            logger.warning(
                "%s holds checkpoints of another run (%s). They stay, except that those of the same step are replaced. "
                "Use another output_dir, or overwrite_output_dir=True to say that this is meant.",
                self.manager.config.output_dir,
                ", ".join(path.name for path in found),
            )

    @naming_the_folder
    def check(self, folder: Path) -> None:
        """Take over a checkpoint's position; raises `CheckpointError` if this run has another shape."""
        manifest = read_manifest(folder)
        geometry = self._geometry(None)
        if self.trainer.args.ignore_data_skip:
            geometry = {name: geometry[name] for name in ("world_size", "batch_size", "accumulation", "precision")}
        if not read_accelerator_config(self.trainer.args).get("split_batches"):
            geometry = fit_geometry(manifest.facts.get("geometry", {}), geometry)
        check_geometry(manifest, **geometry)
        self._report_changed_arguments(folder)
        self.manager.run_id = manifest.facts["run_id"]
        self.progress.load_state_dict(manifest.facts["progress"])

    @naming_the_folder
    def load_model(self, folder: Path) -> None:
        """Load the weights, and what the task holds beside its model, in place."""
        self.trainer._load_from_checkpoint(str(folder))

    @naming_the_folder
    def load_rest(self, folder: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load what the optimizer and its company had reached, and return the random numbers' state."""
        trainer, strategy = self.trainer, self.trainer.strategy
        check_geometry(read_manifest(folder), optimizer=type(optimizer).__name__)
        trainer._load_optimizer_and_scheduler(str(folder))
        own = load_own(trainer, folder)
        self.epoch_rng = own.pop("epoch_rng")
        self.losses.load_state_dict(own.pop("loss_window", {}), device=strategy.device)
        self.logs.load_state_dict(own.pop("log_window", {}), device=strategy.device)
        unknown = restore_metric_states(
            trainer.task.metrics("train"), own.pop("train_metrics", {}), device=strategy.device
        )
        if unknown and self.losses.num_steps and not trainer.args.ignore_data_skip:
            logger.warning(
                "The checkpoint does not tell what these metrics had gathered since the last log: %s.",
                ", ".join(unknown),
            )
        past = own.pop("past", None)
        if self.progress.micro_steps_in_epoch and trainer.args.past_index >= 0:
            trainer._past = strategy.to_device(past)
        trainer.callback_handler.restore(
            trainer.state.stateful_callbacks, is_full=trainer.args.restore_callback_states_from_checkpoint
        )
        with preserved_rng():  # here, for the loop that restores them is no place to find out that they are none
            restore_rng(self.epoch_rng)
            restore_rng(own)
        return own

    def read_optimizer(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Load optimizer, schedule and scaler. Collective."""
        trainer, strategy = self.trainer, self.trainer.strategy
        before = group_settings(optimizer)
        with restoring(folder / OPTIMIZER):
            strategy.load_optimizer_state(trainer.model_wrapped, optimizer, load_optimizer(folder))
        check_optimizer(folder / OPTIMIZER, optimizer, before=before)
        if trainer.lr_scheduler is not None:
            schedule = load_scheduler(folder)
            check_state(folder / SCHEDULER, schedule, trainer.lr_scheduler, own=trainer.lr_scheduler.state_dict())
            trainer.lr_scheduler.load_state_dict(schedule)
            refresh_rate(trainer.lr_scheduler)
        if trainer.precision.state_dict():
            scale = load_scaler(folder)
            check_state(folder / SCALER, scale, trainer.precision, own=trainer.precision.state_dict())
            with restoring(folder / SCALER):
                trainer.precision.load_state_dict(scale)

    def load_best(self) -> None:
        """Load the best checkpoint's model, saying so if there is none."""
        best = best_checkpoint(self.trainer)
        if best is None or not best.is_dir():
            logger.warning("load_best_model_at_end=True found no saved best model (%s); the last one stays.", best)
            return
        self.manager.open(best)
        self.load_model(best)
        logger.info("Loaded the best model from %s (%s).", best, self.trainer.state.best_metric)

    def _geometry(self, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return what a resume must find as it was: the shape of a step, and what decides the data's order."""
        trainer, args = self.trainer, self.trainer.args
        geometry = {
            "world_size": trainer.strategy.world_size,
            "batch_size": args.train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "samples": len(trainer.train_dataset) if has_length(trainer.train_dataset) else None,
            "data_seed": data_seed(args),
            "drop_last": args.dataloader_drop_last,
            "precision": trainer.precision.policy.name,
        }
        return geometry if optimizer is None else {**geometry, "optimizer": type(optimizer).__name__}

    def _report_changed_arguments(self, folder: Path) -> None:
        """Name the arguments whose values the checkpoint's state overrides, and those that change the rhythm."""
        if not (folder / ARGUMENTS).exists():
            return
        saved, current = load_arguments(folder), self.trainer.args.to_dict()
        for names, consequence in (
            (_OVERRIDDEN, "whose optimizer and schedule go on with theirs"),
            (_INTERVALS, "the run goes on with the present ones"),
        ):
            changed = [
                f"{name} (was {saved[name]!r}, now {current.get(name)!r})"
                for name in names
                if name in saved and saved[name] != current.get(name)
            ]
            if changed:
                logger.warning("These arguments changed since the checkpoint, %s: %s.", consequence, ", ".join(changed))


def make_manager(trainer: Trainer) -> CheckpointManager:
    """Return what saves and finds the run's checkpoints."""
    folder = Path(trainer._get_output_dir(trainer._trial))
    return CheckpointManager(checkpoint_config(trainer.args, output_dir=folder), group=trainer.strategy)


def find_resume(trainer: Trainer, resume: str | bool | None) -> Path | None:
    """Return the checkpoint to continue from, verified by the main process; nothing is launched.

    Raises:
        CheckpointError: There is no valid one, or the folder named is none.
    """
    if not isinstance(resume, (str, Path, bool, type(None))):
        raise ConfigError(
            explain(
                "train(resume_from_checkpoint=...) was called.",
                f"A {type(resume).__name__} names no checkpoint.",
                "Pass a folder, or True for the newest one in output_dir.",
                resume_from_checkpoint=resume,
            )
        )
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
    folder = find_folder(resume, trainer.output_dir)
    if manager.open(folder) is None:
        raise CheckpointError(
            explain(
                f"Resuming from {str(resume)!r} was asked for.",
                "It was not written by hftrain (it has no manifest), and this version resumes only its own.",
                "Load its weights into the model and start a new run.",
            )
        )
    return folder


def find_folder(name: str | Path, output_dir: Path) -> Path:
    """Return the folder of that name: as it stands (relative to the working directory), else in the output folder."""
    inside = output_dir / name
    return inside if inside.is_dir() and not Path(name).is_dir() else Path(name)


def best_checkpoint(trainer: Trainer) -> Path | None:
    """Return the folder of the best model so far."""
    best = trainer.state.best_model_checkpoint
    if best is None:
        return None
    # By name first: the folder of the run may have been moved or copied since.
    here = trainer.output_dir / Path(best).name
    return here if here.is_dir() else Path(best)


def load_task(trainer: Trainer, folder: Path, *, model: nn.Module | None = None) -> None:
    """Load a checkpoint's weights, and what the task holds beside its model, in place."""
    strategy = trainer.strategy
    target = trainer.model if model is None else strategy.unwrap(model)
    load = strategy.load_model_state if target is trainer.model else None
    # Where there are none yet, the process that holds the weights sends them.
    if not any(parameter.is_meta for parameter in target.parameters()):
        load_weights(target, folder, load=load)
    own = task_state(trainer.task)
    trainer.task.load_state_dict(load_task_state(folder, own.keys()), strict=False)


def task_state(task: TaskModule) -> dict[str, torch.Tensor]:
    """Return what the task itself holds beside its model."""
    return {name: value for name, value in task.state_dict().items() if name.partition(".")[0] != "model"}
