"""Parameters, gradients and optimizer state sharded over processes, with torch's composable `fully_shard`."""

from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.fsdp.wrapper import FSDP1Strategy

__all__ = ["FSDP1Strategy", "FSDPStrategy"]
