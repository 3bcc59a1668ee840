"""The length and start of a run: new, or resumed from a checkpoint with possibly another configuration."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hftrain.adapter.data import TrainPlan, data_seed, length_config, read_accelerator_config
from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.fitting import BatchGrid, check_resumable, convert_position, restoring, steps_left
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import ARGUMENTS, Manifest, is_foreign, read_manifest, refuse_uncommitted
from hftrain.checkpoint.rotation import finite_of
from hftrain.checkpoint.state_files import load_part, load_trainer_state, readers_of
from hftrain.core.errors import CheckpointError, ConfigError, a_kind
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.core.signatures import Hooks
from hftrain.core.state import Progress, TrainerState
from hftrain.core.types import Owns
from hftrain.data.datasets import has_length
from hftrain.data.feed import TrainFeed
from hftrain.data.states import has_own_shares, num_batches_from, samples_per_round
from hftrain.run.output import Output
from hftrain.run.parts import RunParts, TrainerHooks, make_manager
from hftrain.strategies.base import Strategy

logger = get_logger(__name__)

# Taken from the state of the optimizer and the schedule, regardless of the current arguments.
_RESTORED_SETTINGS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
# Taken from the current arguments, so they may differ from those before the resume.
_INTERVAL_SETTINGS = ("logging_strategy", "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps")
# What the arguments begin with that each process may have for itself.
_PER_PROCESS = (
    *("seed", "local_rank", "output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm"),
    *("hub_", "log_", "dataloader_"),
)
# Resume if there is a checkpoint.
AUTO = "auto"
# Arguments written by an override may be of any type.
_PLAIN_TYPES = (int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The plan of a run, from its start to its end.

    Args:
        length: The length of a whole run in this configuration.
        grid: How passes over the data are cut into batches.
        geometry: Values that a resume compares; see `check_resumable`.
        total_batch_size: Samples per update, all ranks together.
        max_steps: The updates after which this run ends; differs if a part of it had another configuration.
        num_stated: The length that the training data stated then (None: it has none).
        manifest: The checkpoint's manifest; None for a new run.
        is_reshaped: Whether the checkpoint had another batch size or number of processes.
    """

    length: TrainPlan
    grid: BatchGrid
    geometry: dict[str, Any]
    total_batch_size: int
    max_steps: int
    num_stated: int | None
    manifest: Manifest | None = None
    is_reshaped: bool = False

    def pass_length(self, feed: TrainFeed) -> int | None:
        """Return the micro-steps of the open pass: as planned, unless the data states another length than then."""
        return self.length.num_batches if feed.num_batches == self.num_stated else feed.num_batches

    def facts(self, progress: Progress, *, num_batches: int | None, optimizer: str) -> dict[str, Any]:
        """Return the facts about position and configuration for a manifest; `num_batches` are the latest pass's."""
        plan = {"max_steps": self.max_steps, "asked": self.length.max_steps, "num_batches": num_batches}
        geometry = {**self.geometry, "optimizer": optimizer}
        return {"progress": progress.state_dict(), "geometry": geometry, "plan": plan}


def plan_run(parts: RunParts, folder: Path | None, feed: TrainFeed) -> RunPlan:
    """Plan a run, new or from a checkpoint's folder, and set the parts' progress to its start. Collective."""
    args, trainer, loader = parts.args, parts.trainer, feed.loader
    total_batch_size = trainer.get_total_train_batch_size(args)
    length = TrainPlan(*trainer.set_initial_training_values(args, loader, total_batch_size))
    check_rounds(parts, length.num_batches, num_left=length.max_steps)
    geometry = _find_geometry(parts, loader, total_batch_size=total_batch_size)
    plan = RunPlan(
        length=length,
        grid=BatchGrid.of(geometry, length.num_batches),
        geometry=geometry,
        total_batch_size=total_batch_size,
        max_steps=length.max_steps,
        num_stated=feed.num_batches,
    )
    if folder is None:
        return plan
    with restoring(folder):
        return _plan_rest(plan, args, folder, loader, parts.progress)


def check_same_settings(args: TrainingArguments, strategy: Strategy) -> None:
    """Raise if processes have different settings: they would train apart, or wait for each other. Collective."""
    settings = {name: value for name, value in args.to_dict().items() if not name.startswith(_PER_PROCESS)}
    by_rank = strategy.gather_object({name: json.dumps(settings[name], default=a_kind) for name in settings})
    for rank, other in enumerate(by_rank):
        for name in sorted(by_rank[0].keys() | other.keys()):
            if other.get(name) != by_rank[0].get(name):
                raise ConfigError(
                    f"Cannot train with {name}={by_rank[0].get(name)} on rank 0 and {other.get(name)} on rank {rank}.",
                    "The processes would train apart, or wait for each other.",
                    "Give all processes the same arguments.",
                )


