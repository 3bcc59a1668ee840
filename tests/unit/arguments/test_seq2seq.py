from __future__ import annotations

import dataclasses

import pytest

from hftrain.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hftrain.core.errors import ConfigError

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


def test_rules_of_the_base_hold():
    assert Seq2SeqTrainingArguments("out", eval_strategy="steps").eval_steps == 500
    with pytest.raises(ConfigError, match="learning_rate"):
        Seq2SeqTrainingArguments("out", learning_rate=-1)


def test_setters_keep_the_type():
    args = Seq2SeqTrainingArguments("out", predict_with_generate=True).set_testing(batch_size=2)
    assert (type(args), args.predict_with_generate) == (Seq2SeqTrainingArguments, True)
