from __future__ import annotations

import dataclasses

from hftrain import Seq2SeqTrainingArguments, TrainingArguments

OWN = {
    "sortish_sampler": False,
    "predict_with_generate": False,
    "generation_max_length": None,
    "generation_num_beams": None,
    "generation_config": None,
}


def test_it_adds_five_settings():
    base = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {f.name: f.default for f in dataclasses.fields(Seq2SeqTrainingArguments) if f.name not in base}
    assert own == OWN
