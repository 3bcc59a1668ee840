"""`hftrain average`: write the mean of the weights of several checkpoints, a model soup."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from hftrain.checkpoint.layout import MANIFEST, TRAINER_STATE, WEIGHTS
from hftrain.checkpoint.weights import read_weights
from hftrain.cli.answer import Answer
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.storage.tensors import save_tensors

_NO_MODEL = (MANIFEST, TRAINER_STATE)
_TOOLS = (".json", ".jinja", ".model", ".txt")


def show_average(checkpoints: Sequence[str], *, output: str) -> Answer:
    """Write the mean of the weights of checkpoints, or saved models, with the configuration of the last one.

    Raises:
        ConfigError: The output exists.
        CheckpointError: A folder has no weights, or they have other names or shapes.

    Source: Wortsman et al., Model soups, 2022.
    """
    folder, last = Path(output), Path(checkpoints[-1])
    if folder.exists():
        raise ConfigError(f"Cannot write the average to {output}:", "it exists.", "Name a new folder.")
    sums: dict[str, torch.Tensor] = {}
    for path in checkpoints:
        found = read_weights(Path(path))
        shapes = {name: value.shape for name, value in found.items()}
        if sums and shapes != {name: value.shape for name, value in sums.items()}:
            raise CheckpointError(
                f"Cannot average the weights of {path} with those of {checkpoints[0]}.",
                "They have other names or shapes.",
                "Name checkpoints of the same model.",
            )
        for name, value in found.items():
            # Counts and the like are those of the last one.
            sums[name] = sums.get(name, 0) + value.double() if value.is_floating_point() else value
    dtypes = {name: value.dtype for name, value in found.items()}
    folder.mkdir(parents=True)
    for each in last.iterdir():
        if each.suffix in _TOOLS and each.name not in _NO_MODEL and not each.name.endswith(".index.json"):
            shutil.copy2(each, folder / each.name)
    means = {
        name: (value / len(checkpoints) if dtypes[name].is_floating_point else value).to(dtypes[name])
        for name, value in sums.items()
    }
    save_tensors(means, folder / WEIGHTS)
    line = f"Wrote the mean of the weights of {len(checkpoints)} checkpoints to {folder}."
    return Answer([line], {"output": output, "checkpoints": list(checkpoints)})
