"""`Seq2SeqTrainingArguments`: the settings of generation besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrain.arguments.fields import setting
from hftrain.arguments.training import TrainingArguments


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """Hold every setting of a sequence-to-sequence run.

    Source: the documented `Seq2SeqTrainingArguments`.

    Example:
        >>> Seq2SeqTrainingArguments("working_dir", predict_with_generate=True).predict_with_generate
        True
    """

    sortish_sampler: bool = setting(False, "Put samples of similar length together, with some randomness.")
    predict_with_generate: bool = setting(False, "Evaluate and predict with the model's generate.")
    generation_max_length: int | None = setting(
        None, "Longest generated sequence; the model's max_length if not given."
    )
    generation_num_beams: int | None = setting(None, "Beams of the search; the model's num_beams if not given.")
    generation_config: str | Path | Any | None = setting(
        None, "A GenerationConfig, or where to load one from: a Hub name or a folder."
    )
