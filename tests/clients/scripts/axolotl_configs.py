"""axolotl: its configurations for a tiny Llama, as its command line reads and trains them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from scripts.parts import ARGUMENTS, SeedEachStep, llama, sentences

os.environ.update(AXOLOTL_DO_NOT_TRACK="1")


def train(folder: str, rows: list[dict[str, Any]], data: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Train one configuration; evaluations are in the log history."""
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets, load_preference_datasets
    from axolotl.train import setup_model_and_trainer
    from axolotl.utils.dict import DictDefault

    llama()
    for name, part in (("train", rows[:24]), ("test", rows[24:])):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
    shared = {name: ARGUMENTS[name] for name in ("max_steps", "logging_steps", "save_steps", "eval_steps", "seed")}
    config = {
        **shared,
        "base_model": "llama",
        "output_dir": folder,
        "dataset_prepared_path": "prepared",
        "datasets": [{"path": "train.jsonl", "ds_type": "json", "split": "train", **data}],
        "test_datasets": [{"path": "test.jsonl", "ds_type": "json", "split": "train", **data}],
        "sequence_len": 24,
        "micro_batch_size": 4,
        "num_epochs": 3,
        "learning_rate": 1e-2,
        "optimizer": "adamw_torch",
        "lr_scheduler": "linear",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "gradient_checkpointing": False,
        "dataset_num_proc": 0,
        "special_tokens": {"pad_token": "[PAD]"},
        **settings,
    }
    cfg = load_cfg(DictDefault(config))
    meta = (load_preference_datasets if cfg.rl else load_datasets)(cfg=cfg)
    trainer = setup_model_and_trainer(cfg, meta)[0]
    trainer.add_callback(SeedEachStep())
    trainer.train()
    return {}


def texts() -> list[dict[str, Any]]:
    """Return texts."""
    return [{"text": text} for text in sentences(33, seed=1)]


def completion(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on texts."""
    return train(folder, texts(), {"type": "completion"}, **settings)


def packing(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on packed texts."""
    more = {"sample_packing": True, "eval_sample_packing": False, "micro_batch_size": 1}
    return train(folder, texts(), {"type": "completion"}, **more, **settings)


def lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on instructions."""
    asked, answered = sentences(33, seed=1), sentences(33, seed=2)
    rows = [{"instruction": a, "input": "", "output": b} for a, b in zip(asked, answered, strict=True)]
    # Its kernels replace methods of the model's classes for the rest of the process.
    kernels = {f"lora_{name}_kernel": False for name in ("qkv", "o", "mlp")}
    more = {
        "adapter": "lora",
        "sequence_len": 96,
        **kernels,
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    return train(folder, rows, {"type": "alpaca"}, **more, **settings)


def preferences() -> list[dict[str, Any]]:
    """Return conversations with a better and a worse answer."""
    parts = zip(*(sentences(33, seed=seed) for seed in (1, 2, 3)), strict=True)

    def says(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    return [
        {"messages": [says("user", a)], "chosen": says("assistant", b), "rejected": says("assistant", c)}
        for a, b, c in parts
    ]


def dpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs of answers."""
    return train(folder, preferences(), {"type": "chat_template.default"}, rl="dpo", **settings)
