"""A full replica of the model in every process, with gradients averaged during the backward pass."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.base import MakeOptimizer, Placed
from hftrain.strategies.checks import check_trainable
from hftrain.strategies.distributed import DistributedStrategy
from hftrain.strategies.trainable_parameters import AveragedParameters

# Newer torch versions renamed the option and warn about the older name.
_BUFFERS_OPTION = "forward_sync_buffers"
if _BUFFERS_OPTION not in inspect.signature(DistributedDataParallel).parameters:
    _BUFFERS_OPTION = "broadcast_buffers"


class DDPStrategy(DistributedStrategy):
    """Train with torch's `DistributedDataParallel`.

    Args:
        use_cpu, backend, timeout_s, place_model: See `DistributedStrategy`.
        find_unused_parameters: Allow parameters without a gradient; traverses the graph in every micro-step.
        bucket_cap_mb: The size of one gradient bucket; None for torch's default.
        broadcast_buffers: Whether rank 0's buffers are sent before each forward pass; None for torch's default.
        static_graph: Assert that every micro-step runs the same operations.
        gradient_as_bucket_view: Avoid a second copy of the gradients, which must then not be detached in place.

    Units:
        bucket_cap_mb: mebibytes. timeout_s: seconds.

    Source: the documented `ddp_find_unused_parameters`, `ddp_bucket_cap_mb`, `ddp_broadcast_buffers`, `ddp_backend`
    and `ddp_timeout`.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        use_cpu: bool = False,
        backend: str | None = None,
        timeout_s: float = 1800,
        place_model: bool = True,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__(use_cpu=use_cpu, backend=backend, timeout_s=timeout_s, place_model=place_model)
        options = {
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
            _BUFFERS_OPTION: broadcast_buffers,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        self._options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def close(self) -> None:
        if self._owns_group:
            # A reducer that outlives its group destroys it during garbage collection while holding the GIL, and waits
            # for the group's thread, which may wait for the GIL. A wrapper without a group cannot train any more.
            for wrapper in self._wrappers:
                vars(wrapper).update(reducer=None, logger=None, process_group=None)
        super().close()

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Place and wrap a model and create its optimizer. Collective; mutates the model.

        Every rank gets rank 0's parameters before the optimizer is created.

        Raises:
            ConfigError: The ranks have different models, or no parameter requires a gradient.
        """
        if make_optimizer is None or isinstance(model, DistributedDataParallel):
            wrapper, optimizer = super().setup(model, make_optimizer, policy)
            if isinstance(wrapper, DistributedDataParallel):
                self._follow(wrapper)
            return wrapper, optimizer
        self._check_same(model)
        check_trainable(model, name=self.name)
        device_ids = [self.device.index] if self.place_model and self.device_type != "cpu" else None
        wrapper = DistributedDataParallel(self.place(model), device_ids=device_ids, **self._options)
        self._follow(wrapper)
        return wrapper, make_optimizer(self.unwrap(wrapper))

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the unwrapped model with rank 0's buffers, which a checkpoint would hold, on every rank.

        The replicas' running statistics differ between two forward passes. Collective; mutates the buffers.
        """
        module = self.unwrap(model)
        if module is not model:
            self._share_buffers(module)
        return module

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with model.no_sync():  # type: ignore[operator]
            yield
        if self.follower is not None:
            self.follower.forget_passes()

    def _follow(self, wrapped: DistributedDataParallel) -> None:
        self._wrappers.add(wrapped)
        follower = AveragedParameters.attach(wrapped, self)
        self.follower = follower if self.world_size > 1 else None
