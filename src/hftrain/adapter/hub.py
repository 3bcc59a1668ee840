"""Where a run is pushed, and which of its settings the model card tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hftrain.hub.uploads import HubConfig

_TOLD = (
    "learning_rate",
    "train_batch_size",
    "eval_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "label_smoothing_factor",
)


def hub_config(args: Any, *, output_dir: Path) -> HubConfig:
    """Return where a run is pushed; without `hub_model_id` the repository is named like the folder."""
    return HubConfig(
        output_dir=output_dir,
        model_id=args.hub_model_id or output_dir.resolve().name,
        strategy=str(args.hub_strategy),
        token=args.hub_token,
        private=args.hub_private_repo,
        always_push=bool(args.hub_always_push),
        revision=args.hub_revision,
    )


def told_hyperparameters(args: Any) -> dict[str, Any]:
    """Return the settings that a model card tells: those that are set, and how long training lasts."""
    told = {name: getattr(args, name) for name in _TOLD if getattr(args, name)}
    length = {"max_steps": args.max_steps} if args.max_steps > 0 else {"num_train_epochs": args.num_train_epochs}
    return {**told, **length}
