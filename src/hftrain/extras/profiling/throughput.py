"""Samples, tokens and floating-point operations a second in the logs, and parameters by depth."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.devices import device_name
from hftrain.core.log import warn_once
from hftrain.core.tree import batch_size_of, tensors_of

# Dense bfloat16 (of the oldest float16) operations a second, in 1e12, from the data sheets; the first match counts.
_PEAKS = {
    **{"B200": 2250, "B100": 1750, "H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312},
    **{"A40": 150, "A30": 165, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "V100": 125, "T4": 65, "MI300X": 1307},
}


class Throughput(TrainerCallback):
    """Add ``samples_per_second``, ``tokens_per_second``, ``flops_per_second`` and ``mfu`` to the training logs.

    They are sums over all processes since the last log, without the time of evaluations and saves; samples that several
    processes read count once. Tokens, padding included, are logged if batches have ``input_ids``. Operations are those
    of the model's own `floating_point_ops` if it has one; else torch counts forward and backward pass of the first
    micro-batch of each shape, recomputation included, and that micro-batch is left out of the speed. Custom kernels
    count nothing. `mfu` is their share of what the devices can do in bfloat16.

    Args:
        peak_flops: Operations a second of one device; None knows NVIDIA's and AMD's common ones by name.
    """

    def __init__(self, *, peak_flops: float | None = None) -> None:
        self.peak_flops = peak_flops

    def wrap_stepper(self, stepper: Any, *, model: nn.Module, strategy: Any, **_: Any) -> Any:
        """Note the strategy, and the model's own count."""
        self._strategy, self._model_flops = strategy, getattr(model, "floating_point_ops", None)
        return stepper

    def wrap_parts(self, parts: Any) -> Any:
        """Count what the steps do, and add the speed to what is logged."""
        self._counts, self._flops = [0, 0, 0], {}  # type: ignore[var-annotated]
        self._since_s = time.perf_counter()
        hooks, train_step = parts.hooks, parts.hooks.training_step

        def training_step(model: Any, batch: Any, num_items: Any) -> Any:
            shapes = str([tensor.shape for tensor in tensors_of(batch)])
            if not callable(self._model_flops) and shapes not in self._flops:
                with self._paused(), FlopCounterMode(display=False) as counter:
                    loss = train_step(model, batch, num_items)
                self._flops[shapes] = counter.get_total_flops()
                return loss
            tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
            flops = self._model_flops(batch) if callable(self._model_flops) else self._flops[shapes]
            counts = (batch_size_of(batch) or 0, 0 if tokens is None else tokens.numel(), flops)
            self._counts = [count + more for count, more in zip(self._counts, counts, strict=True)]
            return train_step(model, batch, num_items)

        def log(logs: dict[str, Any]) -> None:
            hooks.log({**logs, **self._speed(parts.device)})

        paused_hooks = {"evaluate": self._paused()(hooks.evaluate), "save": self._paused()(hooks.save)}
        return replace(parts, hooks=replace(hooks, training_step=training_step, log=log, **paused_hooks))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._since_s += time.perf_counter() - start_s

    def _speed(self, device: torch.device) -> dict[str, float]:
        """Return the speed of all processes since the last log. Collective."""
        now_s = time.perf_counter()
        report = {"counts": self._counts, "is_copy": bool(self._strategy.data.copy), "seconds": now_s - self._since_s}
        ranks = self._strategy.gather_object(report)
        self._counts, self._since_s = [0, 0, 0], now_s
        # Ranks that read the same samples count them once.
        distinct = [rank["counts"] for rank in ranks if not rank["is_copy"]]
        samples, tokens, flops = (sum(counts_of_rank[index] for counts_of_rank in distinct) for index in range(3))
        if not callable(self._model_flops):  # torch counts what each process does, a model what its batch needs
            flops = sum(rank["counts"][2] for rank in ranks)
        seconds = max(rank["seconds"] for rank in ranks)
        counts = {"samples_per_second": samples, "tokens_per_second": tokens, "flops_per_second": flops}
        speeds = {name: count / seconds for name, count in counts.items() if count}
        peak = self.peak_flops or known_peak(device_name(device))
        if peak and flops:
            speeds["mfu"] = flops / seconds / peak / len(ranks)
            if speeds["mfu"] > 1:
                warn_once(f"The devices did more than peak_flops={peak:.3g} a second: mfu is left out. Correct it.")
                del speeds["mfu"]
        return speeds


def known_peak(name: str) -> float | None:
    """Return the dense bfloat16 operations a second of a device.

    Example:
        >>> known_peak("NVIDIA L40S"), known_peak("a toaster")
        (362000000000000.0, None)
    """
    return next((1e12 * peak for device, peak in _PEAKS.items() if re.search(rf"\b{device}\b", name)), None)


def parameter_table(model: nn.Module, depth: int = 1) -> str:
    """Return the parameters of the modules down to a depth as a table.

    Example:
        >>> print(parameter_table(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))))
        module  kind        parameters  trained
                Sequential          58       58
        0       Linear              40       40
        2       Linear              18       18
    """
    rows = [("module", "kind", "parameters", "trained")]
    for name, module in model.named_modules():
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
        if sizes and (not name or name.count(".") < depth):
            counts = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
            rows.append((name, type(module).__name__, *(f"{count:,}" for count in counts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}" for row in rows
    )
