"""DeepSpeed: its engine runs backward, clipping, scaling and the update; the config sets the ZeRO stage."""

from hftrain.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
