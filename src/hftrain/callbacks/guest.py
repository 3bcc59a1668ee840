"""The points beside the events at which a callback may change a run: what extras stand on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Guest(Protocol):
    """What a `TrainerCallback` may define in addition to its events; each method is optional.

    Callbacks are asked in the order of `Trainer.callback_handler.callbacks`, each with what the one before it returned.
    The points are in the order of a run. Where no callback defines a point, a run is as if there were none.
    """

    def wrap_loader(self, loader: Any) -> Any:
        """Return this process's loader of training batches, changed or not, each time one is made."""

    def wrap_stepper(
        self, stepper: Any, *, args: Any, model: Any, optimizer: Any, strategy: Any, precision: Any, **kwargs: Any
    ) -> Any:
        """Return the calls of a step, `backward`, `clip`, `step` and `zero_grad`, some of them replaced.

        Called once, when the optimizer exists: ``dataclasses.replace(stepper, clip=...)``. What is not usable with the
        strategy or the optimizer is refused here, before the first step.
        """

    def checkpoint_objects(self) -> Mapping[str, Any]:
        """Return the objects with `state_dict` and `load_state_dict` that a checkpoint holds, by name.

        Before a restored state is loaded into an object with `make_room`, that is called with the state.
        """

    def wrap_parts(self, parts: Any) -> Any:
        """Return the loop's `FitParts`, such as with other `hooks`, before the loop starts."""

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Give the model other weights for evaluations, predictions and `save_model`, but not for checkpoints."""

    def close_run(self) -> None:
        """Release what must not outlive a run; called when it is over, also after an error."""


def at_point(callbacks: Iterable[Any], name: str) -> list[Callable[..., Any]]:
    """Return the methods at a point of `Guest`, of the callbacks that define it."""
    return [method for each in callbacks if callable(method := getattr(each, name, None))]
