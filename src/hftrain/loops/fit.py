"""Training: epochs, steps, micro-steps. Read it beside a hand-written loop; `core/events.py` has it as pseudocode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import nn

from hftrain.core.errors import TaskError, explain
from hftrain.core.progress import Progress, TrainerControl
from hftrain.core.state import TrainerState
from hftrain.core.tree import batch_size_of
from hftrain.loops.window import LossWindow, as_number


@dataclass(frozen=True, kw_only=True, slots=True)
class FitConfig:
    """How long to train, and how a step is cut.

    Units:
        max_steps: optimizer updates. num_epochs: passes after which a run ends although callbacks cut some short (None:
        only `max_steps` ends it). accumulation: micro-batches per update. num_batches: of one rank's loader per
        epoch (None: unknown). num_batches_first: of the pass that a resume with another batch size goes on with, where
        it is cut otherwise than the others. world_size: ranks. empty_cache_every: updates (None: never).
    """

    max_steps: int
    num_epochs: int | None = None
    accumulation: int = 1
    num_batches: int | None = None
    num_batches_first: int | None = None
    world_size: int = 1
    evaluates_on_start: bool = False
    empty_cache_every: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSlots:
    """The functions the loop calls, with the documented signatures; a Trainer fills in its own methods.

    Args:
        get_batch_samples: (iterator, number, device) -> the step's micro-batches (none left: empty), item count.
        training_step: (model, batch, item count) -> detached loss, its share of the step; runs backward.
        before_epoch: Called before an epoch's data is opened.
        restore_rng: Called once it is open; returns whether the pass is over already.
        log, evaluate, save: Act on what callbacks asked for.
        empty_cache: Gives cached device memory back.
        act: (the loop's own `act`, last gradient norm, last learning rate); called in place of `FitLoop.act` where
            something must see the end of every step, and calls what it is given. None costs nothing.
        mark_sync: Told before each micro-step that begins or ends a step whether it is the last one before the update.
            None costs nothing.
        pending: What to call at the end of the next step, and of each one after, until it takes itself out again: put
            there by another thread or a signal handler, which may change the list at any time. Empty costs nothing.
    """

    get_batch_samples: Callable[[Iterator[Any], int, torch.device], tuple[list[Any], Any]]
    training_step: Callable[[nn.Module, Any, Any], torch.Tensor]
    before_epoch: Callable[[], None]
    restore_rng: Callable[[], bool | None]
    log: Callable[[dict[str, Any]], None]
    evaluate: Callable[[], Any]
    save: Callable[[], None]
    empty_cache: Callable[[], None]
    act: Callable[[Callable[[], None], Any, Any], None] | None = None
    mark_sync: Callable[[bool], None] | None = None
    pending: list[Callable[[], None]] = field(default_factory=list)


class Feed(Protocol):
    """What gives the loop its batches."""

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """Return the epoch's batches, cut from sample `offset` on, the first `skip` left out."""


class Steps(Protocol):
    """What turns gradients into an update."""

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients; return their norm before."""

    def step(self) -> bool:
        """Update the parameters; False if the update was skipped."""

    def zero_grad(self) -> None:
        """Forget the gradients."""


class Events(Protocol):
    """What tells callbacks."""

    heard: frozenset[str]

    def fire(self, event: str, **extra: Any) -> Any:
        """Call every callback that overrides the event."""


class FitLoop:
    """Run training steps until `max_steps`, acting between steps on what callbacks asked for.

    Args:
        config: How long, and how a step is cut.
        slots: The functions to call.
        feed: Gives each epoch's batches.
        stepper: Clips and updates.
        model: What `training_step` receives.
        optimizer: Only its current learning rate is read.
        schedule: Stepped after each update that was not skipped; None if something else drives it.
        no_sync: Context for micro-steps that must not exchange gradients.
        device: Where losses live.
        progress, state, control: Where the run is; mutated.
        events: Tells the callbacks.
        losses: Sums the losses.
    """

    def __init__(
        self,
        config: FitConfig,
        *,
        slots: FitSlots,
        feed: Feed,
        stepper: Steps,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]],
        device: torch.device,
        progress: Progress,
        state: TrainerState,
        control: TrainerControl,
        events: Events,
        losses: LossWindow,
    ) -> None:
        self.config = config
        self.slots = slots
        self.feed = feed
        self.stepper = stepper
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.no_sync = no_sync
        self.device = device
        self.progress = progress
        self.state = state
        self.control = control
        self.events = events
        self.losses = losses
        self.pending = slots.pending
        self._batches_per_epoch = 1
        # From an epoch's begin until what comes at its end begins.
        self.is_within_epoch = False
        self._is_resumed = progress.step > 0
        self.end_step = self.act if slots.act is None else self._act_through_slot

    def run(self, *, has_left: bool = False, ends_epoch: bool = False) -> None:
        """Train until `max_steps` or until a callback stops the run.

        Args:
            has_left: Whether `restore_rng` has something to do that the checkpoint's run had left to do.
            ends_epoch: Whether that run, if its steps are all done, has not come to the end of its last epoch yet.
        """
        if has_left and self.progress.step >= self.config.max_steps:
            self._finish(ends_epoch=ends_epoch)
        if self.config.evaluates_on_start and not self._is_resumed:
            self.slots.evaluate()
        num_epochs = self.config.num_epochs
        while self.progress.step < self.config.max_steps and not self.control.should_training_stop:
            self._run_epoch()
            if self.progress.cut_epochs and num_epochs is not None and self.progress.epoch >= num_epochs:
                break

    def _finish(self, *, ends_epoch: bool) -> None:
        """Do what was left after the last step; the data stay closed, for a stream would be read to its end."""
        if ends_epoch:
            self.events.fire("on_epoch_begin")
        self.slots.restore_rng()
        if ends_epoch:
            self._end_epoch()

    def _run_epoch(self) -> None:
        control, progress, accumulation = self.control, self.progress, self.config.accumulation
        num_skipped, offset = progress.micro_steps_in_epoch, progress.offset_in_epoch
        num_batches = self.config.num_batches_first if offset else self.config.num_batches
        self._batches_per_epoch = num_batches or self.config.max_steps * accumulation
        self.slots.before_epoch()
        batches = self.feed.open(progress.epoch, skip=num_skipped, offset=offset)
        control.should_epoch_stop = False
        self.is_within_epoch = True
        self.events.fire("on_epoch_begin")
        is_over = self.slots.restore_rng()
        num_steps = 0
        is_exhausted = False
        while progress.step < self.config.max_steps and not is_over:
            if progress.micro_steps_in_epoch == num_batches:
                # Hooks are not asked for batches after the last one. A loader may hold more than it says.
                more = list(islice(batches, 1))
                if not more:
                    is_exhausted = True
                    break
                batches = chain(more, batches)
            window, num_items = self.slots.get_batch_samples(batches, accumulation, self.device)
            if not window:
                is_exhausted = True
                break
            self._run_step(window, num_items)
            num_steps += 1
            if control.should_epoch_stop or control.should_training_stop:
                break
        if is_exhausted and not num_steps and not num_skipped and not offset:
            raise TaskError(
                explain(
                    f"Epoch {progress.epoch} was to be trained.",
                    "Its data gave no batch.",
                    "Give a dataset that is not empty and can be iterated once per epoch (a generator cannot).",
                )
            )
        self._end_epoch(is_exhausted=is_exhausted)

    def _end_epoch(self, *, is_exhausted: bool = False) -> None:
        control, progress = self.control, self.progress
        num_batches = self.config.num_batches_first if progress.offset_in_epoch else self.config.num_batches
        self.is_within_epoch = False
        progress.cut_epochs += control.should_epoch_stop
        # Counted before the event, so that a checkpoint taken here resumes with the next epoch.
        if is_exhausted or control.should_epoch_stop or progress.micro_steps_in_epoch == num_batches:
            progress.epoch += 1
            progress.micro_steps_in_epoch = progress.offset_in_epoch = 0
        self.events.fire("on_epoch_end")
        self.end_step()

    def _run_step(self, window: list[Any], num_items: Any) -> None:
        control, events, heard = self.control, self.events, self.events.heard
        control.should_log = control.should_evaluate = control.should_save = False
        last, mark_sync = len(window) - 1, self.slots.mark_sync
        if mark_sync is not None:
            mark_sync(not last)
        if "on_step_begin" in heard:
            events.fire("on_step_begin")
        num_samples = 0
        for index, batch in enumerate(window):
            if index == last:
                if mark_sync is not None and last:
                    mark_sync(True)
                loss = self.slots.training_step(self.model, batch, num_items)
            else:
                with self.no_sync(self.model):
                    loss = self.slots.training_step(self.model, batch, num_items)
                if "on_substep_end" in heard:
                    events.fire("on_substep_end")
            self.losses.add(loss)
            num_samples += batch_size_of(batch) or 0
        self.losses.grad_norm = self.stepper.clip()
        if "on_pre_optimizer_step" in heard:
            events.fire("on_pre_optimizer_step")
        is_updated = self.stepper.step()
        if "on_optimizer_step" in heard:
            events.fire("on_optimizer_step")
        # The rate this step used: the schedule moves it right after.
        self.losses.learning_rate = self.optimizer.param_groups[0]["lr"]
        if is_updated and self.schedule is not None:
            self.schedule.step()
        self.stepper.zero_grad()
        self._advance(last + 1, num_samples)
        if "on_step_end" in heard:
            events.fire("on_step_end")
        if self.pending:
            self._attend()
        if self.config.empty_cache_every and self.progress.step % self.config.empty_cache_every == 0:
            self.slots.empty_cache()
        self.end_step()

    def _attend(self) -> None:
        for call in tuple(self.pending):
            call()

    def _advance(self, num_micro_steps: int, num_samples: int) -> None:
        progress, state = self.progress, self.state
        progress.step += 1
        progress.micro_steps_in_epoch += num_micro_steps
        progress.samples += num_samples * self.config.world_size
        state.global_step = progress.step
        state.epoch = progress.epoch + progress.micro_steps_in_epoch / self._batches_per_epoch
        self.losses.close_step()

    def _act_through_slot(self) -> None:
        assert self.slots.act is not None
        self.slots.act(self.act, self.losses.grad_norm, self.losses.learning_rate)

    def act(self) -> None:
        """Do what callbacks asked for; the one place where a step may synchronise, log, evaluate or save."""
        control = self.control
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        if control.should_log:
            control.should_log = False
            if self.losses.num_steps:
                self.slots.log(self._read_logs())
        if control.should_evaluate:
            control.should_evaluate = False
            self.slots.evaluate()
        if control.should_save:
            control.should_save = False
            self.slots.save()

    def _read_logs(self) -> dict[str, Any]:
        logs: dict[str, Any] = dict(self.losses.read())
        if self.losses.grad_norm is not None:
            logs["grad_norm"] = as_number(self.losses.grad_norm)
        rate = self.losses.learning_rate
        # A checkpoint of transformers' Trainer does not tell what the last step used.
        logs["learning_rate"] = float(self.optimizer.param_groups[0]["lr"] if rate is None else rate)
        return logs
