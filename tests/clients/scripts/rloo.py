"""TRL: RLOOTrainer on a tiny Llama."""

from __future__ import annotations

from typing import Any

from scripts.online import fit


def train(folder: str) -> tuple[Any, dict[str, Any]]:
    """Train on answers that the model generates."""
    from trl import RLOOConfig, RLOOTrainer

    return fit(RLOOTrainer, RLOOConfig, folder)
