"""The public Trainer and its documented subclass: the documented methods, each a few lines that delegate."""

from hftrain.trainer.seq2seq import Seq2SeqTrainer
from hftrain.trainer.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
