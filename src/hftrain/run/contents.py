"""What a checkpoint of a run holds besides the model, and how it is restored."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.fitting import check_equal
from hftrain.checkpoint.manifest import (
    DECLARED_OBJECTS,
    MANIFEST,
    OUTSIDE_WEIGHTS,
    SCHEDULER,
    is_foreign,
    read_manifest,
)
from hftrain.checkpoint.state_files import (
    Entry,
    Keep,
    Registry,
    Scope,
    Writer,
    as_it_is,
    capture_own,
    load_own,
    load_part,
    restore_schedule,
    training_entries,
)
from hftrain.checkpoint.weights import saves_adapters
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.core.seed import capture_rng, draw_as_a_loader, preserved_rng, restore_rng
from hftrain.loops.contract import LoopStates
from hftrain.run.best import BestMetric
from hftrain.run.checkpoint_objects import CheckpointObjects
from hftrain.run.finiteness import Finiteness, Rewind
from hftrain.run.parts import RunParts
from hftrain.run.plan import RunPlan, base_rates, report_changed_arguments
from hftrain.storage.tensors import save_tensors, tree_bytes
from hftrain.strategies.base import Strategy
from hftrain.task.metric_state import metric_states, restore_metric_states

logger = get_logger(__name__)

# Actions that may still be due at a step boundary when its checkpoint is saved; the resumed run does them first. One
# requested by a signal does not wait for an evaluation that is due at the same boundary. One of a run's last step comes
# before the actions at the end of the last epoch, and no further step would trigger them.
LOG, EVALUATE, SAVE, END_EPOCH, END_RUN = _ACTIONS = ("log", "evaluate", "save", "end_epoch", "end_run")

# For files other than tensors (configurations, a vocabulary, the log history) and file system overhead.
_ALLOWANCE, _ALLOWANCE_BYTES = 1.01, 1 << 20


class Contents:
    """The registry of a run's checkpoints: what they hold besides the model, and how it is restored.

    Args:
        plan: Has the manifest of the checkpoint to resume from.
    """

    def __init__(self, parts: RunParts, plan: RunPlan) -> None:
        self._parts, self._plan = parts, plan
        self.loops = LoopStates(parts.loops)
        self.objects = CheckpointObjects(parts, self.loops)
        self.metric = BestMetric(parts.args, parts.state, keep_best=parts.save_policy.keep_best)
        parts.trained.follow(parts.model, parts.optimizer)
        self.rewind = Rewind(parts, self.objects)
        self.finiteness = Finiteness(parts, self.rewind)
        # The random numbers from which the order of the epoch was drawn.
        self._epoch_rng: dict[str, Any] = {}
        # A checkpoint, and this process's state in it until its random numbers are restored.
        self._folder, self._rank_state = Path(), dict[str, Any]()
        # The actions that were still due when the checkpoint was saved.
        self.pending: frozenset[str] = frozenset()
        # An earlier result of `own_state`, to be saved instead.
        self.past_state: dict[str, Any] | None = None
        self.is_planned = True
        self.registry = Registry({**self._manifest_entries(), **self._file_entries(), **self._rank_entries()})

    def close(self) -> None:
        """Restore the optimizers to their form before the run."""
        self.objects.close(is_complete=False)
        self._parts.trained.close()

    # -- the entries: a new feature adds one ----------------------------------------------------------------------

    def _manifest_entries(self) -> dict[str, Entry]:
        parts, metric = self._parts, self.metric

        def position() -> dict[str, Any]:
            name, num_batches = type(parts.optimizer).__name__, parts.loop.num_batches
            limits = {"limits": parts.trainer.limits.facts} if parts.trainer.limits.facts else {}
            return {**self._plan.facts(parts.progress, num_batches=num_batches, optimizer=name), **limits}

        def load_metric(facts: Mapping[str, Any]) -> None:
            metric.load_state_dict(facts)
            manifest, folder = self._plan.manifest, self._folder
            if manifest is not None and manifest.is_planned:
                is_here = folder.resolve().parent == parts.manager.output_dir.resolve()
                metric.note_saved(manifest.step, parts.output.text_of(folder) if is_here else str(folder))

        return {
            "position": Entry(Scope.MANIFEST, position),
            "actions": Entry(Scope.MANIFEST, self._pending_facts, self._restore_pending),
            "trained": Entry(Scope.MANIFEST, parts.trained.changes, parts.trained.repeat),
            "metric": Entry(Scope.MANIFEST, metric.state_dict, load_metric),
            "finiteness": Entry(Scope.MANIFEST, self.finiteness.state_dict, self.finiteness.load_state_dict),
            **parts.facts,
        }

    def _file_entries(self) -> dict[str, Entry]:
        parts, trainer, trained = self._parts, self._parts.trainer, self._parts.trained
        trained_parts = parts.strategy, parts.wrapped, parts.optimizer, parts.precision

        def check(folder: Path, state: dict[str, Any]) -> None:
            if is_foreign(folder):
                extra("foreign_checkpoints").check_foreign_optimizer(state, parts.optimizer, folder)

        def read_precision(folder: Path) -> Any:
            manifest = read_manifest(folder) if (folder / MANIFEST).exists() else self._plan.manifest
            return manifest and manifest.facts["geometry"]["precision"]

        def load_schedule(folder: Path) -> None:
            if trainer.lr_scheduler is not None:
                restore_schedule(folder / SCHEDULER, trainer.lr_scheduler, load_part(folder, SCHEDULER))

        def schedule() -> Any:
            return None if trainer.lr_scheduler is None else trainer.lr_scheduler.state_dict()

        return {
            **training_entries(*trained_parts, read_precision=read_precision, check=check),
            SCHEDULER: Entry(Scope.WHOLE, schedule, load_schedule),
            OUTSIDE_WEIGHTS: Entry(Scope.WHOLE, trained.state_dict, trained.load, write=save_tensors),
            DECLARED_OBJECTS: Entry(Scope.WHOLE, self.objects.state_dict, self.objects.load),
        }

    def _rank_entries(self) -> dict[str, Entry]:
        """Return the entries that differ by process, except random numbers."""
        parts, task, plan, feed = self._parts, self._parts.task, self._plan, self._parts.data.feed
        device, losses, logs, computing = parts.strategy.device, parts.losses, parts.logs, parts.computing

        def load_data(state: Any) -> None:
            assert plan.manifest is not None
            # If several processes read a stream, the position of each differs from the common one.
            is_shared = {plan.manifest.facts["geometry"]["world_size"], parts.strategy.data.world_size} != {1}
            if plan.is_reshaped and isinstance(state, dict):
                state.pop("ahead", None)
            feed.load_state_dict(None if plan.is_reshaped and feed.is_stream and is_shared else state)

        def load_losses(state: Any) -> None:
            losses.load_state_dict(state, device=device)
            self.finiteness.begin()

        def load_metrics(states: Any) -> None:
            unknown = restore_metric_states(task.metrics("train"), states, device=device)
            if unknown and losses.num_steps and not parts.args.ignore_data_skip:
                logger.warning(
                    "The checkpoint does not contain what these metrics had accumulated since the last log: %s.",
                    ", ".join(unknown),
                )

        def load_memory(hidden_states: Any) -> None:
            if parts.progress.micro_steps_in_epoch and not plan.is_reshaped and parts.args.past_index >= 0:
                computing.past = parts.strategy.to_device(hidden_states)

        rank_entry = partial(Entry, Scope.RANK)
        return {
            "epoch_rng": rank_entry(lambda: self._epoch_rng, partial(setattr, self, "_epoch_rng"), {}),
            "data": rank_entry(feed.state_dict, load_data),
            "loss_window": rank_entry(losses.state_dict, load_losses, {}),
            "log_window": rank_entry(logs.state_dict, partial(logs.load_state_dict, device=device), {}),
            "train_metrics": rank_entry(lambda: metric_states(task.metrics("train")), load_metrics, {}),
            "loops": rank_entry(lambda: self.loops.state_dict() or None, self.loops.load_state_dict, {}),
            "generators": rank_entry(self.objects.generator_states, self.objects.load_generators, {}),
            "past": rank_entry(lambda: computing.past, load_memory),
        }

    def _pending_facts(self) -> dict[str, Any]:
        """Return the actions that callbacks, or the end of the run, require at this boundary and are not done yet."""
        control, progress = self._parts.control, self._parts.progress
        is_pending = {
            LOG: control.should_log,
            EVALUATE: control.should_evaluate,
            # A save that was requested without an evaluation is done by this checkpoint.
            SAVE: control.should_evaluate and control.should_save,
            END_EPOCH: control.should_epoch_stop and progress.micro_steps_in_epoch > 0,
            END_RUN: self._parts.loop.is_within_epoch and progress.step >= self._parts.state.max_steps,
        }
        # At the end of an incomplete epoch, a callback has stopped the run or the epoch.
        is_planned = self.is_planned and (self._parts.loop.is_within_epoch or not progress.micro_steps_in_epoch)
        unplanned = {} if is_planned else {"is_planned": False}
        return {"left": [name for name in _ACTIONS if is_pending[name]], **unplanned}

    def _restore_pending(self, facts: Mapping[str, Any]) -> None:
        action_names = facts.get("left")
        self.pending = frozenset(name for name in _ACTIONS if isinstance(action_names, list) and name in action_names)

    # -- saving --------------------------------------------------------------------------------------------------

    def capture_own(self, keep: Keep = as_it_is, *marks: str) -> Writer:
        """Return a function that writes what each process saves for itself, with these marks."""
        state = {**(self.past_state or self.registry.own_state()), **dict.fromkeys(marks, True)}
        return capture_own(state, self._parts.strategy, keep)

    def capture_training(self, keep: Keep = as_it_is, *, names: Container[str] | None = None) -> list[Writer]:
        """Return functions that write the entries with a file, or those of these names. Collective."""
        # Other processes only take part in gathering.
        is_main = self._parts.manager.is_committer
        writers = self.registry.capture(keep if is_main else as_it_is, names=names)
        return [*(writers if is_main else ()), *(self.objects.capture_shards(keep) if names is None else ())]

    # -- restoring -----------------------------------------------------------------------------------------------

    def restore(self, folder: Path) -> None:
        """Load everything but the model. Collective.

        The order of a resume: the position (`plan_run`) and the documented state (`start_state`), which size the
        schedule; the model's weights (`making_ready`), before the strategy wraps or shards it; here the manifest's
        entries, those with a file, each process's own, and the callbacks; the users' objects (`objects.begin`), which
        may exist by now; and the loop's state. Random numbers come last: `begin_epoch` restores those from which the
        data's order is drawn, and `Run._finish_resume`, once the data is open, those of the next step; then it does the
        actions that were still due.
        """
        parts, manifest = self._parts, self._plan.manifest
        assert manifest is not None
        self._folder = folder
        if not is_foreign(folder):
            check_equal(manifest.facts["geometry"], {"optimizer": type(parts.optimizer).__name__}, step=manifest.step)
        self.registry.load(Scope.MANIFEST, lambda *_: manifest.facts)
        former_rates = base_rates(parts.optimizer)
        parts.hooks.load_optimizer_and_scheduler(str(folder))
        if not is_foreign(folder):
            report_changed_arguments(parts.args, folder, saved_rates=base_rates(parts.optimizer), rates=former_rates)
        rank_state = load_own(folder, parts.strategy, manifest.facts["geometry"])
        self.registry.load(Scope.RANK, rank_state.get)
        parts.events.restore(parts.state.stateful_callbacks, is_full=parts.args.restore_callback_states_from_checkpoint)
        with preserved_rng():  # check now, rather than in the loop, that they are valid
            for rng_state in (self._epoch_rng, rank_state) if self._epoch_rng else (rank_state,):
                restore_rng(rng_state)
        self._rank_state = rank_state
        if parts.args.ignore_data_skip:
            # Documented: start the epoch's data again, with the current random numbers.
            self._rank_state, parts.progress.micro_steps_in_epoch, parts.progress.offset_in_epoch = {}, 0, 0
            parts.data.feed.load_state_dict(None)

    def load_training(self, folder: Path) -> None:
        """Load the entries with a file. Collective."""
        self.registry.load(Scope.WHOLE, lambda *_: folder)

    def begin_epoch(self) -> None:
        """Note the random numbers from which an epoch's order may be drawn, or restore the checkpoint's."""
        if self._rank_state and self._parts.progress.is_within_epoch:
            # A checkpoint of another trainer does not contain those from which the epoch's order was drawn.
            restore_rng(self._epoch_rng or self._rank_state)
        else:
            self.load_rng_through_hook()
            self._epoch_rng = capture_rng()
            self._parts.computing.past = None
        if self._parts.data.feed.draws_a_seed(self._parts.progress.epoch):
            draw_as_a_loader()

    def load_rng_through_hook(self) -> None:
        """Restore the checkpoint's random numbers through the documented hook, if that has not been done."""
        if self._rank_state:
            self._parts.hooks.load_rng_state(str(self._folder))
            self._rank_state = {}

    def load_rng(self) -> None:
        """Do what the hook does, for `load_rng_through_hook`."""
        if self._rank_state:
            restore_rng(self._rank_state)


