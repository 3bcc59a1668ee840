"""`Seq2SeqTrainingArguments`: `TrainingArguments` with settings for generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hftrain.arguments.fields import setting
from hftrain.arguments.training import TrainingArguments


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """All settings of a sequence-to-sequence run.

    Source: the documented `Seq2SeqTrainingArguments`.

    Example:
        >>> Seq2SeqTrainingArguments("working_dir", predict_with_generate=True).predict_with_generate
        True
    """

    sortish_sampler: bool = setting(False, "Put samples of similar length together, with some randomness.")
    predict_with_generate: bool = setting(False, "Evaluate and predict with the model's generate method.")
    generation_max_length: int | None = setting(
        None, "Maximum length of generated sequences. Defaults to the model's max_length."
    )
    generation_num_beams: int | None = setting(None, "Number of beams. Defaults to the model's num_beams.")
    generation_config: str | Path | Any | None = setting(
        None, "A GenerationConfig, or the Hub name or folder to load one from."
    )
