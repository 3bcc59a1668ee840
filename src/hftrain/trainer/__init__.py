"""The public Trainer: thin documented methods that delegate."""

from hftrain.trainer.trainer import Trainer

__all__ = ["Trainer"]
