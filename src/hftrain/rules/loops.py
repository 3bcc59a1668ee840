"""Which features of a run a loop may not support."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.types import Owns
from hftrain.precision.base import Precision
from hftrain.strategies.base import Strategy


def used_in_training(
    args: Any, strategy: Strategy, precision: Precision, policy: SavePolicy, *, dataset: Any, resume: Any
) -> dict[str, str]:
    """Map each feature that a training uses, and that a loop may not support, to the setting that requests it.

    Args:
        policy: When the run saves, in addition to the arguments.
        dataset: The training dataset; None if the loader is overridden.
        resume: The checkpoint to resume from, if any.
    """
    saves_by_clock = f"SavePolicy(every_s={policy.every_s})"
    has_length = dataset is not None and not isinstance(dataset, IterableDataset)
    accumulation = args.gradient_accumulation_steps
    asked = {
        **_of_both(strategy),
        "accumulation": (accumulation > 1, f"gradient_accumulation_steps={accumulation}"),
        "auto_find_batch_size": (
            bool(args.auto_find_batch_size),
            f"{args.auto_find_batch_size=}".removeprefix("args."),
        ),
        "loss_scaling": (precision.policy.name == "fp16", "precision='fp16'"),
        "resume": (resume is not None, "resume_from_checkpoint"),
        "saving": (args.save_strategy != "no", f"save_strategy={str(args.save_strategy)!r}"),
        "signals": (
            policy.on_signal or policy.every_s is not None,
            "SavePolicy(on_signal=True), the default," if policy.on_signal else saves_by_clock,
        ),
        "streams": (not has_length, "a stream" if dataset is not None else "an overridden get_train_dataloader"),
    }
    return {feature: text for feature, (is_used, text) in asked.items() if is_used}


def used_in_evaluation(
    args: Any, strategy: Strategy, *, dataset: Any, takes_turns: bool, is_per_batch: bool
) -> dict[str, str]:
    """Return the optional loop features that an evaluation uses, each with the setting that requests it.

    Args:
        takes_turns: Whether steps may communicate with other processes.
        is_per_batch: Whether metrics are computed batch by batch.
    """
    asked = {
        **_of_both(strategy),
        "accelerator": (takes_turns, "trainer.accelerator, or a split model that generates,"),
        "batch_eval_metrics": (is_per_batch, f"batch_eval_metrics={args.batch_eval_metrics}"),
        "streams": (isinstance(dataset, IterableDataset), "a stream"),
    }
    return {feature: text for feature, (is_used, text) in asked.items() if is_used}


def _of_both(strategy: Strategy) -> dict[str, tuple[bool, str]]:
    named = f"strategy={strategy.name!r}"
    return {
        "engines": (bool(strategy.owns & (Owns.BACKWARD | Owns.STEP)), named),
        "ranks": (strategy.world_size > 1, f"{strategy.world_size} processes"),
        "sharded_models": (strategy.shards_model, named),
    }