def checkpoint_bytes(parts: RunParts) -> int:
    """Return about how many bytes a checkpoint takes on the disk of this process's committer. Collective."""
    args, strategy, model, optimizer = parts.args, parts.strategy, parts.wrapped, parts.optimizer
    num_bytes, shards = 0, strategy.model_shards(model)
    if shards is not None:
        num_bytes += tree_bytes(shards)
    elif args.should_save:
        num_bytes += _whole_bytes(strategy, model)
    if args.should_save:
        named = (*parts.task.named_parameters(), *parts.task.named_buffers())
        num_bytes += tree_bytes([tensor for name, tensor in named if not name.startswith("model.")])
    if not args.save_only_model:
        optimizer_shards = strategy.optimizer_shards(model, optimizer)
        if optimizer_shards is not None:
            num_bytes += tree_bytes(optimizer_shards[1])
        elif args.should_save:
            num_bytes += tree_bytes(optimizer.state_dict())
    total_bytes = num_bytes if args.save_on_each_node else int(strategy.reduce(torch.tensor(num_bytes)))
    return int(total_bytes * _ALLOWANCE) + _ALLOWANCE_BYTES


def _whole_bytes(strategy: Strategy, wrapped: nn.Module) -> int:
    """Return the bytes of a model that is saved whole, without its state dict, which may be collective."""
    model = strategy.unwrap(wrapped)
    parameters = list(model.parameters())
    if saves_adapters(model):
        return tree_bytes([parameter for parameter in parameters if parameter.requires_grad])
    # With torch's older FSDP wrapper, each process has a shard of about the same size; newer ones know the full size.
    is_in_pieces = strategy.shards_model and not any(hasattr(parameter, "placements") for parameter in parameters)
    return tree_bytes([*parameters, *model.buffers()]) * (strategy.world_size if is_in_pieces else 1)
