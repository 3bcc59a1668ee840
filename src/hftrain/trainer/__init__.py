"""The public Trainer and its documented subclass: thin documented methods that delegate."""

from hftrain.trainer.seq2seq import Seq2SeqTrainer
from hftrain.trainer.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
