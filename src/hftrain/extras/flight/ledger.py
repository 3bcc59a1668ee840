"""Write down what each step was made of: samples, losses, norm, rate, times, and a fingerprint of the weights.

With ``Trainer(flight_log=True)`` each process writes a file such as ``rank0.jsonl`` into the folder ``flight`` of the
output folder: one JSON object per line. A line with ``begin`` starts each session, the others are steps:

``step``: the number of the step, from 1. A resumed run writes its steps again; the last line of a step counts.
``epoch``: the number of the pass over the data, from 0.
``samples``: per micro-batch, the indices of its samples in the dataset, the pairs of a Mixture, or the hashes of what a
stream yields; null if unknown (loaders that are not torch's).
``losses``: per micro-batch its loss, scaled to its share of the step. ``sample_losses``: that of each sample, likewise.
``items``: what the step's loss is a mean over, of all processes. ``norm``, ``rate``, ``skipped``: of the update.
``ms``: milliseconds of ``data``, ``forward``, ``backward`` and ``step`` on the host.
``gradients``, ``weights``: fingerprints of a part of them, after the update, null if not at hand; see `Fingerprint`.
The batches of the last steps whose loss or norm stood out are in the folder ``spikes`` there.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.devices import device_name, to_host
from hftrain.core.errors import ConfigError
from hftrain.core.launcher import STARTED_IN
from hftrain.core.parameters import is_partitioned
from hftrain.data.datasets import has_length, whole_dataset
from hftrain.extras.flight.files import Ledger, RecentSteps, quiet
from hftrain.extras.flight.fingerprint import Fingerprint
from hftrain.extras.flight.invariants import Invariants
from hftrain.extras.flight.reading import total_loss
from hftrain.extras.flight.samples import ExcludeSamples, RecordingFeed, with_recorded_samples
from hftrain.extras.flight.stacks import Phase, StackDumps

_MAX_SPIKES = 20
_TRAINING_NUMBERS = count(1)
_FINGERPRINTS = ("weights", "gradients")

# Variables that change numbers or who computes them.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("TORCH_", "NCCL_", "PYTORCH_", "XLA_")


class FlightLog(TrainerCallback):
    """Write down what each step was made of, for `hftrain blame`: ``Trainer(flight_log=True)``.

    Numbers are read from the device one step late, when it has computed them, and nothing is called more often than
    without. Writing never ends a run; the first failure is a warning.

    Args:
        sample_losses: ``f(outputs, batch) -> tensor [samples]``: the loss of each sample, from what the model's forward
            returned. Called in each micro-step. Without it, a spike is known by its micro-batches.
        flush_every: Steps between writes, at which `Invariants` are checked.
        on_broken: What to do when one of those does not hold: ``"warn"`` once, or ``"stop"`` the run with an error.
        rotate_bytes: A file that has become larger is compressed, and another begun.
        hang_timeout_s: If no step ends for so many seconds, evaluations and saves included, each process writes the
            stacks of its threads, for `hftrain hangs`. It does so on SIGQUIT, too, and if another process fails.

    Raises:
        ConfigError: A number is not above 0, or `on_broken` is neither.
    """

    def __init__(
        self,
        *,
        sample_losses: Callable[[Any, Any], torch.Tensor] | None = None,
        flush_every: int = 10,
        rotate_bytes: int = 64 * 2**20,
        hang_timeout_s: float | None = None,
        on_broken: str = "warn",
    ) -> None:
        if on_broken not in ("warn", "stop"):
            raise ConfigError(f"Cannot use {on_broken=}.", "It is 'warn' or 'stop'.", "Correct it.")
        if min(flush_every, rotate_bytes, 1 if hang_timeout_s is None else hang_timeout_s) <= 0:
            raise ConfigError(
                f"Cannot use FlightLog({flush_every=}, {rotate_bytes=}, {hang_timeout_s=}).",
                "They are steps, bytes and seconds, all above 0.",
                "Correct them, or leave them out.",
            )
        self.hang_timeout_s, self.on_broken = hang_timeout_s, on_broken
        self.sample_losses, self.flush_every, self.rotate_bytes = sample_losses, flush_every, rotate_bytes
        self._recorder: Any = None

    def wrap_loader(self, loader: Any) -> Any:
        """Return the loader, with the samples of its batches noted if they are known."""
        return with_recorded_samples(loader)

    def wrap_stepper(self, stepper: Any, *, args: Any, strategy: Any, precision: Any, **_: Any) -> Any:
        """Note where to write, and take the time of backward passes."""
        self._recorder = recorder = _Recorder(self, args, strategy)
        recorder.precision = precision.policy.name

        def backward(loss: torch.Tensor, **options: Any) -> None:
            with recorder.timed("backward"):
                stepper.backward(loss, **options)

        return replace(stepper, backward=backward)

    def wrap_parts(self, parts: Any) -> Any:
        """Note what the loop reads, computes and updates."""
        return self._recorder.watch(parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the step before, and keep this one."""
        self._recorder.end_step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write everything: no step before a checkpoint is missing, nor one before the folder's last upload."""
        self._recorder.finish()

    on_train_end = on_save

    def close_run(self) -> None:
        """Write what is left, also after an error."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


class _Recorder:
    def __init__(self, settings: FlightLog, args: Any, strategy: Any) -> None:
        self._settings, self._strategy = settings, strategy
        self._ledger = Ledger(args.output_dir, strategy=strategy, rotate_bytes=settings.rotate_bytes)
        self._folder = self._ledger.folder
        self.precision = ""
        self.seconds = dict.fromkeys(("data", "forward", "backward", "step"), 0.0)
        self._lines: list[dict[str, Any]] = []
        self._unchecked: list[dict[str, Any]] = []
        self._micro_steps: list[dict[str, Any]] = []
        self._pending: dict[str, Any] | None = None
        self._update: dict[str, Any] = {"prints": None, "skipped": None}
        self._recent_steps = RecentSteps()
        self._outputs: Any = None
        self._hook: Any = None
        self._stacks: StackDumps | None = None
        self.phase = Phase()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Tell that a phase goes on, and add its seconds to its entry if it has one."""
        outer, start_s = self.phase.begin(name), time.perf_counter()
        try:
            yield
        finally:
            if name in self.seconds:
                self.seconds[name] += time.perf_counter() - start_s
            self.phase.begin(outer)

    def watch(self, parts: Any) -> Any:
        hooks, stepper, seconds = parts.hooks, parts.stepper, self.seconds
        self._parts, self._feed = parts, RecordingFeed(parts.feed)
        feed = self._feed
        model, sample_losses = self._strategy.unwrap(parts.model), self._settings.sample_losses
        is_known = not is_partitioned(model) and parts.device.type != "xla"
        parameters = model.named_parameters() if is_known else ()
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._fingerprints = fingerprint = Fingerprint(parameter for _, parameter in trained)
        if sample_losses is not None:
            self._hook = parts.model.register_forward_hook(torch.compiler.disable(self._note_outputs))  # type: ignore[no-untyped-call]
        self._invariants = invariants = Invariants(
            self._strategy, parts, trained, settings=self._settings,
            is_replicated=self._strategy.world_size > 1 and not fingerprint.is_split,
        )  # fmt: skip
        self._begin(parts)

        def take(*args: Any) -> Any:
            self.phase.step = parts.progress.step + 1
            with self.timed("data"):
                return hooks.get_batch_samples(*args)

        def train(model: Any, batch: Any, num_items: Any) -> Any:
            seconds_before = seconds["backward"]
            with self.timed("forward"):
                loss = hooks.training_step(model, batch, num_items)
            seconds["forward"] -= seconds["backward"] - seconds_before
            micro_step = {"batch": batch, "loss": loss, "items": num_items, "samples": feed.next_samples()}
            if sample_losses is not None and self._outputs is not None:
                on_device = self._strategy.to_device(batch)
                losses = sample_losses(self._outputs, on_device)
                micro_step["sample_losses"] = _checked_losses(losses, micro_step["samples"])
                self._outputs = None
            self._micro_steps.append(micro_step)
            return loss

        def step() -> bool:
            invariants.take_snapshot()
            with self.timed("step"):
                is_updated = bool(stepper.step())
            prints = fingerprint.of(parts.progress.step) if trained else None
            self._update = {"prints": prints, "skipped": not is_updated}
            return is_updated

        timed_hooks = {name: self.timed(name)(getattr(hooks, name)) for name in ("evaluate", "save")}
        feed_hooks = {"get_batch_samples": take, "make_feed": partial(feed.replace_dataset, hooks)}
        wrapped = replace(hooks, training_step=train, **feed_hooks, **timed_hooks)
        return replace(parts, feed=feed, hooks=wrapped, stepper=replace(stepper, step=step))

    def _begin(self, parts: Any) -> None:
        """Note the session, and where the process stands from now on; batches of steps left behind go."""
        with quiet(self._folder):
            for path in self._folder.glob(f"spikes/step*-{self._ledger.name}.pt"):
                if int(path.name[4:12]) > parts.progress.step:
                    path.unlink()
        self._lines.append(
            {
                "begin": parts.progress.step,
                "at": round(time.time(), 3),
                "rank": self._strategy.rank,
                "world_size": self._strategy.world_size,
                "strategy": self._strategy.name,
                "precision": self.precision,
                "data": _describe_data(parts.dataset),
                "environment": _describe_environment(parts.device),
                "command": sys.orig_argv,
                "folder": STARTED_IN,
                "training": next(_TRAINING_NUMBERS),
                "fingerprint": {"parts": self._fingerprints.num_parts, "is_split": self._fingerprints.is_split},
            }
        )
        self._write()
        with quiet(self._folder):
            timeout_s = self._settings.hang_timeout_s
            self._stacks = StackDumps(self._folder, self._strategy, self.phase, timeout_s=timeout_s)

    def _note_outputs(self, module: Any, inputs: Any, outputs: Any) -> None:
        self._outputs = outputs

    def end_step(self, step: int) -> None:
        """Keep what this step was made of, and write down the one before."""
        losses, previous = self._parts.losses, self._pending
        micro_steps, self._micro_steps = self._micro_steps, []
        self._pending = {
            "step": step,
            "epoch": self._feed.epoch,
            "batches": [micro_step.pop("batch") for micro_step in micro_steps],
            "samples": [micro_step.pop("samples") for micro_step in micro_steps],
            # On their way to the host: when the next step ends, they have long arrived.
            "read": to_host({"micro_steps": micro_steps, "norm": losses.grad_norm, "prints": self._update["prints"]}),
            "rate": losses.learning_rate,
            "ms": dict(self.seconds),
            "skipped": self._update["skipped"],
        }
        if self._stacks is not None:
            self._stacks.rearm()
        self.seconds.update(dict.fromkeys(self.seconds, 0.0))
        if previous is not None:
            self._add_line(previous)
        if step % self._settings.flush_every == 0:
            try:
                self._invariants.check(self._unchecked)
            finally:
                self._unchecked = []
                self._write()

    def finish(self, *, is_last: bool = False) -> None:
        if self._pending is not None:
            entry, self._pending = self._pending, None
            self._add_line(entry)
        self._write()
        self._ledger.send(is_last=is_last)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._stacks is not None:
            self._stacks.close()
        self.finish(is_last=True)

    def _add_line(self, entry: dict[str, Any]) -> None:
        """Write down a step whose numbers have reached the host by now; keep its batches if it stands out."""
        values = entry["read"]()
        micro_steps = values["micro_steps"]
        line = {
            "step": entry["step"],
            "epoch": entry["epoch"],
            "samples": entry["samples"],
            "losses": [float(micro_step["loss"]) for micro_step in micro_steps],
            "items": _to_float(micro_steps[-1]["items"]) if micro_steps else None,
            "norm": _to_float(values["norm"]),
            "rate": _to_float(entry["rate"]),
            "skipped": entry["skipped"],
            "ms": {name: round(1e3 * value, 3) for name, value in entry["ms"].items()},
            **dict.fromkeys(_FINGERPRINTS),
        }
        if values["prints"] is not None:
            texts = (self._fingerprints.text_of(entry["step"] - 1, number) for number in values["prints"].tolist())
            line |= dict(zip(_FINGERPRINTS, texts, strict=False))
        sample_losses = [micro_step.get("sample_losses") for micro_step in micro_steps]
        if any(losses is not None for losses in sample_losses):
            line["sample_losses"] = [None if losses is None else losses.float().tolist() for losses in sample_losses]
        if self._recent_steps.add(total_loss(line), line["norm"]):
            self._store_spike(line["step"], entry["batches"])
        self._lines.append(line)
        self._unchecked.append(line)

    def _store_spike(self, step: int, batches: list[Any]) -> None:
        """Store the batches of a spike; the oldest ones go."""
        folder = self._folder / "spikes"
        batches = list(map(_host_tensors, batches))
        with quiet(self._folder):
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(batches, folder / f"step{step:08d}-{self._ledger.name}.pt")
            for path in sorted(folder.glob(f"step*-{self._ledger.name}.pt"))[:-_MAX_SPIKES]:
                path.unlink()

    def _write(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            self._ledger.append(lines)


def _checked_losses(losses: torch.Tensor, samples: list[Any] | None) -> torch.Tensor:
    """Return what `sample_losses` returned; raise unless it is a tensor of one loss for each sample."""
    if not hasattr(losses, "shape") or len(losses.shape) != 1 or len(losses) != len(samples or losses):
        raise ConfigError(
            f"Cannot log what FlightLog's sample_losses returned ({getattr(losses, 'shape', losses)}):",
            "it must be a tensor of one loss for each sample.",
            "Compute it with reduction='none', and take the mean of each sample, not of the batch.",
        )
    return losses.detach()


def _host_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by their names, or their places in a sequence."""
    entries = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch if isinstance(batch, (list, tuple)) else [batch]))
    )
    return {str(name): value.detach().cpu() for name, value in entries.items() if isinstance(value, torch.Tensor)}


def _to_float(value: Any) -> float | None:
    return None if value is None else float(value)


def make_flight(flight_log: bool | TrainerCallback, exclude_samples: Any) -> list[TrainerCallback]:
    """Return the callbacks of `Trainer(flight_log=, exclude_samples=)`."""
    callbacks: list[TrainerCallback] = [] if exclude_samples is None else [ExcludeSamples(exclude_samples)]
    if isinstance(flight_log, TrainerCallback):
        return [*callbacks, flight_log]
    return [*callbacks, FlightLog()] if flight_log else callbacks


def _describe_data(dataset: Any) -> dict[str, Any]:
    """Return what tells a dataset from another: its class, length, and the fingerprint of one of `datasets`."""
    dataset = whole_dataset(dataset)
    return {
        "dataset": type(dataset).__name__,
        "samples": len(dataset) if has_length(dataset) else None,
        "fingerprint": getattr(dataset, "_fingerprint", None),
    }


def _describe_environment(device: torch.device) -> dict[str, Any]:
    """Return what numbers may depend on besides versions: the device, the threads, variables of the environment."""
    return {
        "platform": platform.platform(),
        "device": device_name(device) if device.type == "cuda" else f"{device.type} ({device_name(device)})",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }
