from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from hftrain import Seq2SeqTrainingArguments, TrainingArguments


@dataclass
class Nested:
    size: int = 2


class GenerationConfig:
    def to_dict(self) -> dict[str, object]:
        return {"max_length": 5, "torch_dtype": torch.float16}


@pytest.mark.parametrize("token", [None, "secret"])
def test_tokens_are_hidden_everywhere(token):
    args = TrainingArguments("out", hub_token=token)
    assert args.to_dict()["hub_token"] == (token and "<HUB_TOKEN>")
    assert args.to_dict()["push_to_hub_token"] is None
    for text in (args.to_json_string(), str(args), repr(args), str(args.to_sanitized_dict())):
        assert "secret" not in text


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments])
def test_arguments_can_be_made_of_their_values(kind):
    args = kind("out", learning_rate=3e-4, fsdp="full_shard", debug="underflow_overflow")
    assert kind(**args.to_dict()).to_dict() == args.to_dict()


def test_values_become_plain():
    args = Seq2SeqTrainingArguments(
        "out", fsdp="full_shard", debug="underflow_overflow", generation_config=GenerationConfig()
    )
    args.parallelism_config = Nested()
    plain = args.to_dict()
    assert type(plain["eval_strategy"]) is str
    assert [type(option) for option in plain["fsdp"]] == [str]
    assert plain["debug"] == ["underflow_overflow"]
    assert plain["generation_config"] == {"max_length": 5, "torch_dtype": "float16"}
    assert plain["parallelism_config"] == {"size": 2}
    assert json.loads(args.to_json_string())["lr_scheduler_type"] == "linear"


def test_sanitized_values_are_what_tensorboard_takes():
    flat = TrainingArguments("out", per_device_train_batch_size=3).to_sanitized_dict()
    assert {type(value) for value in flat.values()} <= {bool, int, float, str}
    assert (flat["train_batch_size"], flat["eval_batch_size"], flat["report_to"]) == (3, 8, "None")
