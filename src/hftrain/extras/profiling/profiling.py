"""Where the time of a training goes: a table at its end, or a trace of torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import ConfigError

_HOOKS = {"get_batch_samples": "data", "training_step": "forward", "log": "log", "evaluate": "evaluate", "save": "save"}
_CALLS = ("backward", "clip", "step")


class _Profiler(TrainerCallback):
    """Run the parts of a step inside of named spans."""

    _strategy: Any = None

    def span(self, name: str) -> Any:
        """Return the context of a part, which is a decorator, too."""
        raise NotImplementedError

    def wrap_stepper(self, stepper: Any, *, strategy: Any, **_: Any) -> Any:
        self._strategy = strategy
        strategy.to_device = self.span("transfer")(strategy.to_device)
        return replace(stepper, **{name: self.span(name)(getattr(stepper, name)) for name in _CALLS})

    def wrap_parts(self, parts: Any) -> Any:
        hooks = {hook: self.span(name)(getattr(parts.hooks, hook)) for hook, name in _HOOKS.items()}
        return replace(parts, hooks=replace(parts.hooks, **hooks))

    def close_run(self) -> None:
        if self._strategy is not None:
            vars(self._strategy).pop("to_device", None)


class SimpleProfiler(_Profiler):
    """Measure the parts of all steps, and print a table at the end of the training; ``Trainer(profiler="simple")``.

    Times do not overlap: a part that runs inside another is subtracted from it. On a GPU each part waits for the
    device, so the training is slower than without.

    Attributes:
        seconds: The time of each part in this process; ``"other"`` is the loop and the callbacks.
        counts: How often each part ran.
    """

    def wrap_parts(self, parts: Any) -> Any:
        """Start the clock, and put spans around what the loop calls."""
        self.seconds: dict[str, float] = {"other": 0.0}
        self.counts: dict[str, int] = {"other": 1}
        self._open_spans, self._last_s = ["other"], time.perf_counter()
        self._synchronizes = parts.device.type != "cpu"
        return super().wrap_parts(parts)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if not hasattr(self, "_open_spans"):  # the training is not ready yet
            yield
            return
        self._charge_to(self._open_spans[-1])
        self._open_spans.append(name)
        self.counts[name] = self.counts.get(name, 0) + 1
        try:
            yield
        finally:
            self._charge_to(self._open_spans.pop())

    def _charge_to(self, name: str) -> None:
        if self._synchronizes:
            torch.accelerator.synchronize()
        now_s = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._charge_to("other")
        if state.is_world_process_zero:
            print(self.table(), flush=True)

    def table(self) -> str:
        """Return the parts as text, the longest first."""
        total = sum(self.seconds.values())
        lines = [f"{'part':<10}{'calls':>9}{'seconds':>11}{'ms/call':>11}{'share':>8}"]
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            mean_ms = 1e3 * seconds / self.counts[name]
            lines.append(f"{name:<10}{self.counts[name]:>9}{seconds:>11.3f}{mean_ms:>11.3f}{seconds / total:>8.1%}")
        return "\n".join([*lines, f"{'total':<19}{total:>11.3f}"])


class TorchProfiler(_Profiler):
    """Record a few steps with `torch.profiler`, with the parts of a step as ranges; ``Trainer(profiler="torch")``.

    Each process writes ``profile/rank<rank>.json.gz`` into the output folder, which https://ui.perfetto.dev opens.

    Args:
        wait: Steps before the recording.
        warmup: Steps in which the profiler runs already, and which are left out.
        active: Steps to record.
        options: Arguments of `torch.profiler.profile`, such as `profile_memory=True`.

    Attributes:
        path: The file.
    """

    def __init__(self, *, wait: int = 5, warmup: int = 1, active: int = 3, **options: Any) -> None:
        if min(wait, warmup, active - 1) < 0:
            raise ConfigError(
                f"Cannot use TorchProfiler(wait={wait}, warmup={warmup}, active={active}).",
                "They count steps, of which at least one is recorded.",
                "Correct them.",
            )
        self.wait, self.warmup, self.active, self.options = wait, warmup, active, options
        self.path: Path | None = None
        self._profile: Any = None

    def span(self, name: str) -> Any:
        return torch.profiler.record_function(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.path = Path(args.output_dir) / "profile" / f"rank{args.process_index}.json.gz"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        times = torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1)
        self._profile = torch.profiler.profile(schedule=times, on_trace_ready=self._write, **self.options)
        self._profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profile is not None:
            self._profile.step()

    def close_run(self) -> None:
        """Stop the profiler; a shorter training is recorded up to its end."""
        super().close_run()
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, profile: Any) -> None:
        profile.export_chrome_trace(str(self.path))


def make_profiler(profiler: str | TrainerCallback | None) -> list[TrainerCallback]:
    """Return the callback of `Trainer(profiler=)`, in a list that is empty for None."""
    kinds = {"simple": SimpleProfiler, "torch": TorchProfiler}
    if isinstance(profiler, str) and profiler not in kinds:
        raise ConfigError(
            f"Cannot use Trainer(profiler={profiler!r}).",
            "There is no profiler of this name.",
            "Use 'simple' or 'torch', or pass TorchProfiler(active=10).",
        )
    return [] if profiler is None else [kinds[profiler]() if isinstance(profiler, str) else profiler]
