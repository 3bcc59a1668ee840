"""FSDP: parameters, gradients and optimizer state sharded over processes."""

from typing import Any

from hftrain.strategies.checks import warn_of_wrapper
from hftrain.strategies.fsdp.strategy import FSDPStrategy

__all__ = ["FSDP1Strategy", "FSDPStrategy"]


class FSDP1Strategy(FSDPStrategy):
    """`FSDPStrategy` by the name of PyTorch's older wrapper, FSDP1, which is no longer supported; warns.

    Args:
        backward_prefetch: Without effect.
        limit_all_gathers: Without effect.
        **options: See `FSDPStrategy`.
    """

    def __init__(self, *, backward_prefetch: Any = None, limit_all_gathers: Any = None, **options: Any) -> None:
        given = {"backward_prefetch": backward_prefetch, "limit_all_gathers": limit_all_gathers}
        unused = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        warn_of_wrapper([type(self).__name__, *unused])
        super().__init__(**options)
