"""transformers' parser reads our arguments, also where a field takes more than one type."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from hftrain import HfArg, HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments  # noqa: E402

pytestmark = pytest.mark.interop

LINES: list[tuple[str, dict[str, Any]]] = [
    ("--do_train --learning_rate 2e-5 --per_device_train_batch_size 32",
     {"do_train": True, "learning_rate": 2e-5, "per_device_train_batch_size": 32}),
    ("--logging_steps 10 --eval-strategy steps --eval_steps 0.25 --save_strategy no --report_to none",
     {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "no", "report_to": "none"}),
    ("--log_level warning --log_on_each_node 0 --disable_tqdm yes",
     {"log_level": "warning", "log_on_each_node": False, "disable_tqdm": True}),
    ("--no_dataloader_pin_memory --remove_unused_columns False --logging-first-step",
     {"dataloader_pin_memory": False, "remove_unused_columns": False, "logging_first_step": True}),
    ("--optim adafactor --lr_scheduler_type cosine --warmup_steps 10 --max_steps 50",
     {"optim": "adafactor", "lr_scheduler_type": "cosine", "warmup_steps": 10, "max_steps": 50}),
    ("""--lr_scheduler_kwargs '{"num_cycles": 2}' --label_names a b --include_for_metrics inputs loss""",
     {"lr_scheduler_kwargs": {"num_cycles": 2}, "label_names": ["a", "b"], "include_for_metrics": ["inputs", "loss"]}),
    ("""--accelerator_config '{"split_batches": true}' --save_total_limit 2 --debug underflow_overflow""",
     {"accelerator_config": {"split_batches": True}, "save_total_limit": 2, "debug": "underflow_overflow"}),
    ("--push_to_hub --hub_strategy checkpoint --hub_private_repo true --neftune_noise_alpha 5",
     {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_private_repo": True, "neftune_noise_alpha": 5}),
    ("--num_train_epochs 10ep --warmup_steps 0.1dur", {"num_train_epochs": "10ep", "warmup_steps": "0.1dur"}),
    ("--logging_steps 500ba --save-steps 2h", {"logging_steps": 500, "save_steps": "2h"}),
    ("--auto_find_batch_size", {"auto_find_batch_size": True}),
    ("--auto_find_batch_size smaller_batch", {"auto_find_batch_size": "smaller_batch"}),
    ("--include_num_input_tokens_seen non_padding", {"include_num_input_tokens_seen": "non_padding"}),
    ("--optim galore_adamw --optim_target_modules attn mlp",
     {"optim": "galore_adamw", "optim_target_modules": ["attn", "mlp"]}),
    ("--report_to wandb tensorboard", {"report_to": ["wandb", "tensorboard"]}),
    ("--trackio_static_space_id name", {"trackio_static_space_id": "name"}),
    ("""--use_liger_kernel --liger_kernel_config '{"rope": true}'""",
     {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}),
]  # fmt: skip


def parse(line: str, kind: Any = TrainingArguments) -> Any:
    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses(shlex.split(line), look_for_args_file=False)
    return args


@pytest.mark.parametrize(("line", "settings"), LINES)
def test_text_becomes_the_field_type(line: str, settings: dict[str, Any]) -> None:
    assert parse(f"--output_dir out --use_cpu {line}") == TrainingArguments("out", use_cpu=True, **settings)


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments])
def test_help_shows_every_field(kind: Any) -> None:
    text = " ".join(HfArgumentParser(kind).format_help().split())
    assert "--learning_rate" in text
    assert "--learning-rate" in text
    assert "Old name of eval_strategy." in text


@dataclass
class Script:
    model: str = HfArg(default="tiny", aliases=["-m"], help="Which model.")


def test_own_options_and_files_are_read_beside_the_arguments(tmp_path: Path) -> None:
    parser = HfArgumentParser((Script, TrainingArguments))
    script, args, rest = parser.parse_args_into_dataclasses(
        ["-m", "big", "--seed", "7", "--own", "1"], return_remaining_strings=True, look_for_args_file=False
    )
    assert (script.model, args.seed, rest) == ("big", 7, ["--own", "1"])
    values = {"output_dir": "out", "learning_rate": 0.1, "eval_strategy": "epoch"}
    for name, text in (("args.json", json.dumps(values)), ("args.yaml", json.dumps(values))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    only = HfArgumentParser(TrainingArguments)
    expected = (TrainingArguments(**values),)
    assert only.parse_dict(values) == expected
    assert only.parse_json_file(str(tmp_path / "args.json")) == expected
    assert only.parse_yaml_file(str(tmp_path / "args.yaml")) == expected
    with pytest.raises(ValueError, match="lr"):
        only.parse_dict({**values, "lr": 1})
    assert only.parse_dict({**values, "lr": 1}, allow_extra_keys=True) == expected


SCRIPT = """
from hftrain import HfArgumentParser, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
print(args.output_dir, args.seed, args.max_steps)
"""


def test_file_beside_the_script_is_found_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "train.args").write_text("--output_dir beside --seed 7 --max-steps 5", encoding="utf-8")
    command = [sys.executable, str(tmp_path / "train.py"), "--seed", "9"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["beside", "9", "5"]
