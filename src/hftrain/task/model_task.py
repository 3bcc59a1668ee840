"""A plain model as a task, by the documented rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, TaskError, suggest
from hftrain.core.tree import batch_size_of, detach, is_cache
from hftrain.core.types import StepOutput
from hftrain.task.introspect import (
    accepts_item_count,
    can_return_loss,
    find_label_names,
    is_causal,
    keys_to_ignore,
    takes_item_count,
    with_all_cache_names,
)
from hftrain.task.items import KINDS, LABELS, SAMPLES, SHIFTED, SUM, count_labels, counts_shifted_labels
from hftrain.task.loss import own_loss, read_loss, smoothed_loss
from hftrain.task.module import TaskModule, checked_count

LossFunction = Callable[..., torch.Tensor]
CountItems = Callable[[Any], int | torch.Tensor]


class ModelTask(TaskModule):
    """Task of a plain `nn.Module` that returns its loss first in a tuple or under ``"loss"`` in a mapping.

    Args:
        model: Takes the batch's columns as keyword arguments.
        label_names: Keys of the labels in a batch; None reads them from the signature of `forward`.
        label_smoothing: Share of the target spread over all classes; 0 leaves the loss to the model.
        compute_loss_func: ``f(outputs, labels, num_items_in_batch=...)`` in place of the model's own loss. If it does
            not take the count, it must return a mean.
        count_items: The items the loss averages over: ``"labels"``, ``"shifted_labels"``, ``"samples"``, ``"sum"``, or
            a function that counts a batch's items. None leaves it to be proved.

    Source: the documented `Trainer` (`model`, `compute_loss_func`, `label_names`, `label_smoothing_factor`).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label_names: Sequence[str] | None = None,
        label_smoothing: float = 0.0,
        compute_loss_func: LossFunction | None = None,
        count_items: str | CountItems | None = None,
    ) -> None:
        super().__init__(model)
        if isinstance(count_items, str) and count_items not in KINDS:
            raise ConfigError(
                f"Cannot use count_items={count_items!r}.",
                f"It is none of {', '.join(KINDS)}.",
                f"{suggest(count_items, KINDS)} A function that counts a batch's items will do as well.",
            )
        names = find_label_names(model) if label_names is None else label_names
        self.has_label_names = bool(names)
        self.label_names = list(names or ["labels"] if label_names is None else names)
        self._sample_names = ("labels", *self.label_names, getattr(model, "main_input_name", "input_ids"))
        self.label_smoothing = label_smoothing
        self.use_loss(compute_loss_func)
        self.can_return_loss = can_return_loss(model)
        self.accepts_item_count = accepts_item_count(model)
        self.is_causal = is_causal(model)
        self.count_rule = count_items
        self.keys_to_ignore = keys_to_ignore(model)

    def use_loss(self, function: LossFunction | None) -> None:
        """Use a function in place of the model's own loss, None for the model's; mutates the task."""
        self.compute_loss_func = function if callable(function) else None
        self.function_takes_count = self.compute_loss_func is not None and takes_item_count(self.compute_loss_func)

    def compute_loss(
        self, model: nn.Module, inputs: Any, num_items_in_batch: int | torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Run the model and return its loss and outputs.

        Args:
            model: The model to call; the wrapped one while training.
            inputs: The batch, on the device; not mutated.
            num_items_in_batch: Items of the whole step, for losses that divide by it.

        Returns:
            The loss, a 0-d tensor, and the model's outputs.

        Raises:
            TaskError: The outputs hold no loss.
        """
        key = self.label_key(inputs)
        labels: Any = None if key is None else inputs[key]
        if not self.label_smoothing and self.compute_loss_func is None:
            outputs = call_model(model, inputs, num_items_in_batch if self.gives_count else None)
            return read_loss(outputs, model_name=type(self.model).__name__, has_labels=key is not None), outputs
        if labels is None and self.compute_loss_func is None:
            raise TaskError(
                f"Cannot use label_smoothing_factor={self.label_smoothing}.",
                f"The batch holds no labels to smooth (looked for: labels, {', '.join(self.label_names)}).",
                "Name the one column of labels in label_names, or leave the smoothing out.",
            )
        # Models that derive decoder inputs from the labels need them.
        takes_labels = labels is None or self._builds_decoder_inputs(inputs)
        features = inputs if takes_labels else {name: value for name, value in inputs.items() if name != key}
        outputs = call_model(model, features, None)
        if self.compute_loss_func is not None:
            count = {"num_items_in_batch": num_items_in_batch} if self.function_takes_count else {}
            return self.compute_loss_func(outputs, labels, **count), outputs
        if isinstance(outputs, Mapping):
            logits = outputs["logits"]
        elif isinstance(outputs, torch.Tensor):
            logits = outputs
        else:
            logits = outputs[1 if takes_labels else 0]
        loss = smoothed_loss(logits, labels, smoothing=self.label_smoothing, shift=self.is_causal)
        return loss, outputs

    @property
    def smoothed_items(self) -> str:
        """The kind of items that the smoothed loss is a mean over."""
        return SHIFTED if self.is_causal else LABELS

    def training_step(self, batch: Any) -> StepOutput:
        loss, outputs = self.compute_loss(self.model, batch)
        return StepOutput(loss=loss, outputs=outputs)

    def predict_batch(
        self,
        compute: Callable[[Any], tuple[torch.Tensor, Any]],
        inputs: Any,
        *,
        loss_only: bool,
        ignore: Sequence[str],
        is_overridden: bool = False,
        note_outputs: Callable[[Any], None] | None = None,
    ) -> StepOutput:
        """Return loss, logits and labels of one batch; the caller disables gradients.

        Args:
            compute: Returns (loss, outputs) of the batch: the Trainer's `compute_loss`.
            loss_only: Leave logits and labels out.
            ignore: Keys of the outputs that are not predictions.
            is_overridden: `compute` is user code, which knows where the labels of a batch without names are.
            note_outputs: Called with the outputs of a model that was called without labels, and so without `compute`.
        """
        labels = self.labels_of(inputs)
        loss: torch.Tensor | None
        if isinstance(inputs, Mapping):
            is_asked = labels is not None or self._returns_loss_without_labels(inputs)
        else:  # the model's own loss is there if it has found labels
            is_asked = is_overridden or not self.returns_loss
        if is_asked:
            loss, outputs = compute(inputs)
            num_losses = 1
            if labels is None and isinstance(inputs, Mapping) and not self.has_label_names:
                labels = ()  # as documented, so that compute_metrics is called
        else:
            outputs = call_model(self.model, inputs, None)
            loss = own_loss(outputs) if self.returns_loss else None
            num_losses = int(loss is not None)
            if note_outputs is not None:
                note_outputs(outputs)
        loss = None if loss is None else loss.detach()
        if loss_only:
            return StepOutput(loss=loss)
        if isinstance(outputs, Mapping):
            ignored = {"loss", *with_all_cache_names(ignore)}
            logits = tuple(value for key, value in outputs.items() if key not in ignored)
        elif isinstance(outputs, (tuple, list)):
            # The loss comes first only if the model computed it itself.
            logits = tuple(outputs[1 if num_losses and self.returns_loss else 0 :])
        else:
            logits = () if num_losses and self.returns_loss else (outputs,)
        logits = detach(tuple(value for value in logits if not is_cache(value)))
        return StepOutput(loss=loss, outputs=logits[0] if len(logits) == 1 else logits or None, labels=detach(labels))

    def _returns_loss_without_labels(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the model computes a loss for a batch without labels.

        If the model takes no labels at all, the batch may request it (``return_loss=True``, as collators for CLIP do).
        """
        request = inputs.get("return_loss")
        if request is None:
            return self.can_return_loss
        return bool(request) and (self.can_return_loss or not self.has_label_names)

    @property
    def returns_loss(self) -> bool:
        """Whether the model computes the loss itself when given labels."""
        return not (self.label_smoothing or self.compute_loss_func)

    def labels_of(self, inputs: Any) -> Any:
        """Return the batch's labels (a tuple for several names), or None if any is missing."""
        if not isinstance(inputs, Mapping) or not self.label_names:
            return None
        labels = tuple(inputs.get(name) for name in self.label_names)
        if any(label is None for label in labels):
            return None
        return labels[0] if len(labels) == 1 else labels

    def label_key(self, batch: Any) -> str | None:
        """Return the key of the batch's labels: ``"labels"``, or the one that `label_names` names; None without."""
        if not isinstance(batch, (dict, Mapping)):
            return None
        if batch.get("labels") is not None:
            return "labels"
        (name,) = self.label_names if len(self.label_names) == 1 else ("labels",)
        return name if batch.get(name) is not None else None

    @property
    def gives_count(self) -> bool:
        """Whether to pass the item count to the model: it accepts the count, and no other items are declared."""
        return self.accepts_item_count and self.count_rule is None

    @property
    def divides_by_count(self) -> bool:
        """Whether `compute_loss` returns a loss divided by the item count that it is given."""
        if self.compute_loss_func is not None:
            return self.function_takes_count
        return self.gives_count and not self.label_smoothing

    def count_items(self, batch: Any) -> int | torch.Tensor:
        """Return the weight of a batch's loss by `count_items`: the number of items it averages over, 1 for a sum."""
        if callable(self.count_rule):
            return checked_count(self.count_rule(batch), self.count_rule)
        return self.count_as(self.count_rule or LABELS, batch)

    def documented_count(self, batch: Any, *, shifts: bool) -> torch.Tensor | None:
        """Return `num_items_in_batch` as transformers counts it: the labels that are not -100.

        Args:
            shifts: Leave the first label of each row out.

        Returns:
            None for a batch without a tensor of labels.
        """
        # A smoothed loss also finds labels under another name.
        key = self.label_key(batch)
        labels = batch[key] if key == "labels" or (key is not None and self.label_smoothing) else None
        if not isinstance(labels, torch.Tensor):
            return None
        shifted_labels = batch.get("shift_labels") if counts_shifted_labels() else None
        if isinstance(shifted_labels, torch.Tensor):
            labels = shifted_labels
        elif shifts:
            labels = labels[..., 1:]
        return count_labels(labels)

    def count_as(self, kind: str, batch: Any, *, unknown: int | None = None) -> int | torch.Tensor:
        """Return the number of items of a kind in a batch, without synchronising; 1 for ``"sum"``.

        Labels are those other than -100, without the first of each sample if they are shifted, unless the collator
        shifted them (`shift_labels`). Without labels the samples are counted.

        Args:
            unknown: Returned for a batch that does not say how many samples it holds.

        Raises:
            TaskError: The number of samples is unknown, and `unknown` is None.
        """
        if kind == SUM:
            return 1
        labels = self.label_tensor(batch) if kind != SAMPLES else None
        if labels is None:
            count = self.num_samples(batch) or unknown
            if count is None:
                raise TaskError(
                    f"Cannot count the items of a batch of type {type(batch).__name__}.",
                    "Batches are weighted by the number of items that their loss is a mean over, and this one holds no "
                    "tensor with a batch dimension.",
                    "Pass count_items= to the Trainer: a function that returns the number of items in a batch.",
                )
            return count
        if labels.is_floating_point():
            return labels.numel()
        return count_labels(labels[..., 1:] if kind == SHIFTED and batch.get("shift_labels") is None else labels)

    def num_samples(self, batch: Any) -> int | None:
        """Return the number of samples in a batch, read from its labels, the main input or else any tensor."""
        if isinstance(batch, (dict, Mapping)):
            for name in self._sample_names:
                value = batch.get(name)
                if isinstance(value, torch.Tensor) and value.dim():
                    return int(value.shape[0])
        return batch_size_of(batch)

    def label_tensor(self, batch: Any) -> torch.Tensor | None:
        """Return the batch's labels (`shift_labels` if the collator added them), or None."""
        key = self.label_key(batch)
        shifted_labels = batch.get("shift_labels") if isinstance(batch, Mapping) else None
        labels = shifted_labels if shifted_labels is not None else None if key is None else batch[key]
        return labels if isinstance(labels, torch.Tensor) and labels.dim() else None

    def _builds_decoder_inputs(self, inputs: Mapping[str, Any]) -> bool:
        config = getattr(self.model, "config", None)
        return bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" not in inputs


def call_model(model: nn.Module, inputs: Any, num_items: int | torch.Tensor | None) -> Any:
    """Call a model with a batch's columns as keywords, and with the number of items if it is given."""
    if isinstance(inputs, (dict, Mapping)):
        return model(**inputs) if num_items is None else model(**inputs, num_items_in_batch=num_items)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
