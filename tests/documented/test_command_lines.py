"""The documentation's command lines, read by the scripts' own dataclasses and ours."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from hftrain import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

pytestmark = pytest.mark.interop


@dataclass
class GlueArguments:
    """What the documented run_glue script takes besides."""

    model_name_or_path: str
    task_name: str | None = None
    max_seq_length: int = 128


@dataclass
class TranslationArguments:
    """What the documented run_translation script takes besides."""

    model_name_or_path: str
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    max_train_samples: int | None = None


GLUE = """--model_name_or_path google-bert/bert-base-cased --task_name mrpc --do_train --do_eval --max_seq_length 128
    --per_device_train_batch_size 16 --learning_rate 5e-5 --num_train_epochs 3 --output_dir out/mrpc/
    --overwrite_output_dir"""
TRANSLATION = """--model_name_or_path t5-small --per_device_train_batch_size 1 --output_dir output_dir
    --overwrite_output_dir --do_train --max_train_samples 500 --num_train_epochs 1 --dataset_name wmt16
    --dataset_config "ro-en" --source_lang en --target_lang ro --fp16 --sharded_ddp """


def parse(kinds: Any, line: str) -> tuple[Any, ...]:
    return HfArgumentParser(kinds).parse_args_into_dataclasses(shlex.split(line), look_for_args_file=False)


def training(line: str) -> TrainingArguments:
    (args,) = parse(TrainingArguments, f"--output_dir out {line}")
    assert isinstance(args, TrainingArguments)
    return args


def test_run_glue() -> None:
    script, args = parse((GlueArguments, TrainingArguments), GLUE)
    assert (script.task_name, script.max_seq_length) == ("mrpc", 128)
    expected = TrainingArguments(
        "out/mrpc/",
        do_train=True,
        do_eval=True,
        per_device_train_batch_size=16,
        learning_rate=5e-5,
        num_train_epochs=3,
        overwrite_output_dir=True,
    )
    assert args == expected


@pytest.mark.parametrize(
    ("value", "fsdp"),
    [
        ("simple", ["shard_grad_op"]),
        ("zero_dp_2", ["shard_grad_op"]),
        ("zero_dp_3", ["full_shard"]),
        ('"zero_dp_2 cpu_offload"', ["shard_grad_op", "offload"]),
        ("zero_dp_3 auto_wrap", ["full_shard", "auto_wrap"]),
    ],
)
def test_run_translation_with_fairscales_options(value: str, fsdp: list[str]) -> None:
    with pytest.warns(FutureWarning, match="sharded_ddp is deprecated"):
        script, args = parse((TranslationArguments, Seq2SeqTrainingArguments), TRANSLATION + value)
    assert (script.dataset_config_name, script.max_train_samples) == ("ro-en", 500)
    assert (args.fp16, args.fsdp) == (True, fsdp)


@pytest.mark.parametrize(
    ("line", "fsdp"),
    [
        ("--fsdp full_shard", ["full_shard"]),
        ("--fsdp shard_grad_op", ["shard_grad_op"]),
        ("--fsdp no_shard", ["no_shard"]),
        ("--fsdp hybrid_shard", ["hybrid_shard"]),
        ("--fsdp hybrid_shard_zero2", ["hybrid_shard_zero2"]),
        ('--fsdp "full_shard offload"', ["full_shard", "offload"]),
        ('--fsdp "shard_grad_op auto_wrap"', ["shard_grad_op", "auto_wrap"]),
        ('--fsdp "full_shard offload auto_wrap"', ["full_shard", "offload", "auto_wrap"]),
        ("--fsdp full_shard offload auto_wrap", ["full_shard", "offload", "auto_wrap"]),
        ('--fsdp "full shard"', ["full_shard"]),
        ("--fsdp ''", []),
    ],
)
def test_fsdp_variants(line: str, fsdp: list[str]) -> None:
    assert training(line).fsdp == fsdp


SCRIPT = """
import torch
from hftrain import HfArgumentParser, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
print(args.output_dir, torch.cuda.device_count(), args.n_gpu)
"""


def run_script(line: str, folder: Path) -> list[str]:
    env = {**os.environ, **dict(word.partition("=")[::2] for word in line.split())}
    command = [sys.executable, "-c", SCRIPT, "--output_dir", "out"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=folder).stdout.split()


def test_no_visible_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    if torch.backends.mps.is_available() or torch.xpu.is_available():
        pytest.skip("another accelerator is visible")
    assert run_script("CUDA_VISIBLE_DEVICES= CUDA_DEVICE_ORDER=PCI_BUS_ID", tmp_path) == ["out", "0", "0"]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "line",
    [
        "CUDA_VISIBLE_DEVICES=0",
        "CUDA_VISIBLE_DEVICES=0 CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_DEVICE_ORDER=FASTEST_FIRST",
    ],
)
def test_visible_gpus_are_the_named_ones(line: str, tmp_path: Path) -> None:
    assert run_script(line, tmp_path)[2] == "1"