def check_rounds(parts: RunParts, num_batches: int | None, *, num_left: int) -> None:
    """Raise if a rank would run out of batches and the others would wait for its gradients. Collective.

    Args:
        num_batches: Of this rank in a pass, or what is left of it (None: unknown).
        num_left: Updates until the end of the run.

    DDP exchanges gradients once per update, so updates may have unequal numbers of micro-batches. Strategies that
    split the model, or count micro-steps themselves, communicate in each micro-step.
    """
    strategy, accumulation = parts.strategy, parts.args.gradient_accumulation_steps
    syncs_each_batch = strategy.shards_model or Owns.ACCUMULATION in strategy.owns
    batches_by_rank = strategy.gather_object(num_batches)
    if None in batches_by_rank:
        return
    rounds = batches_by_rank if syncs_each_batch else [-(-batches // accumulation) for batches in batches_by_rank]
    if len(set(rounds)) > 1 and num_left > min(rounds) // (accumulation if syncs_each_batch else 1):
        counts = ", ".join(f"{batches} on rank {rank}" for rank, batches in enumerate(batches_by_rank))
        raise ConfigError(
            f"Cannot train on unequal numbers of batches: {counts}.",
            "A rank that has run out would leave the others waiting for its gradients.",
            "Give every rank the same number: even_batches=True (accelerate's default) or drop_last=True.",
        )


def _plan_rest(full_plan: RunPlan, args: TrainingArguments, folder: Path, loader: Any, progress: Progress) -> RunPlan:
    length, grid, geometry = full_plan.length, full_plan.grid, full_plan.geometry
    manifest = _read_manifest(args, folder, geometry, grid)
    saved_geometry, saved_plan = manifest.facts.get("geometry", {}), manifest.facts.get("plan", {})
    progress.load_state_dict(manifest.facts["progress"])
    is_within = bool(progress.micro_steps_in_epoch or progress.offset_in_epoch)
    if args.ignore_data_skip:
        # The epoch's data starts again, so that nothing depends on its order.
        checked_names = ("round_size", "world_size", "batch_size", "accumulation", "precision", "weights_dtype")
        changes = check_resumable(
            saved_geometry, {name: geometry[name] for name in checked_names}, is_within_epoch=False, step=manifest.step
        )
    else:
        changes = check_resumable(saved_geometry, geometry, is_within_epoch=is_within, step=manifest.step)
    position = convert_position(progress, BatchGrid.of(saved_geometry, saved_plan.get("num_batches")), grid)
    progress.load_state_dict(position.state_dict())
    offset = progress.offset_in_epoch
    num_batches_first = num_batches_from(loader, offset) if offset and not args.ignore_data_skip else length.num_batches
    planned_steps = max_steps = length.max_steps
    if length.is_by_epochs and num_batches_first is not None:
        is_as_planned = not changes and saved_plan.get("asked") == planned_steps
        num_left = steps_left(progress, grid, num_batches_first=num_batches_first, num_steps=planned_steps)
        max_steps = saved_plan["max_steps"] if is_as_planned else progress.step + num_left
    if changes:
        _warn_of_changes(progress, changes, grid=grid, num_steps=max_steps, plan=saved_plan)
    elif progress.step >= max_steps or (length.is_by_epochs and progress.epoch >= length.num_epochs):
        logger.warning(
            "%s is the end of its run: no step is left. Raise num_train_epochs or max_steps to go on.", folder
        )
    is_reshaped = any(saved_geometry.get(name) != geometry[name] for name in ("batch_size", "world_size"))
    return replace(full_plan, max_steps=max_steps, manifest=manifest, is_reshaped=is_reshaped)


def _read_manifest(args: TrainingArguments, folder: Path, geometry: Mapping[str, Any], grid: BatchGrid) -> Manifest:
    if not is_foreign(folder):
        return read_manifest(folder)
    manifest: Manifest = extra("foreign_checkpoints").read_foreign(folder, geometry, grid)
    logger.warning(
        "%s was saved by transformers' Trainer or by an override of _save_checkpoint. What it does not tell, or only "
        "in a pickle, which is never read, is taken from this run: gradient_accumulation_steps=%s, the data "
        "(%s samples) and its seed (%s), dataloader_drop_last=%s, precision %s, the schedule (%s) and the optimizer's "
        "class. Losses that were not logged yet are lost.",
        *(folder, args.gradient_accumulation_steps, geometry["samples"], geometry["data_seed"]),
        *(args.dataloader_drop_last, geometry["precision"], args.lr_scheduler_type),
    )
    return manifest


def _warn_of_changes(
    progress: Progress, changes: list[str], *, grid: BatchGrid, num_steps: int, plan: Mapping[str, Any]
) -> None:
    samples = progress.offset_in_epoch + progress.micro_steps_in_epoch * (grid.round_size or 0)
    logger.warning(
        "The run continues in another configuration (%s). Its position is kept: epoch %d, sample %s of %s%s. "
        "Planned again: %d steps left, %d in all (before: %s); the schedule is that of %d steps, now at step %d.",
        ", ".join(changes),
        progress.epoch,
        samples if grid.num_samples is None else min(samples, grid.num_samples),
        "an unknown number" if grid.num_samples is None else grid.num_samples,
        ", from which on this epoch's batches are cut" if progress.offset_in_epoch else "",
        max(0, num_steps - progress.step),
        num_steps,
        plan.get("max_steps", "unknown"),
        num_steps,
        progress.step,
    )


def _find_geometry(parts: RunParts, loader: Any, *, total_batch_size: int) -> dict[str, Any]:
    """Return the values that decide the order and the batches of the data, and the meaning of the optimizer's state."""
    args, strategy, policy, trainer = parts.args, parts.strategy, parts.precision.policy, parts.trainer
    dataset = trainer.train_dataset
    grouping = length_config(args, tool=trainer.processing_class, batch_size=total_batch_size, is_training=True)
    world_size = strategy.data.world_size
    return {
        "world_size": world_size,
        "readers": readers_of(strategy),
        "batch_size": args.train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "round_size": samples_per_round(loader, world_size=world_size),
        "samples": len(dataset) if has_length(dataset) else None,
        "data_seed": data_seed(args),
        "drop_last": args.dataloader_drop_last,
        # 0: in the order of the dataset.
        "grouping": grouping.batch_size if grouping else 0 if args.train_sampling_strategy == "sequential" else None,
        "seedable": bool(read_accelerator_config(args).get("use_seedable_sampler", True)),
        "own_shares": has_own_shares(loader, world_size=world_size),
        "limits": trainer.limits.of_training,
        "precision": policy.name,
        # None: an engine keeps its own copies, which depend on the precision.
        "weights_dtype": None if Owns.CASTING in strategy.owns else str(policy.param_dtype),
    }


def base_rates(optimizer: Any) -> list[float]:
    """Return the rates from which a schedule of torch derives those of the groups; empty for other schedules."""
    return [float(group["initial_lr"]) for group in optimizer.param_groups if "initial_lr" in group]


def report_changed_arguments(args: TrainingArguments, folder: Path, *, saved_rates: Any, rates: Any) -> None:
    """Warn of changed arguments, and `base_rates`, that the checkpoint's state overrides, and of changed intervals."""
    try:
        saved, current = load_part(folder, ARGUMENTS), args.to_dict()
    except CheckpointError as error:
        # An override may have written them in another form; they are only read for this warning.
        logger.info("The arguments of the checkpoint are not compared with those of this run: %s", error)
        return
    pairs = zip(saved_rates, rates, strict=True) if len(saved_rates) == len(rates) else ()
    if pair := next((pair for pair in pairs if pair[0] != pair[1]), None):
        saved["learning_rate"], current["learning_rate"] = pair  # whoever has made the optimizer
    remedy = "To train with the new ones, load the checkpoint's weights into the model and start a new run."
    for names, consequence in (
        (_RESTORED_SETTINGS, f"The resumed optimizer and schedule keep the saved values. {remedy}"),
        (_INTERVAL_SETTINGS, "The run uses the new values."),
    ):
        changed = [
            f"{name} (was {saved[name]!r}, now {current.get(name)!r})"
            for name in names
            if isinstance(saved.get(name, ...), _PLAIN_TYPES) and saved[name] != current.get(name)
        ]
        if changed:
            logger.warning("Arguments changed since the checkpoint: %s. %s", ", ".join(changed), consequence)


def find_resume(trainer: TrainerHooks, hooks: Hooks, output: Output, resume: str | bool | None) -> Path | None:
    """Return the checkpoint to continue from, verified by the main process; launches nothing.

    Args:
        resume: A folder, True for the newest valid checkpoint, ``"auto"`` for that or none (also if it is None and
            the arguments say so), None or False for none.

    Raises:
        CheckpointError: There is no valid one, or the given folder is not a checkpoint.
    """
    args, strategy = trainer.args, trainer.strategy
    if not isinstance(resume, (str, Path, bool, type(None))):
        raise ConfigError(
            f"Cannot resume from {a_kind(resume)}: train() takes a checkpoint's folder first.",
            "A dataset goes to Trainer(train_dataset=...)." if isinstance(resume, Sized) else "",
            "Pass a folder, True for the newest checkpoint in output_dir, or 'auto' for that if there is one.",
        )
    if resume is None and args.resume_from_checkpoint == AUTO:
        resume = AUTO
    elif resume is None and args.resume_from_checkpoint and strategy.is_main:
        reason = "The run starts from the beginning: resume_from_checkpoint=%r is for the script to pass on to train()."
        logger.warning(reason, args.resume_from_checkpoint)
    if resume is None or resume is False or not strategy.is_main:
        return None
    manager = make_manager(trainer, hooks, output)
    if resume is True or resume == AUTO:
        # What an override writes may have no manifest.
        writes_itself = hooks.is_overridden("_save_checkpoint")
        check_uncommitted = extra("foreign_checkpoints").check_foreign if writes_itself else refuse_uncommitted
        latest = manager.latest(check_uncommitted=check_uncommitted)
        if resume == AUTO:
            if args.save_only_model:
                logger.warning("save_only_model=True: what this run saves, another start with 'auto' cannot resume.")
            outcome = "nothing valid to resume; a new run starts" if latest is None else f"{latest.name} to resume"
            logger.info("resume_from_checkpoint='auto' found %s (in %s).", outcome, args.output_dir)
        elif latest is None:
            raise CheckpointError(
                "Cannot use resume_from_checkpoint=True.",
                f"There is no valid checkpoint with a manifest in {args.output_dir!r}.",
                "Leave resume_from_checkpoint out to start a new run, or name a checkpoint's folder.",
            )
        if latest is not None and not is_foreign(latest):
            _warn_of_nonfinite(manager, latest)
        return latest
    folder = output.fetch_named(resume) or output.find(resume)
    if manager.open(folder) is None:
        extra("foreign_checkpoints").check_foreign(folder)
    return folder


def _warn_of_nonfinite(manager: CheckpointManager, newest: Path) -> None:
    """Warn if the newest checkpoint, from which the run continues, is not finite; name the last finite one."""
    manifest = read_manifest(newest)
    if manifest.is_finite:
        return
    last_finite = manager.latest(finite_of(manifest.facts["run_id"]))
    logger.warning(
        "%s holds weights that are NaN or infinite, or follows such losses, and the run continues with it. %s",
        newest,
        "No finite checkpoint of its run is left; start again with a lower learning_rate."
        if last_finite is None
        else f"The last finite one is {last_finite.name}: resume_from_checkpoint={str(last_finite)!r} goes back to it.",
    )


def start_state(parts: RunParts, resume: Path | None, *, num_steps: int, num_epochs: int) -> None:
    """Initialise the documented state, from a checkpoint if given; in place, because callbacks refer to it."""
    state, args, trainer = parts.state, parts.args, parts.trainer
    saved_state = TrainerState() if resume is None else load_trainer_state(resume)
    saved_state.is_local_process_zero = trainer.is_local_process_zero()
    saved_state.is_world_process_zero = trainer.is_world_process_zero()
    vars(state).update(vars(saved_state))
    state.max_steps, state.num_train_epochs = num_steps, num_epochs
    state.epoch = state.epoch or 0.0
    state.train_batch_size = args.train_batch_size
    state.compute_steps(args, num_steps)
    if parts.trial_run is not None:
        parts.trial_run.describe(state)
    parts.services.check_cadences()
    trainer.current_flos = 0


def announce_training(parts: RunParts, plan: RunPlan) -> None:
    """Log the length and batch sizes of a run; parameters are counted only if the message is shown."""
    limits = ", ".join(f"{name}={value}" for name, value in parts.trainer.limits.facts.items())
    if limits and parts.strategy.is_main:
        logger.warning("At most this much of the data is read: %s.", limits)
    if not logger.isEnabledFor(logging.INFO):
        # Counting parameters is not free.
        return
    args, progress, num_epochs = parts.args, parts.progress, plan.length.num_epochs
    logger.info("***** Running training *****")
    logger.info("  Num examples = %s", f"{plan.length.num_examples:,}")
    logger.info("  Num Epochs = %s", "as many as the steps need" if num_epochs == sys.maxsize else f"{num_epochs:,}")
    if plan.length.num_batches is not None:
        logger.info("  Num update steps per epoch = %s", f"{plan.length.steps_per_epoch:,}")
    logger.info("  Instantaneous batch size per device = %s", f"{args.per_device_train_batch_size:,}")
    logger.info("  Total train batch size (w. parallel, distributed & accumulation) = %s", f"{plan.total_batch_size:,}")
    logger.info("  Gradient Accumulation steps = %d", args.gradient_accumulation_steps)
    logger.info("  Total optimization steps = %s", f"{plan.max_steps:,}")
    logger.info("  Number of trainable parameters = %s", f"{parts.trainer.get_num_trainable_parameters():,}")
    if progress.step:
        logger.info("  Continuing from the checkpoint: from epoch %d, global step %d", progress.epoch, progress.step)
        if not args.ignore_data_skip:
            logger.info("  Passing over the first %d batches of that epoch", progress.micro_steps_in_epoch)
