"""LLaMA-Factory: its stages on a tiny Llama, with files of data as its command line reads them."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.parts import ARGUMENTS, SeedEachStep, llama, sentences


def write_data(stage: str) -> None:
    """Write the rows of a stage and what describes them."""
    columns = {"prompt": "instruction", "response": "output"}
    rows = [
        {"instruction": a, "output": b, "chosen": b, "rejected": c, "good": number % 2 == 0, "text": a}
        for number, (a, b, c) in enumerate(zip(*(sentences(30, seed=seed) for seed in (1, 2, 3)), strict=True))
    ]
    described: dict[str, Any] = {"file_name": "rows.json", "columns": columns}
    if stage == "pt":
        described["columns"] = {"prompt": "text"}
    elif stage == "kto":
        columns["kto_tag"] = "good"
    elif stage in ("dpo", "rm"):
        described |= {"ranking": True, "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}}
    Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
    Path("dataset_info.json").write_text(json.dumps({"rows": described}), encoding="utf-8")


def train(stage: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Train one stage; evaluations are in the log history."""
    # It wants torchaudio to read sound; the one on PyPI needs CUDA.
    sys.modules.setdefault("torchaudio", ModuleType("torchaudio")).__spec__ = importlib.machinery.ModuleSpec(
        "torchaudio", None
    )
    from llamafactory.train.tuner import run_exp

    write_data(stage)
    llama()
    run_exp(
        {
            **{name: value for name, value in ARGUMENTS.items() if name != "disable_tqdm"},
            "stage": stage,
            "do_train": True,
            "model_name_or_path": "llama",
            "finetuning_type": "full",
            "template": "default",
            "dataset_dir": ".",
            "dataset": "rows",
            "eval_dataset": "rows",
            "max_samples": 30,
            "cutoff_len": 24,
            "output_dir": folder,
            "preprocessing_num_workers": 1,
            "overwrite_cache": True,
            "bf16": False,
            **settings,
        },
        [SeedEachStep()],
    )
    return {}


def sft(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on instructions."""
    return train("sft", folder, **settings)


def sft_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on instructions."""
    return train("sft", folder, finetuning_type="lora", lora_rank=4, **settings)


def pt(folder: str, **settings: Any) -> dict[str, Any]:
    """Pre-train on texts."""
    return train("pt", folder, **settings)


def dpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs of answers."""
    return train("dpo", folder, **settings)


def kto(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on single answers."""
    return train("kto", folder, **settings)


def rm(folder: str, **settings: Any) -> dict[str, Any]:
    """Train a model of rewards."""
    return train("rm", folder, **settings)
