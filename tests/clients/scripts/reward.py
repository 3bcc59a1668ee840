"""TRL: RewardTrainer on a tiny Llama."""

from __future__ import annotations

from typing import Any

from scripts.preferences import fit, reward_model


def train(folder: str) -> tuple[Any, dict[str, Any]]:
    """Train on pairs of answers."""
    from trl import RewardConfig, RewardTrainer

    return fit(RewardTrainer, RewardConfig, folder, model=reward_model())
