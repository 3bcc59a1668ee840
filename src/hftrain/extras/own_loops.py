"""Loops of users: which features of a run they may not support, and whether a run uses one of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from hftrain.checkpoint.writer import SavePolicy
from hftrain.core.errors import ConfigError, TaskError, a_kind, check_known
from hftrain.core.signatures import check_overrides
from hftrain.core.types import Owns
from hftrain.loops.contract import Loop, loops
from hftrain.loops.evaluate import EvaluateLoop
from hftrain.loops.fit import FitLoop
from hftrain.precision.base import Precision
from hftrain.strategies.base import Strategy

# Features that a loop may not support, and what to do instead.
FEATURES = {
    "accelerator": "Do not use trainer.accelerator, or run one process.",
    "accumulation": "Set gradient_accumulation_steps=1.",
    "auto_find_batch_size": "Leave auto_find_batch_size out and set per_device_train_batch_size.",
    "batch_eval_metrics": "Set batch_eval_metrics=False.",
    "engines": "Use a strategy without an engine of its own, such as 'ddp' or 'fsdp'.",
    "loss_scaling": "Use precision='bf16' or '32'.",
    "ranks": "Run one process.",
    "reshaping": "Resume with the number of processes and the batch sizes of the checkpoint.",
    "resume": "Start a new run: leave resume_from_checkpoint out.",
    "saving": "Set save_strategy='no'.",
    "sharded_models": "Use a strategy that keeps the model whole, such as 'ddp'.",
    "signals": "Pass save_policy=SavePolicy(on_signal=False), without every_s.",
    "streams": "Pass a dataset that has a length and no override of its data loader.",
}

_BASES: dict[str, type[Loop[Any]]] = {"fit": FitLoop, "evaluate": EvaluateLoop, "predict": EvaluateLoop}


def used_in_training(
    args: Any, strategy: Strategy, precision: Precision, policy: SavePolicy, *, dataset: Any, resume: Any
) -> dict[str, str]:
    """Map each feature that a training uses, and that a loop may not support, to the setting that requests it.

    Args:
        dataset: The training dataset; None if the loader is overridden.
    """
    saves_by_clock = f"SavePolicy(every_s={policy.every_s})"
    has_length = dataset is not None and not isinstance(dataset, IterableDataset)
    accumulation = args.gradient_accumulation_steps
    uses = {
        **_uses_of_strategy(strategy),
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
    return {feature: text for feature, (is_used, text) in uses.items() if is_used}


def used_in_evaluation(
    args: Any, strategy: Strategy, *, dataset: Any, takes_turns: bool, is_per_batch: bool
) -> dict[str, str]:
    """Return the optional loop features that an evaluation uses, each with the setting that requests it.

    Args:
        takes_turns: Whether steps may communicate with other processes.
        is_per_batch: Whether metrics are computed batch by batch.
    """
    uses = {
        **_uses_of_strategy(strategy),
        "accelerator": (takes_turns, "trainer.accelerator, or a split model that generates,"),
        "batch_eval_metrics": (is_per_batch, f"batch_eval_metrics={args.batch_eval_metrics}"),
        "streams": (isinstance(dataset, IterableDataset), "a stream"),
    }
    return {feature: text for feature, (is_used, text) in uses.items() if is_used}


def _uses_of_strategy(strategy: Strategy) -> dict[str, tuple[bool, str]]:
    setting = f"strategy={strategy.name!r}"
    return {
        "engines": (bool(strategy.owns & (Owns.BACKWARD | Owns.STEP)), setting),
        "ranks": (strategy.world_size > 1, f"{strategy.world_size} processes"),
        "sharded_models": (strategy.shards_model, setting),
    }


def check_features(loop: Loop[Any], used: Mapping[str, str]) -> None:
    """Raise if a run uses features that its loop does not support."""
    for feature, reason in loop.unsupported.items():
        problem = f"Cannot read {type(loop).__name__}.unsupported:"
        check_known(feature, FEATURES, problem, f"there is no feature {feature!r}.")
        if feature in used:
            problem = f"Cannot use {used[feature]} with the loop {type(loop).__name__}:"
            raise ConfigError(problem, f"{reason.rstrip('.')}.", FEATURES[feature])


def create_loops(loop_choice: Any) -> dict[str, Loop[Any]]:
    """Return the chosen loops, by the stage that each runs.

    Args:
        chosen: A name, a class, an instance, or a sequence of those.

    Raises:
        ConfigError: A name is unknown, a class needs options, or two loops run the same stage.
        TaskError: A value is not a loop.
    """
    created: dict[str, Loop[Any]] = {}
    is_list = isinstance(loop_choice, Sequence) and not isinstance(loop_choice, str)
    for choice in loop_choice if is_list else [loop_choice]:
        loop = _create(choice)
        other = created.get(loop.stage)
        if other is not None:
            raise ConfigError(
                f"Cannot use {type(other).__name__} and {type(loop).__name__} in one Trainer:",
                f"both run the stage {loop.stage!r}.",
                "Pass one loop per stage.",
            )
        check_features(loop, {})
        created[loop.stage] = loop
    return created


def _create(choice: Any) -> Loop[Any]:
    kind = loops.resolve(choice)[0] if isinstance(choice, str) else choice
    loop: Any = loops.create(choice) if isinstance(choice, str) else kind() if isinstance(kind, type) else kind
    base = _BASES.get(getattr(loop, "stage", ""))
    if base is None or not isinstance(loop, base):
        raise TaskError(
            f"Cannot use {a_kind(loop)} as a loop:",
            "it is not a loop." if base is None else f"it runs the stage {loop.stage!r} but is not a {base.__name__}.",
            f"Derive it from {base.__name__}."
            if base
            else "Pass a loop or a list of loops; derive your own from FitLoop, EvaluateLoop or PredictLoop.",
        )
    check_overrides(type(loop), base)
    return loop
