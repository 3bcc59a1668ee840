"""What a callback is: methods named after the loop's events, and a way to keep its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

if TYPE_CHECKING:
    from typing_extensions import Self

CallbackResult: TypeAlias = TrainerControl | Mapping[str, bool] | None
# What an event reports: `logs` or `metrics`.
Metrics: TypeAlias = Mapping[str, Any] | None


class TrainerCallback:
    """Override the methods of the events to hear; the others are never called.

    Each method receives the arguments, the run's state and the control object, and as keywords `model`,
    `processing_class` (also as `tokenizer`), `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`, plus
    `logs` or `metrics` where the event has them. It asks for something by setting the control's flags, or by returning
    them: a control object, a mapping such as ``{"should_training_stop": True}``, or None for no change.
    The order of events is written down in `hftrain.core.events`.

    Source: the documented `TrainerCallback`.

    Example:
        >>> class StopAfter(TrainerCallback):
        ...     def on_step_end(self, args, state, control, **kwargs):
        ...         return {"should_training_stop": state.global_step >= 10}
    """

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that the Trainer is ready."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that training begins; after a resume, `state` is the restored one."""

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that training ended without an error."""

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that a pass over the data begins."""

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that a pass over the data ended."""

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that an optimizer step begins, before its first micro-batch."""

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> CallbackResult:
        """Hear that the gradients are clipped and the optimizer is about to use them."""

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> CallbackResult:
        """Hear that the optimizer has stepped; the gradients are still there."""

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that a micro-batch which is not the step's last one is done."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that an optimizer step is done."""

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear an evaluation's `metrics`; `state.best_metric` does not know them yet."""

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear a prediction's `metrics`."""

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that a checkpoint was saved."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear the `logs` just recorded."""

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> CallbackResult:
        """Hear that a batch of an evaluation or prediction is done."""

    def on_push_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> CallbackResult:
        """Hear that a push to the Hub begins, before the model card is written."""


class ExportableState:
    """Mix into a callback whose state belongs in checkpoints.

    Source: the documented `ExportableState`.
    """

    def state(self) -> dict[str, Any]:
        """Return ``{"args": constructor arguments, "attributes": what else to set}``, all of it plain JSON data."""
        raise NotImplementedError(f"{type(self).__name__} must define `state()` to be kept in checkpoints.")

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Build the callback that returned `state`."""
        restored = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(restored, name, value)
        return restored
