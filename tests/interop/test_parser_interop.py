"""The parser beside transformers' own: the same words give the same arguments."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

import hftrain

pytestmark = pytest.mark.interop

LINES = [
    "",
    "--do_train --do_eval --learning_rate 2e-5 --num_train_epochs 3 --per_device_train_batch_size 32",
    "--logging_steps 10 --eval-strategy steps --eval_steps 0.25 --save_strategy no --report_to none",
    "--log_level warning --log_level_replica error --log_on_each_node 0",
    "--no_dataloader_pin_memory --remove_unused_columns False --logging-first-step",
    "--optim adafactor --lr_scheduler_type cosine --warmup_steps 10 --max_steps 50 --weight_decay 0.1",
    """--lr_scheduler_kwargs '{"num_cycles": 2}' --label_names a b --include_for_metrics inputs loss""",
    """--accelerator_config '{"split_batches": true}' --ddp_timeout 60 --save_total_limit 2""",
    "--metric_for_best_model accuracy --greater_is_better True --eval_strategy epoch --save_strategy epoch "
    "--load_best_model_at_end",
    "--push_to_hub --hub_strategy checkpoint --hub_private_repo true --seed 3 --data_seed 4 --max_grad_norm 0.5",
    "--debug underflow_overflow --disable_tqdm yes --neftune_noise_alpha 5 --torch_empty_cache_steps 4",
]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Own:
    """Field types that both parsers know."""

    name: str
    rate: float = 0.1
    is_on: bool = True
    is_off: bool = False
    maybe: bool | None = None
    count: int | None = None
    names: list[str] = field(default_factory=lambda: ["a"])
    numbers: list[int] = field(default_factory=list)
    mode: Literal["fast", "slow", 3] = "fast"
    color: Color | str = "red"

    def __post_init__(self) -> None:
        self.color = Color(self.color)


def both(kind: Any, words: list[str]) -> tuple[Any, Any]:
    from transformers import HfArgumentParser

    ours = hftrain.HfArgumentParser(kind).parse_args_into_dataclasses(words, look_for_args_file=False)
    return ours, HfArgumentParser(kind).parse_args_into_dataclasses(words, look_for_args_file=False)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("owner", ["hftrain", "transformers"])
def test_arguments_equal_those_of_the_other_parser(owner: str, line: str, tmp_path: Path) -> None:
    import transformers

    kind = (hftrain if owner == "hftrain" else transformers).TrainingArguments
    words = ["--output_dir", str(tmp_path), "--use_cpu", *shlex.split(line)]
    (ours,), (theirs,) = both(kind, words)
    assert ours.to_dict() == theirs.to_dict()


@pytest.mark.parametrize(
    "line",
    [
        "--name x",
        "--name x --rate 3 --no_is_on --is_off --maybe no --count 4",
        "--name x --names b c --numbers 1 2 --mode 3 --color blue --is_on 0",
        "--name=x --is-off=t --is_on f --mode slow",
    ],
)
def test_own_dataclass_equals_that_of_the_other_parser(line: str) -> None:
    ours, theirs = both(Own, line.split())
    assert ours == theirs
    assert type(ours[0].mode) is type(theirs[0].mode)


def test_dict_equals_that_of_the_other_parser() -> None:
    from transformers import HfArgumentParser

    values = {"name": "x", "numbers": [1], "color": "blue", "extra": 1}
    ours = hftrain.HfArgumentParser(Own).parse_dict(values, allow_extra_keys=True)
    assert ours == HfArgumentParser(Own).parse_dict(values, allow_extra_keys=True)
    for parser in (hftrain.HfArgumentParser(Own), HfArgumentParser(Own)):
        with pytest.raises(ValueError, match="extra"):
            parser.parse_dict(values)


@pytest.mark.parametrize("kind", [hftrain.TrainingArguments, hftrain.Seq2SeqTrainingArguments])
def test_transformers_parser_reads_our_arguments(kind: type[Any]) -> None:
    from transformers import HfArgumentParser

    words = shlex.split("--output_dir out --learning_rate 3e-4 --trackio_static_space_id name --optim sgd")
    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses(words)
    assert (args.learning_rate, args.trackio_static_space_id, args.optim) == (3e-4, "name", "sgd")
