"""How long a run is."""

from __future__ import annotations

import random
from pathlib import Path

from support.tiny import make_arguments
from torch.utils.data import DataLoader

from hftrain.adapter.data import TrainPlan, train_plan


def count_steps(num_batches: int, accumulation: int, *, epochs: float, max_steps: int | None) -> tuple[int, int]:
    """Go through the epochs window by window; return the steps done and the epochs begun."""
    windows = len(range(0, num_batches, accumulation)) or 1
    wanted = epochs * windows if max_steps is None else max_steps
    steps = num_epochs = 0
    while steps < wanted:
        num_epochs += 1
        for _ in range(windows):
            steps += 1
            if steps >= wanted:
                break
    return steps, num_epochs


def test_plan_is_what_counting_gives(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    rng = random.Random(0)
    for _ in range(1500):
        num_examples, batch_size = rng.randint(1, 60), rng.randint(1, 9)
        arguments.gradient_accumulation_steps = accumulation = rng.randint(1, 6)
        # Quarters, which floating-point numbers hold exactly.
        epochs = rng.randint(1, 20) / 4
        max_steps = rng.randint(1, 50) if rng.random() < 0.5 else None
        arguments.num_train_epochs, arguments.max_steps = epochs, max_steps or -1
        num_batches = len(DataLoader(range(num_examples), batch_size, drop_last=rng.random() < 0.3))  # type: ignore[arg-type]
        total = batch_size * accumulation
        plan = train_plan(arguments, num_batches=num_batches, num_examples=num_examples, total_batch_size=total)
        steps, num_epochs = count_steps(num_batches, accumulation, epochs=epochs, max_steps=max_steps)
        assert plan == TrainPlan(
            max_steps=steps,
            num_epochs=num_epochs,
            steps_per_epoch=max(-(-num_batches // accumulation), 1),
            num_batches=num_batches,
            num_examples=num_examples,
            num_samples=total * steps if max_steps else int(num_examples * epochs),
            is_by_epochs=max_steps is None,
        )
