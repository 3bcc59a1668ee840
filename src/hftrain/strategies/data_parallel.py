"""Several GPUs in one process: the model is replicated to each GPU for every batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from hftrain.core.devices import find_device_type
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.launcher import read_launch
from hftrain.core.log import warn_once
from hftrain.core.tree import batch_size_of
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.base import MakeOptimizer, Placed, Strategy

_COUNT = "num_items_in_batch"


class Replicas(DataParallel):  # type: ignore[type-arg]
    """Scatter a batch to the replicas and join their outputs: rows in order, scalars as a weighted mean.

    A replica's weight in the mean is its share of the rows, so a batch that does not divide evenly has the same loss
    as on one device. An item count passed to the model is divided in the same way.
    """

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Return each replica's inputs and store its share of the rows."""
        count = kwargs.pop(_COUNT, None)
        inputs, kwargs = super().scatter(inputs, kwargs, device_ids)
        rows = [batch_size_of(kw) or batch_size_of(args) or 1 for args, kw in zip(inputs, kwargs, strict=True)]
        self._shares = [num / sum(rows) for num in rows]
        for kw, share, index in zip(kwargs, self._shares, device_ids, strict=False):
            if count is not None:
                items = count * share
                kw[_COUNT] = items.to(self.device_of(index)) if isinstance(items, torch.Tensor) else items
        return inputs, kwargs

    def device_of(self, index: int) -> torch.device:
        """Return the device of a replica."""
        return torch.device(self.src_device_obj.type, index)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """Call the replicas in threads, with this thread's autocast dtype."""
        # torch's threads inherit whether autocast is enabled but not its dtype: bfloat16 would become float16.
        kind = self.src_device_obj.type
        dtype = torch.get_autocast_dtype(kind)

        def call(replica: nn.Module, *positional: Any, **options: Any) -> Any:
            torch.set_autocast_dtype(kind, dtype)
            return replica(*positional, **options)

        return super().parallel_apply([partial(call, replica) for replica in replicas], inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Return the joined outputs of the replicas."""
        return join(outputs, self._shares, device=self.src_device_obj)


class DataParallelStrategy(Strategy):
    """Train with torch's `DataParallel`: one process, several GPUs. `"ddp"` is faster but needs a launcher.

    Args:
        use_cpu: Not supported: replicas need GPUs.
        place_model: Whether `setup` moves the model to the first device.
        device_ids: Indices of the CUDA devices; None uses all visible ones.

    Raises:
        ConfigError: A launcher started several processes, or the CUDA devices do not exist.

    Source: the documented use of several visible GPUs in one process.
    """

    name = "data_parallel"

    def __init__(
        self, *, use_cpu: bool = False, place_model: bool = True, device_ids: Sequence[int] | None = None
    ) -> None:
        kind, num_seen = find_device_type(use_cpu=use_cpu), torch.cuda.device_count()
        self.device_ids = list(range(num_seen) if device_ids is None else device_ids)
        self.num_devices = len(self.device_ids)
        reason = None
        if read_launch().world_size > 1:
            reason, remedy = "A launcher started several processes, each with its own device.", "Use 'ddp'."
        elif kind != "cuda" or not self.device_ids or not all(0 <= index < num_seen for index in self.device_ids):
            reason = f"It copies the model to CUDA devices, and torch sees {0 if kind != 'cuda' else num_seen} of them."
            remedy = "Use strategy='single', or make the devices visible (CUDA_VISIBLE_DEVICES)."
        if reason:
            title = "Cannot use strategy='data_parallel'."
            raise ConfigError(title, reason, remedy, device_ids=device_ids, use_cpu=use_cpu)
        super().__init__(torch.device("cuda", self.device_ids[0]), place_model=place_model)
        self._wrapper: Callable[[], nn.Module | None] = lambda: None
        if self.num_devices > 1:
            warn_once(
                f"One process trains on {self.num_devices} GPUs (strategy='data_parallel'), which copies the model for "
                f"every batch. One process for each is faster: `torchrun --nproc_per_node={self.num_devices} "
                "script.py`; CUDA_VISIBLE_DEVICES=0 keeps to one."
            )

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        return None if device_type == "cuda" else "DataParallel copies the model to several CUDA devices"

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        model, optimizer = super().setup(model, make_optimizer, policy)
        return (model if make_optimizer is None else self.wrap(model)), optimizer

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model wrapped in `Replicas`, or unchanged if it is already wrapped."""
        wrapped = model if isinstance(model, DataParallel) else Replicas(model, device_ids=self.device_ids)
        self._wrapper = weakref.ref(wrapped)
        return wrapped

    def called(self, model: nn.Module) -> nn.Module:
        """Return the wrapper: what is called of the model are copies."""
        return self._wrapper() or model

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the wrapped model, because an evaluation batch is sized for all devices together."""
        return self.wrap(model)


def join(parts: Sequence[Any], shares: Sequence[float], *, device: torch.device) -> Any:
    """Join the outputs of several replicas.

    Args:
        shares: Each replica's share of the batch; they sum to 1.

    Raises:
        StrategyError: The outputs hold an object that has no rows.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        tensors = [part.to(device) for part in parts]
        if first.dim():
            return torch.cat(tensors)
        return sum(part * share for part, share in zip(tensors, shares, strict=True))
    if isinstance(first, Mapping):
        outputs = {name: join([part[name] for part in parts], shares, device=device) for name in first}
        return type(first)(outputs)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)):
        fields = [join(list(column), shares, device=device) for column in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if all(part == first for part in parts):
        return first
    raise StrategyError(
        f"strategy='data_parallel' was to join what {len(parts)} copies of the model returned.",
        f"A {type(first).__name__} is among it, which has no rows to join.",
        "Return tensors (for transformers' models: use_cache=False), or use strategy='ddp'.",
    )
