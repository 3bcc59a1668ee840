"""Base classes of callbacks: methods named after the loop's events, and state that is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

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
    the order of events. A callback that keeps state, such as an averaged model, may define `checkpoint_objects`, see
    `Trainer.checkpoint_objects`. One that defines ``close_run(self)`` has it called when a training is over, also after
    an error, which skips `on_train_end`. One that defines ``evaluation_weights(self)``, a context manager, has it
    entered around evaluations, predictions and `save_model`, but not around checkpoints. One that defines
    ``wrap_stepper(self, stepper, *, args, model, optimizer, strategy, precision, **kwargs)`` changes the calls of a
    step itself: it is called once when a training is built, and returns the `Stepper` with some of `backward`, `clip`,
    `step` and `zero_grad` replaced (`dataclasses.replace`). Without such a callback, a step is as if there were none.
    Before that, ``wrap_loader(self, loader)`` returns this process's loader of training batches, changed or not.
    Likewise ``wrap_parts(self, parts)`` returns the loop's `FitParts`, such as with other `hooks`, before it starts.

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
