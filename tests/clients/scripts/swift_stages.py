"""ms-swift: its stages on a tiny Llama, with a file of data as its command line reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from scripts.parts import ARGUMENTS, SeedEachStep, llama, sentences

os.environ.update(USE_HF="1")


def write_rows(stage: str) -> None:
    """Write the rows of a stage."""
    rows = []
    for number, (a, b, c) in enumerate(zip(*(sentences(30, seed=seed) for seed in (1, 2, 3)), strict=True)):
        row: dict[str, Any] = {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        row |= {"dpo": {"rejected_response": c}, "kto": {"label": number % 2 == 0}}.get(stage, {})
        rows.append(row)
    for name, part in (("train", rows[:24]), ("test", rows[24:])):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)), encoding="utf-8")


def train(stage: str, folder: str, **settings: Any) -> dict[str, Any]:
    """Train one stage; evaluations are in the log history."""
    from swift.arguments import RLHFArguments, SftArguments
    from swift.callbacks import callbacks_map
    from swift.pipelines import rlhf_main, sft_main

    write_rows(stage)
    llama()
    callbacks_map["seed"] = lambda args, trainer: SeedEachStep()
    own = {name: value for name, value in ARGUMENTS.items() if name not in ("disable_tqdm", "use_cpu", "report_to")}
    given: dict[str, Any] = {
        **own,
        "model": "llama",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "dataset": ["train.jsonl"],
        "val_dataset": ["test.jsonl"],
        "max_length": 32,
        "output_dir": folder,
        "add_version": False,
        "create_checkpoint_symlink": False,
        "use_logits_to_keep": False,
        "report_to": ["none"],
        "bf16": False,
        "fp16": False,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "gradient_checkpointing": False,
        "callbacks": ["seed"],
        **settings,
    }
    if stage == "sft":
        sft_main(SftArguments(**given))
    else:
        rlhf_main(RLHFArguments(rlhf_type=stage, **given))
    return {}


def sft(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on instructions."""
    return train("sft", folder, **settings)


def sft_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on instructions."""
    return train("sft", folder, tuner_type="lora", lora_rank=4, **settings)


def epochs(folder: str, **settings: Any) -> dict[str, Any]:
    """Train for one of four epochs: `max_epochs` is read by the default callback that ms-swift replaces."""
    return train("sft", folder, **{"max_steps": -1, "num_train_epochs": 4, "max_epochs": 1, **settings})


def dpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs of answers."""
    return train("dpo", folder, **settings)


def kto(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on single answers."""
    return train("kto", folder, **settings)
