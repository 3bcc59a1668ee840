"""TRL: DPOTrainer on a tiny Llama."""

from __future__ import annotations

from typing import Any

from scripts.preferences import fit


def train(folder: str) -> tuple[Any, dict[str, Any]]:
    """Train on pairs of answers."""
    from trl import DPOConfig, DPOTrainer

    return fit(DPOTrainer, DPOConfig, folder, gradient_accumulation_steps=2)
