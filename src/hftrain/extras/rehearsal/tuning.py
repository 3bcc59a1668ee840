"""`Trainer.tune`: find a learning rate, a batch size and a number of loader workers, and leave everything as it was."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hftrain.callbacks import PrinterCallback, TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.extras import extra, require
from hftrain.core.preserve import temporarily
from hftrain.core.seed import preserved_rng
from hftrain.core.tree import batch_size_of
from hftrain.core.types import Owns
from hftrain.data.datasets import has_length, preserved_data
from hftrain.extras.rehearsal.rehearsal import clear, copies
from hftrain.run.parts import TrainerHooks
from hftrain.storage.files import existing_part
from hftrain.trainer.parts import TrainerParts

_SMOOTHING, _DIVERGENCE_RATIO = 0.9, 4.0


@dataclass(frozen=True, slots=True)
class RateTrial:
    """What `Tuner.lr` found.

    Args:
        rates: The learning rates tried, rising.
        losses: The loss of the step with each rate.
        suggestion: A tenth of the rate at which the smoothed loss is lowest; None if it hardly falls.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float | None

    def plot(self, path: str | Path) -> None:
        """Draw losses over rates into a .png, .svg or .pdf file; needs matplotlib."""
        require("matplotlib>=3.7", feature="RateTrial.plot", extra="report")
        from matplotlib.figure import Figure

        axes = Figure(layout="constrained").subplots()
        axes.plot(self.rates, self.losses)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", label=f"{self.suggestion:.2g}")
            axes.legend()
        axes.figure.savefig(path)  # type: ignore[union-attr]


