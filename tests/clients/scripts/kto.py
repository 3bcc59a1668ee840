"""TRL: KTOTrainer on a tiny Llama."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import sentences
from scripts.preferences import fit


def judged(count: int, *, seed: int) -> Dataset:
    """Return prompts with an answer each, good or bad."""
    return Dataset.from_dict(
        {
            "prompt": [text + " " for text in sentences(count, seed=seed)],
            "completion": sentences(count, seed=seed + 1),
            "label": [i % 2 == 0 for i in range(count)],
        }
    )


def train(folder: str) -> tuple[Any, dict[str, Any]]:
    """Train on single answers."""
    from trl import KTOConfig, KTOTrainer

    return fit(KTOTrainer, KTOConfig, folder, data=judged)
