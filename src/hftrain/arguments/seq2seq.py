"""`Seq2SeqTrainingArguments`: the settings of generation besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftrain.arguments.training import TrainingArguments


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """Hold every setting of a sequence-to-sequence run.

    Source: the documented `Seq2SeqTrainingArguments`.

    Example:
        >>> Seq2SeqTrainingArguments("working_dir", predict_with_generate=True).predict_with_generate
        True
    """

    sortish_sampler: bool = field(
        default=False, metadata={"help": "Put samples of similar length together, with some randomness."}
    )
    predict_with_generate: bool = field(
        default=False, metadata={"help": "Evaluate and predict with the model's generate."}
    )
    generation_max_length: int | None = field(
        default=None, metadata={"help": "Longest generated sequence; the model's max_length if not given."}
    )
    generation_num_beams: int | None = field(
        default=None, metadata={"help": "Beams of the search; the model's num_beams if not given."}
    )
    generation_config: str | Path | Any | None = field(
        default=None, metadata={"help": "A GenerationConfig, or where to load one from: a Hub name or a folder."}
    )
