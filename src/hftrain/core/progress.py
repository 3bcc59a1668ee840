"""Progress of a run, and the control flags of callbacks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from hftrain.core.errors import suggest
from hftrain.core.log import warn_once
from hftrain.core.state import TrainerState


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a run: counters saved in checkpoints and restored on resume.

    Units:
        step: optimizer updates done. epoch: passes begun before the current one.
        micro_steps_in_epoch: micro-batches of this rank used in the current pass.
        samples: samples trained on, all ranks together. tokens: input tokens trained on, all ranks together.
        offset_in_epoch: samples of the current pass before its first micro-batch, left over by a resume with another
        batch size if they do not fill a micro-batch. cut_epochs: passes that a callback ended early.
    """

    step: int = 0
    epoch: int = 0
    micro_steps_in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    offset_in_epoch: int = 0
    cut_epochs: int = 0

    @property
    def is_within_epoch(self) -> bool:
        """Whether part of the current pass is done."""
        return bool(self.micro_steps_in_epoch or self.offset_in_epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain integers."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Overwrite the counters; mutates the object."""
        for name, value in state.items():
            setattr(self, name, int(value))


def expects_save(progress: Progress, state: TrainerState, *, saves_always: bool = False) -> bool:
    """Return whether a checkpoint is planned for the end of a run's next step."""
    step = progress.step + 1
    return saves_always or not step % (state.save_steps or 1) or step >= state.max_steps


@dataclass
class TrainerControl:
    """Flags that callbacks set to request actions; the loop acts on them right after the event.

    Source: the documented `TrainerControl`.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def update(self, changes: dict[str, Any]) -> None:
        """Set the named flags; mutates the object. An unknown name raises `AttributeError`, and no flag is set."""
        for name in changes:
            if name not in self.__dict__:
                raise AttributeError(f"TrainerControl has no flag {name!r}; its flags are {sorted(self.__dict__)}.")
        for name, value in changes.items():
            setattr(self, name, bool(value))

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores, in the documented form."""
        return {"args": dict(self.__dict__), "attributes": {}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> TrainerControl:
        """Rebuild a control from its `state`."""
        return cls(**state["args"])


def check_flags(control: TrainerControl) -> None:
    """Warn once about a flag that was set but that nothing reads, such as a misspelt one."""
    if len(control.__dict__) > len(fields(TrainerControl)):
        names = {field.name for field in fields(TrainerControl)}
        for name in sorted(control.__dict__.keys() - names):
            if name.startswith("should_"):
                flag = name.replace("should_stop", "should_training_stop")
                warn_once(f"A callback set control.{name}, which nothing reads. {suggest(flag, names)}")


# Marks what each process has for itself: another number of processes resumes with the mean.
PER_RANK = {"is_per_rank": True}


@dataclass(kw_only=True, eq=False)
class WindowState:
    """What a logging window has summed up: a checkpoint holds these fields, of these types, and no others."""

    sum: torch.Tensor | None = field(default=None, metadata=PER_RANK)  # of the losses that are not pending
    pending: list[torch.Tensor] = field(default_factory=list, metadata=PER_RANK)
    num_finite: torch.Tensor | int = field(default=0, metadata=PER_RANK)  # of the losses in the sum
    num_nonfinite: int = 0  # of the losses of the run that were read
    num_micro_steps: int = 0  # since the last reading, like the next
    num_steps: int = 0
    run_total: float | int = 0.0  # of the losses that were read, in the steps that the next counts
    run_steps: int = 0
    grad_norm: torch.Tensor | float | int | None = None  # of the last step, like the next
    learning_rate: torch.Tensor | float | int | None = None
    rates: list[torch.Tensor | float | int] = field(default_factory=list)  # of all groups


class Counter:
    """A number that its owner counts up, and that others see."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0
