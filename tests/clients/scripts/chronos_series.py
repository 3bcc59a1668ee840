"""Chronos-2: `Chronos2Pipeline.fit`, whole and with LoRA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from scripts.parts import ARGUMENTS, SeedEachStep

# `fit` has arguments of its own for these.
OWN = ("max_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "learning_rate", "use_cpu")


def pipeline() -> Any:
    """Return a tiny Chronos-2."""
    from chronos.chronos2 import Chronos2CoreConfig, Chronos2Model, Chronos2Pipeline

    config = Chronos2CoreConfig(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        chronos_config={
            "context_length": 32,
            "output_patch_size": 4,
            "input_patch_size": 4,
            "input_patch_stride": 4,
            "quantiles": [0.1, 0.5, 0.9],
            "use_reg_token": True,
            "use_arcsinh": True,
            "max_output_patches": 2,
        },
    )
    torch.manual_seed(0)
    return Chronos2Pipeline(Chronos2Model(config))


def series(count: int, *, seed: int) -> list[torch.Tensor]:
    """Return made-up series of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(24 + 3 * i, generator=generator).cumsum(0) for i in range(count)]


def draw_apart() -> None:
    """Let the data draw from a generator of its own: hftrain does not let it draw from the training's, NumPy's."""
    import numpy
    from chronos.chronos2 import dataset

    dataset.np = SimpleNamespace(**{**vars(numpy), "random": numpy.random.RandomState(3)})


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on series; evaluate on others."""
    draw_apart()
    more = {name: value for name, value in ARGUMENTS.items() if name not in OWN}
    pipeline().fit(
        series(8, seed=1),
        prediction_length=4,
        validation_inputs=series(5, seed=2),
        output_dir=folder,
        num_steps=6,
        batch_size=4,
        learning_rate=1e-2,
        callbacks=[SeedEachStep()],
        **{**more, **settings},
    )
    return {}


def lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on series."""
    return train(folder, finetune_mode="lora", **settings)
