"""When and how a run saves, beyond the documented arguments."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError

OnFullDisk = Literal["warn", "prune", "stop"]
OnNonfinite = Literal["warn", "stop", "restore"]

_CHOICES = {"on_full_disk": get_args(OnFullDisk), "on_nonfinite": get_args(OnNonfinite)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """When and how a run saves, beyond `save_strategy` and related arguments.

    Args:
        save_async: Whether a save copies the state to host memory and writes it in the background while training
            continues. At most one write is in flight; its error is raised at a later step.
        on_signal: Whether SIGTERM and SIGINT end the run at the next step boundary with a checkpoint, and SIGUSR1 saves
            one and continues. Handlers that the program has set stay in place.
        grace_s: How long a run may make no progress after SIGTERM. Then, or at a second SIGTERM, `TrainingStopped`
            interrupts the step, and 5 s later the process exits. None waits forever. With the default, a run that
            hangs ends after 25 s; SLURM, Kubernetes and torchrun kill after 30 s. The time restarts whenever a batch
            is done or a checkpoint grows, and is at least 1.5 times the longest pause of the run so far.
        on_exception: Whether an error in training saves a checkpoint of the last complete step; only with one process.
            Each step then starts by copying what it changes before it updates the weights.
        every_s: Also save when this much time has passed since the last checkpoint.
        keep_best: How many checkpoints with the best metrics to keep, in addition to the newest; needs
            `metric_for_best_model`. Without `save_total_limit` no others are kept. None keeps the best one, as
            documented.
        on_full_disk: What to do if there is no space for a checkpoint: ``"warn"`` and continue without it, ``"prune"``
            older ones first, or ``"stop"`` the run with an error.
        on_nonfinite: What to do if, at a save, weights are NaN or infinite, or a loss since the last save was:
            ``"warn"``, save, and also keep the last finite checkpoint; ``"stop"`` the run with an error and save
            nothing; or ``"restore"`` weights and optimizer from the last finite checkpoint, and continue with the next
            batches.

    Units:
        every_s, grace_s: seconds.

    Raises:
        ConfigError: A value is not allowed.
    """

    save_async: bool = False
    on_signal: bool = True
    grace_s: float | None = 20.0
    on_exception: bool = False
    every_s: float | None = None
    keep_best: int | None = None
    on_full_disk: OnFullDisk = "warn"
    on_nonfinite: OnNonfinite = "warn"

    def __post_init__(self) -> None:
        is_wrong = {
            "every_s": self.every_s is not None and not (_is_number(self.every_s) and self.every_s > 0),
            "grace_s": self.grace_s is not None and not (_is_number(self.grace_s) and self.grace_s > 0),
            "keep_best": self.keep_best is not None and not (_is_number(self.keep_best, int) and self.keep_best > 0),
            **{name: getattr(self, name) not in choices for name, choices in _CHOICES.items()},
        }
        for name in (name for name, flag in is_wrong.items() if flag):
            raise ConfigError(
                f"Cannot use SavePolicy({name}={getattr(self, name)!r}).",
                "It has no such meaning.",
                f"Use one of {', '.join(_CHOICES[name])}."
                if name in _CHOICES
                else f"Give {name} a number above 0, or leave it out.",
            )


def saves_at_all(args: TrainingArguments, policy: SavePolicy) -> bool:
    """Tell whether a run writes checkpoints at any time."""
    return args.save_strategy != "no" or policy.every_s is not None or policy.on_exception


def _is_number(value: object, kind: type[Real] | type[int] = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
