"""Training: epochs, steps, micro-steps. Read it next to a hand-written loop; `core/events.py` has it as pseudocode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hftrain.core.errors import TaskError
from hftrain.core.notes import keep_facts
from hftrain.core.state import Progress, TrainerControl, TrainerState
from hftrain.core.tree import batch_size_of
from hftrain.loops.contract import Loop
from hftrain.loops.window import LossWindow
from hftrain.step.stepper import Stepper


@dataclass(frozen=True, kw_only=True, slots=True)
class FitConfig:
    """Length of the training, and the size of a step.

    Units:
        max_steps: optimizer updates. num_epochs: passes after which a run ends even if some were shorter (None:
        only `max_steps` ends it). accumulation: micro-batches per update. num_batches: of one rank's loader per
        epoch, as planned (None: unknown). world_size: ranks. empty_cache_every: updates (None: never).
    """

    max_steps: int
    num_epochs: int | None = None
    accumulation: int = 1
    num_batches: int | None = None
    world_size: int = 1
    empty_cache_every: int | None = None


# In place of an event: the loop has acted on the flags, and cleared them.
AFTER_ACTING = ""


def pass_flags(event: str) -> None:
    """Accept the control flags of a process that has no others to agree with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitHooks:
    """The functions that the loop calls, with the documented signatures; a Trainer passes its own methods.

    Args:
        get_batch_samples: (iterator, number, device) -> the step's micro-batches (none left: empty), item count.
        training_step: (model, batch, item count) -> detached loss, scaled to its share of the step; runs backward.
        before_epoch: Called before an epoch's data is opened.
        restore_rng: Called once the data is open; returns whether the pass is already over.
        log, evaluate, save: Perform the actions that callbacks requested; save also clears `control.should_save`.
        evaluate_first: Called before the first epoch of a run, also of a resumed one; None for no such evaluation.
        empty_cache: Frees cached device memory.
        make_feed: A dataset -> the feed of this rank's batches of it, loaded as by the Trainer; the run reads it from
            then on. Collective.
        evaluate_on: (dataset, prefix) -> the metrics of an evaluation on it, which are also logged. Collective.
        rewind: Loads weights, optimizers and loss scale from the run's newest finite checkpoint, at the end of a step,
            and returns its folder (None: there is none yet); steps, schedules and data go on. Collective. None where
            a running training cannot load its checkpoints: it saves none, they lack optimizers, or an engine owns them.
        act: (the loop's own `act`, last gradient norm, last learning rate); called instead of `FitLoop.act` at the end
            of every step and epoch, and must call its first argument. None costs nothing.
        mark_sync: Called before the first and the last micro-step of a step; its argument is whether the micro-step is
            the last one before the update. None costs nothing.
        pass_length: Returns the batches of the open pass (None: unknown). None: every pass has those that are planned.
        check_pass: (batches read, batches in a pass), called if they differ: a pass ended early, or goes on.
            None costs nothing.
        check_flags: (event) -> None; called before the loop acts on flags of the control, with the event that may have
            set them, and with `AFTER_ACTING` after it has acted.
        read_rate: Returns the learning rate that a step used, before the schedule's step; None reads the optimizer's.
    """

    get_batch_samples: Callable[[Iterator[Any], int, torch.device], tuple[list[Any], Any]]
    training_step: Callable[[nn.Module, Any, Any], torch.Tensor]
    before_epoch: Callable[[], None]
    restore_rng: Callable[[], bool | None]
    log: Callable[[dict[str, Any]], None]
    evaluate: Callable[[], Any]
    save: Callable[[], None]
    empty_cache: Callable[[], None]
    make_feed: Callable[[Any], Feed]
    evaluate_on: Callable[[Any, str], Mapping[str, float]]
    evaluate_first: Callable[[], Any] | None = None
    rewind: Callable[[], Path | None] | None = None
    act: Callable[[Callable[[], None], Any, Any], None] | None = None
    mark_sync: Callable[[bool], None] | None = None
    pass_length: Callable[[], int | None] | None = None
    check_pass: Callable[[int, int], None] | None = None
    check_flags: Callable[[str], None] = pass_flags
    read_rate: Callable[[], float] | None = None


