"""The one public Trainer: the documented verbs, each a few lines that delegate."""

from hftrain.trainer.trainer import Trainer

__all__ = ["Trainer"]
