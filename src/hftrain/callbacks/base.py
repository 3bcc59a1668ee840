"""What callbacks define: methods named after the loop's events, further points of a run, and state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hftrain.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from typing_extensions import Self

CallbackResult: TypeAlias = TrainerControl | Mapping[str, bool] | None
# The `logs` or `metrics` of an event.
Metrics: TypeAlias = Mapping[str, Any] | None


class TrainerCallback:
    """Base class of callbacks: override the methods of the events you need. Other methods are never called.

    Each method receives the arguments, the state and the control object, and the keyword arguments `model`,
    `processing_class` (also as `tokenizer`), `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`.
    Some events also pass `logs` or `metrics`. To request an action, set flags of the control or return them: a control
    object, a mapping such as ``{"should_training_stop": True}``, or None for no change. `hftrain.core.events` documents
    the order of events. Beside the events, a callback may define methods of `Guest`: they change the loader, the calls
    of a step or the loop, give evaluations other weights, or keep objects in checkpoints.

    Source: the documented `TrainerCallback`.

    Example:
        >>> class StopAfter(TrainerCallback):
        ...     def on_step_end(self, args, state, control, **kwargs):
        ...         return {"should_training_stop": state.global_step >= 10}
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called at the end of the Trainer's constructor."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called when training begins; after a resume, `state` is the restored one."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called when training ends without an error."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called at the beginning of an epoch."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called at the end of an epoch."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called at the beginning of an optimizer step, before its first micro-batch."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> CallbackResult:
        """Called after gradient clipping, before the optimizer step."""

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> CallbackResult:
        """Called after the optimizer step, before the gradients are zeroed."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called after each micro-batch except the last one of an optimizer step."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called at the end of an optimizer step."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called after an evaluation with its `metrics`, before `state.best_metric` is updated."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called after a prediction with its `metrics`."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called after a checkpoint is saved."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called after `logs` are recorded."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> CallbackResult:
        """Called after each batch of an evaluation or prediction."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Called when a push to the Hub begins, before the model card is written."""


class ExportableState:
    """Mixin for callbacks whose state is saved in checkpoints.

    Source: the documented `ExportableState`.
    """

    def state(self) -> dict[str, Any]:
        """Return ``{"args": constructor arguments, "attributes": other attributes}`` as plain JSON data.

        Either may be left out.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `state()` to be kept in checkpoints.")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Build the callback that returned `state`."""
        restored = cls(**state.get("args", {}))
        for name, value in state.get("attributes", {}).items():
            setattr(restored, name, value)
        return restored


class Guest(Protocol):
    """What a `TrainerCallback` may define in addition to its events; each method is optional.

    Callbacks are asked in the order of `Trainer.callback_handler.callbacks`, each with what the one before it returned.
    The points are in the order of a run. Where no callback defines a point, a run is as if there were none.
    """

    def check_settings(self, args: Any) -> None:
        """Raise if the callback does not suit the arguments; called before a training launches anything."""

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