class Feed(Protocol):
    """Source of the loop's batches."""

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """Return the epoch's batches from sample `offset` on, without the first `skip` batches."""


class Events(Protocol):
    """Sends events to callbacks."""

    heard: frozenset[str]

    def fire(self, event: str, **extra: Any) -> Any:
        """Call every callback that overrides the event."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitParts:
    """Parts of a training run, created by the Trainer for each run.

    Args:
        config: Length of the training and size of a step.
        feed: Source of each epoch's batches.
        dataset: The Trainer's training dataset, or None.
        stepper: Runs backward, clips and updates.
        model: The model that `training_step` receives, as wrapped by the strategy.
        optimizer: The loop itself only reads its current learning rate.
        schedule: Stepped after each update that was not skipped; None if something else drives it.
        no_sync: Context for micro-steps that must not exchange gradients.
        device: The device of the losses.
        progress, state, control: The progress of the run; mutated.
        events: Sends events to callbacks.
        pending: Functions to call at the end of each step, until they remove themselves; those that change its result
            come first. Another thread or a signal handler may change the list at any time. Empty costs nothing.
    """

    config: FitConfig
    hooks: FitHooks
    feed: Feed
    dataset: Any
    stepper: Stepper
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]]
    device: torch.device
    progress: Progress
    state: TrainerState
    control: TrainerControl
    events: Events
    losses: LossWindow
    pending: list[Callable[[], None]] = field(default_factory=list)


class FitLoop(Loop[FitParts]):
    """Run training steps until `max_steps`; between steps, log, evaluate and save as callbacks request.

    Subclasses may override the methods without an underscore.
    """

    stage = "fit"
    # True from the start of an epoch until its end is processed.
    is_within_epoch = False
    # Batches in the latest pass, as its data stated when it began; None if unknown.
    num_batches: int | None = None
    # Performs requested actions at the end of a step or an epoch: `act`, or a hook that wraps it.
    end_step: Callable[[], None]

    def attach(self, parts: FitParts) -> None:
        super().attach(parts)
        self.is_within_epoch = False
        self.num_batches, self._batches_per_epoch = parts.config.num_batches, 1
        self.end_step = self.act if parts.hooks.act is None else self._hand_to_override

    def run(self, *, has_left: bool = False, ends_epoch: bool = False) -> None:
        """Train until `max_steps` or until a callback stops the run.

        Args:
            has_left: Whether `restore_rng` has to finish actions that the checkpoint's run had not done yet.
            ends_epoch: Whether that run, if all its steps are done, had not ended its last epoch yet.
        """
        config, progress = self.parts.config, self.parts.progress
        if has_left and progress.step >= config.max_steps:
            self._finish(ends_epoch=ends_epoch)
        if self.parts.hooks.evaluate_first is not None:
            self.parts.hooks.evaluate_first()
        self.parts.hooks.check_flags("on_train_begin")
        while progress.step < config.max_steps and not self.parts.control.should_training_stop:
            if config.num_epochs is not None and progress.epoch >= config.num_epochs:
                break
            self.run_epoch()

    def _finish(self, *, ends_epoch: bool) -> None:
        """Finish actions left after the last step; the data stays closed, since a stream would be read to its end."""
        if ends_epoch:
            self.parts.events.fire("on_epoch_begin")
        self.parts.hooks.restore_rng()
        if ends_epoch:
            self._end_epoch()

    def run_epoch(self) -> None:
        """Run the rest of the current epoch."""
        parts, progress, control, events = self.parts, self.parts.progress, self.parts.control, self.parts.events
        hooks, accumulation, max_steps = parts.hooks, parts.config.accumulation, parts.config.max_steps
        num_skipped, offset = progress.micro_steps_in_epoch, progress.offset_in_epoch
        control.should_epoch_stop = False
        self.is_within_epoch = True
        # Before the data is opened, because loader workers then have their copies and read ahead.
        events.fire("on_epoch_begin")
        hooks.check_flags("on_epoch_begin")
        hooks.before_epoch()
        batches = parts.feed.open(progress.epoch, skip=num_skipped, offset=offset)
        num_batches = self.num_batches = self._pass_length()
        # Without a length, the run is one pass, so that `state.epoch` grows to 1.
        self._batches_per_epoch = num_batches or max_steps * accumulation
        is_over = hooks.restore_rng()
        num_steps = 0
        is_exhausted = False
        while progress.step < max_steps and not is_over:
            if progress.micro_steps_in_epoch == num_batches:
                # Hooks must not be asked for batches after the last one. A loader may hold more than its length.
                lookahead = list(islice(batches, 1))
                if not lookahead:
                    is_exhausted = True
                    break
                batches = chain(lookahead, batches)
                self._check_pass(progress.micro_steps_in_epoch + 1, num_batches)
            window, num_items = hooks.get_batch_samples(batches, accumulation, parts.device)
            if len(window) < accumulation:
                self._check_pass(progress.micro_steps_in_epoch + len(window), num_batches)
            if not window:
                is_exhausted = True
                break
            control.should_log = control.should_evaluate = control.should_save = False
            if hooks.mark_sync is not None:
                hooks.mark_sync(len(window) == 1)
            if "on_step_begin" in events.heard:
                events.fire("on_step_begin")
            self.run_step(window, num_items)
            self._finish_step(window)
            num_steps += 1
            if control.should_epoch_stop or control.should_training_stop:
                break
        if is_exhausted and not num_steps and not num_skipped and not offset:
            raise _no_batch(progress.epoch)
        self._end_epoch(is_exhausted=is_exhausted)

    def _pass_length(self) -> int | None:
        read = self.parts.hooks.pass_length
        return self.parts.config.num_batches if read is None else read()

    def _check_pass(self, num_read: int, num_batches: int | None) -> None:
        check = self.parts.hooks.check_pass
        if check is not None and num_batches is not None and num_read not in (0, num_batches):
            check(num_read, num_batches)

    def _end_epoch(self, *, is_exhausted: bool = False) -> None:
        control, progress = self.parts.control, self.parts.progress
        self.is_within_epoch = False
        progress.cut_epochs += control.should_epoch_stop
        # A loader may correct its length while it is read.
        is_over = progress.micro_steps_in_epoch == self.num_batches == self._pass_length()
        # Counted before the event, so that a checkpoint saved here resumes with the next epoch.
        if is_exhausted or control.should_epoch_stop or is_over:
            progress.epoch += 1
            progress.micro_steps_in_epoch = progress.offset_in_epoch = 0
        self.parts.events.fire("on_epoch_end")
        self.parts.hooks.check_flags("on_epoch_end")
        self.end_step()
        self.parts.hooks.check_flags(AFTER_ACTING)

    def run_step(self, window: list[Any], num_items: Any) -> None:
        """Run one optimizer step: accumulate the gradients of its micro-batches, then update.

        Args:
            window: The step's micro-batches, at least one.
            num_items: Their item count from `get_batch_samples`.
        """
        parts, hooks, last_index = self.parts, self.parts.hooks, len(window) - 1
        for index, batch in enumerate(window):
            # The only micro-batch of a step has been marked by `run_epoch`.
            if index == last_index and hooks.mark_sync is not None and last_index:
                hooks.mark_sync(True)
            try:
                if index == last_index:  # exchanges the gradients of all micro-batches
                    loss = hooks.training_step(parts.model, batch, num_items)
                else:
                    with parts.no_sync(parts.model):
                        loss = hooks.training_step(parts.model, batch, num_items)
            except Exception as error:
                keep_facts(error, batch=batch)
                raise
            if index != last_index and "on_substep_end" in parts.events.heard:
                parts.events.fire("on_substep_end")
            parts.losses.add(loss)
        self.update()

    def update(self) -> None:
        """Clip the gradients, update the parameters, step the schedule and zero the gradients."""
        parts, heard = self.parts, self.parts.events.heard
        parts.losses.grad_norm = parts.stepper.clip()
        if "on_pre_optimizer_step" in heard:
            parts.events.fire("on_pre_optimizer_step")
        is_updated = parts.stepper.step()
        if "on_optimizer_step" in heard:
            parts.events.fire("on_optimizer_step")
        # The rate that this step used, before the schedule changes it.
        read_rate = parts.hooks.read_rate
        rates = parts.losses.rates = [group["lr"] for group in parts.optimizer.param_groups]
        parts.losses.learning_rate = rates[0] if read_rate is None else read_rate()
        if is_updated and parts.schedule is not None:
            parts.schedule.step()
        parts.stepper.zero_grad()

    def _finish_step(self, window: list[Any]) -> None:
        parts, progress, state = self.parts, self.parts.progress, self.parts.state
        for batch in window:
            progress.samples += (batch_size_of(batch) or 0) * parts.config.world_size
        progress.step += 1
        progress.micro_steps_in_epoch += len(window)
        state.global_step = progress.step
        state.epoch = progress.epoch + progress.micro_steps_in_epoch / self._batches_per_epoch
        parts.losses.num_steps += 1
        if "on_step_end" in parts.events.heard:
            parts.events.fire("on_step_end")
        self.parts.hooks.check_flags("on_step_end")
        for call in tuple(parts.pending):
            call()
        if parts.config.empty_cache_every and progress.step % parts.config.empty_cache_every == 0:
            parts.hooks.empty_cache()
        self.end_step()
        self.parts.hooks.check_flags(AFTER_ACTING)

    def _hand_to_override(self) -> None:
        assert self.parts.hooks.act is not None
        self.parts.hooks.act(self.act, self.parts.losses.grad_norm, self.parts.losses.learning_rate)

    def act(self) -> None:
        """Log, evaluate and save as callbacks requested; the only place where a step may synchronise."""
        control, hooks = self.parts.control, self.parts.hooks
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        if control.should_log:
            control.should_log = False
            if self.parts.losses.num_steps:
                hooks.log(self._read_logs())
        if control.should_evaluate:
            control.should_evaluate = False
            hooks.evaluate()
        if control.should_save:
            hooks.save()

    def _read_logs(self) -> dict[str, Any]:
        losses = self.parts.losses
        logs: dict[str, Any] = dict(losses.read())
        rate, groups = losses.learning_rate, self.parts.optimizer.param_groups
        # A checkpoint of transformers' Trainer does not hold the rate of the last step.
        logs["learning_rate"] = float(groups[0]["lr"] if rate is None else rate)
        return {**logs, **_rates_apart(groups, losses.rates)}


def _rates_apart(groups: Sequence[Mapping[str, Any]], rates: Sequence[Any]) -> dict[str, float]:
    """Return the rate of each group by its name, that of its optimizer or its number, if they differ."""
    if len(set(map(float, rates))) < 2:
        return {}
    names = [str(group.get("name", group.get("optimizer", number))) for number, group in enumerate(groups)]
    own = [name if names.count(name) == 1 else f"{name}/{number}" for number, name in enumerate(names)]
    return {f"learning_rate/{name}": float(rate) for name, rate in zip(own, rates, strict=False)}


def _no_batch(epoch: int) -> TaskError:
    if epoch:
        return TaskError(
            f"Cannot train epoch {epoch}.",
            "The data gave no batch in this pass, though it did before: an iterator or generator is used up after one.",
            "Use a DataLoader, a list or a class whose __iter__ starts again, or a max_steps that one pass is enough "
            "for.",
        )
    return TaskError(
        f"Cannot train epoch {epoch}.",
        "Its data gave no batch.",
        "Give a dataset that is not empty and can be iterated once per epoch (a generator cannot).",
    )