class Tuner:
    """Try settings with copies of model, optimizer and loop.

    Weights, optimizer, random numbers and the position in the data are those of before afterwards, and nothing is
    written. Every process gets the same answer.
    """

    def __init__(self, trainer: TrainerHooks, parts: TrainerParts, train: Callable[[Any], object]) -> None:
        self._trainer, self._parts, self._train = trainer, parts, train

    def lr(self, *, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100) -> RateTrial:
        """Train with a learning rate that rises exponentially, until the loss diverges. Collective.

        Args:
            min_lr: The first rate; groups with other rates keep their ratio to the first group.
            max_lr: The last one.
            num_steps: Steps in between.

        Raises:
            ConfigError: The rates are not in order, or an engine steps the optimizer itself.

        Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017.
        """
        if not 0 < min_lr < max_lr or num_steps < 3 or Owns.STEP in self._trainer.strategy.owns:
            raise ConfigError(
                f"Cannot try rates from {min_lr} to {max_lr} in {num_steps} steps with "
                f"strategy={self._trainer.strategy.name!r}.",
                "The first must be above 0 and below the last, with 3 steps or more, and an engine that steps the "
                "optimizer itself sets its rate.",
                "Correct them, or use strategy='ddp', 'fsdp' or one process.",
            )
        schedule = [min_lr * (max_lr / min_lr) ** (step / (num_steps - 1)) for step in range(num_steps)]
        losses: list[float] = []  # outside, because the callback's attributes are restored
        with self._trial(_RisingRate(schedule, losses), max_steps=num_steps):
            self._train(self._trainer)
        rates = schedule[: len(losses)]
        return RateTrial(rates, losses, _suggest_rate(rates, losses))

    def batch_size(self, *, most: int = 8192) -> int:
        """Double `per_device_train_batch_size`, up to `most`, until memory runs out; return the largest that worked.

        Raises:
            ConfigError: There are several processes, of which one alone may run out of memory.
        """
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        trainer, largest = self._trainer, 0
        if trainer.strategy.world_size > 1:
            raise ConfigError(
                f"Cannot look for a batch size on {trainer.strategy.world_size} processes.",
                "If one runs out of memory, the others wait for it.",
                "Look for it in one process, or set auto_find_batch_size=True, which agrees before the first step.",
            )
        size, data = trainer.args.per_device_train_batch_size, trainer.train_dataset
        while not largest or size <= (min(most, len(data)) if has_length(data) else most):
            try:
                with self._trial(TrainerCallback(), max_steps=2, per_device_train_batch_size=size):
                    self._train(trainer)
            except RuntimeError as error:
                if not largest or not should_reduce_batch_size(error):
                    raise
                break
            finally:
                clear_device_cache(garbage_collection=True)
            largest, size = size, 2 * size
        return largest

    def loader(self, num_workers: Sequence[int] = (0, 1, 2, 4), *, num_batches: int = 50) -> dict[int, float]:
        """Read training batches with several numbers of workers; return batches per second, the best first.

        Args:
            num_workers: Values of `dataloader_num_workers`.
            num_batches: How many batches to read with each.
        """
        speeds = {}
        for number in num_workers:
            data = self._trainer.train_dataset
            with temporarily(self._trainer.args, dataloader_num_workers=number), preserved_rng(), preserved_data(data):
                batches = iter(self._parts.data.training_share())
                next(batches)  # starts the workers
                start_s = time.perf_counter()
                num_read = sum(1 for batch in islice(batches, num_batches) if batch_size_of(batch) != 0)
                speeds[number] = num_read / (time.perf_counter() - start_s)
                del batches
        rates: Mapping[str, float] = self._trainer.strategy.broadcast_object({str(k): v for k, v in speeds.items()})
        return {int(k): rates[k] for k in sorted(rates, key=lambda name: -rates[name])}

    @contextmanager
    def _trial(self, director: TrainerCallback, **settings: Any) -> Iterator[None]:
        """Let a training in the context train copies, and write nothing."""
        trainer, strategy = self._trainer, self._trainer.strategy
        strategy.launch()
        output_dir, name = trainer.output_dir, strategy.broadcast_object(f".tuning-{uuid.uuid4().hex[:8]}")
        existing = existing_part(output_dir)
        folder = (output_dir if "://" not in str(output_dir) else Path.cwd()) / name
        quiet = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "eval_on_start": False}
        quiet |= {"logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False}
        try:
            with copies(trainer, self._parts, folder, director):
                for setting, value in {**quiet, **settings}.items():
                    setattr(trainer.args, setting, value)
                handler = trainer.callback_handler
                handler.callbacks[:] = filter(_runs_in_trials, handler.callbacks)
                handler.refresh()
                yield
        finally:
            if strategy.is_main:
                clear(folder, output_dir, existing=existing)
            strategy.barrier()


def _runs_in_trials(callback: Any) -> bool:
    bars, stopper = extra("progress"), extra("early_stopping").EarlyStoppingCallback
    excluded = (PrinterCallback, bars.ProgressCallback, bars.SummaryCallback, stopper)
    return not (isinstance(callback, excluded) or bars.is_notebook_table(callback))


@dataclass(eq=False)
class _RisingRate(TrainerCallback):
    """Set the rate of each step, and stop once the loss diverges."""

    rates: list[float]
    losses: list[float]
    ratios: list[float] = field(default_factory=list)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        groups = optimizer.param_groups
        first = groups[0]["lr"] or 1.0
        self.ratios = [group.get("initial_lr", group["lr"]) / groups[0].get("initial_lr", first) for group in groups]

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group, ratio in zip(optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = self.rates[state.global_step] * ratio

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            best = min(self.losses)
            if not math.isfinite(self.losses[-1]) or (best > 0 and self.losses[-1] > _DIVERGENCE_RATIO * best):
                control.should_training_stop = True


def _suggest_rate(rates: list[float], losses: list[float]) -> float | None:
    """Return a tenth of the rate with the lowest smoothed loss; None if that is hardly below the first one."""
    mean, smoothed = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smoothed.append(mean / (1 - _SMOOTHING**number))
    lowest = min(filter(math.isfinite, smoothed), default=math.inf)
    return rates[smoothed.index(lowest)] / 10 if smoothed and lowest < smoothed[0] - 0.01 * abs(smoothed[0]) else None
