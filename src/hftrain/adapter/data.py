"""How data is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError, explain
from hftrain.data.loaders import LoaderConfig


def train_loader_config(args: Any, *, has_accelerator: bool) -> LoaderConfig:
    """Return how the training data is loaded; `has_accelerator` says whether pinning memory helps."""
    sharing = read_accelerator_config(args)
    return LoaderConfig(
        batch_size=args.train_batch_size,
        drop_last=args.dataloader_drop_last,
        split_batches=bool(sharing.get("split_batches", False)),
        even_batches=bool(sharing.get("even_batches", True)),
        use_seedable_sampler=bool(sharing.get("use_seedable_sampler", True)),
        seed=data_seed(args),
        **_worker_options(args, has_accelerator),
    )


def eval_loader_config(args: Any, *, has_accelerator: bool) -> LoaderConfig:
    """Return how evaluation and test data is loaded."""
    return LoaderConfig(
        batch_size=args.eval_batch_size,
        drop_last=args.dataloader_drop_last,
        seed=data_seed(args),
        **_worker_options(args, has_accelerator),
    )


def data_seed(args: Any) -> int:
    """Return the seed of samplers and workers: `data_seed`, else `seed`."""
    return int(args.seed if args.data_seed is None else args.data_seed)


def read_accelerator_config(args: Any) -> Mapping[str, Any]:
    """Return `accelerator_config` as a mapping, wherever it stands: a dict, a JSON file, or an object with fields.

    Raises:
        ConfigError: The file cannot be read.
    """
    config = args.accelerator_config
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, Path)):
        try:
            loaded = dict(json.loads(Path(config).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                explain(
                    f"accelerator_config={str(config)!r} was given.",
                    f"It cannot be read as a JSON file that holds settings: {error}",
                    "Give the path of a JSON file, or a dict.",
                )
            ) from error
        return loaded
    return dict(vars(config))


def _worker_options(args: Any, has_accelerator: bool) -> dict[str, Any]:
    return {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": bool(args.dataloader_pin_memory and has_accelerator),
        "persistent_workers": bool(args.dataloader_persistent_workers and args.dataloader_num_workers > 0),
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
