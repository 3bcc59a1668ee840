"""FSDP: parameters, gradients and optimizer state sharded over processes."""

from hftrain.strategies.fsdp.strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]
