"""Collators, which turn lists of samples into batches: stacked, or padded by a tokenizer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.notes import keep_facts
from hftrain.core.tree import map_tensors
from hftrain.data.columns import text_columns

_LABELS = ("label", "label_ids")
_CONVERT_REMEDY = "Convert it to a tensor in the dataset (an image: torchvision's transforms), or pass a data_collator."


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> Any:
    """Stack samples into a batch, key by key.

    Tensors are stacked, NumPy arrays and numbers become tensors, strings and None are dropped. ``label`` (one number
    per sample) or else ``label_ids`` becomes ``labels``: int64 if whole numbers, else float32. Samples without named
    parts (tuples, tensors, numbers) are stacked by position, as by torch's own collator.

    Args:
        features: Mappings, or objects whose attributes are the named parts. The first one defines the parts.
        return_tensors: ``"pt"`` for torch tensors, ``"np"`` for NumPy arrays.

    Returns:
        A dict of tensors; for samples without named parts, the result of `torch.utils.data.default_collate`.

    Raises:
        ConfigError: `return_tensors` has another value.
        TaskError: The samples' parts are missing or cannot be stacked.

    Source:
        The documented `default_data_collator`.

    Example:
        >>> default_data_collator([{"x": [1, 2], "label": 0}, {"x": [3, 4], "label": 1}])
        {'labels': tensor([0, 1]), 'x': tensor([[1, 2],
                [3, 4]])}
    """
    if return_tensors not in ("pt", "np"):
        raise ConfigError(
            f"Cannot use return_tensors={return_tensors!r}.",
            "Batches can only be made of torch tensors or NumPy arrays.",
            "Use 'pt', which training needs, or 'np'.",
        )
    batch = _collate_named(features) if _is_named(features[0]) else _collate_unnamed(features)
    return batch if return_tensors == "pt" else map_tensors(batch, torch.Tensor.numpy)


@dataclass
class DefaultDataCollator:
    """Object form of `default_data_collator`.

    Args:
        return_tensors: ``"pt"`` or ``"np"``.

    Source:
        The documented `DefaultDataCollator`.
    """

    return_tensors: str = "pt"

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        return default_data_collator(features, self.return_tensors if return_tensors is None else return_tensors)


@dataclass
class DataCollatorWithPadding:
    """Pad the samples of a batch to equal lengths with the tokenizer's `pad`, then rename the labels.

    Args:
        tokenizer: Any object with `pad`: a tokenizer or a feature extractor.
        padding: True or ``"longest"`` for the longest sample, ``"max_length"``, or False.
        max_length: Length to pad to for ``"max_length"``.
        pad_to_multiple_of: Round lengths up to a multiple of this.
        return_tensors: ``"pt"`` or ``"np"``.

    Source:
        The documented `DataCollatorWithPadding`.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[Any]) -> Any:
        names = ("padding", "max_length", "pad_to_multiple_of", "return_tensors")
        batch = _pad(self.tokenizer, features, **{name: getattr(self, name) for name in names})
        for name in _LABELS:
            if name in batch:
                batch["labels"] = batch.pop(name)
        return batch


def makes_tensors(collator: Any) -> bool:
    """Return whether a collator is hftrain's or transformers' own, which cannot use text."""
    module_name = getattr(collator, "__module__", type(collator).__module__) or ""
    name = getattr(collator, "__name__", type(collator).__name__)
    return module_name.partition(".")[0] in ("hftrain", "transformers") and "collator" in name.lower()


def _pad(tokenizer: Any, features: list[Any], **options: Any) -> Any:
    """Return `tokenizer.pad(features, ...)` without transformers' warning that `__call__` is faster."""
    known_warnings = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(known_warnings, dict):
        known_warnings.setdefault("Asking-to-pad-a-fast-tokenizer", True)
    try:
        if options.get("return_tensors") == "pt" and _pads_lists(tokenizer, features):
            return _with_tensors(tokenizer.pad(features, **{**options, "return_tensors": None}))
        return tokenizer.pad(features, **options)
    except (TypeError, ValueError) as error:
        texts = text_columns(features[0]) if isinstance(features[0], Mapping) else []
        if not texts and _are_ragged(features):
            raise TaskError(
                "Cannot make a tensor of the labels:",
                "their lengths differ, and the tokenizer pads only its own columns.",
                "Pass data_collator=DataCollatorForTokenClassification(tokenizer), or DataCollatorForSeq2Seq, which "
                "pad labels too.",
            ) from error
        if not texts:
            raise
        raise TaskError(
            f"Cannot make tensors of the columns {', '.join(texts)}:",
            "they hold text.",
            "Tokenize it first (dataset.map), remove the columns, or pass a data_collator that does either.",
        ) from error


def _are_ragged(features: list[Any]) -> bool:
    for name in ("labels", *_LABELS):
        rows = [feature.get(name) for feature in features if isinstance(feature, Mapping)]
        if len({len(row) for row in rows if isinstance(row, (list, tuple))}) > 1:
            return True
    return False


def _pads_lists(tokenizer: Any, features: list[Any]) -> bool:
    """Return whether `pad` is transformers' own and returns lists for these features without `return_tensors`."""
    module = sys.modules.get("transformers.tokenization_utils_base")
    if module is None or getattr(tokenizer.pad, "__func__", None) is not module.PreTrainedTokenizerBase.pad:
        return False
    name = tokenizer.model_input_names[0]
    rows = [feature.get(name) if isinstance(feature, Mapping) else None for feature in features]
    # transformers decides by the first value.
    return all(type(row) is list for row in rows) and type(next((row[0] for row in rows if row), None)) is int


def _with_tensors(batch: Any) -> Any:
    """Make the same tensors as transformers, but without its check of each number in Python."""
    for name, rows in batch.items():
        if type(rows) is list and (numbers := _numbers(rows)) is not None:
            batch[name] = numbers
    return batch.convert_to_tensors("pt")


def _numbers(rows: list[Any]) -> torch.Tensor | None:
    """Return the tensor that torch makes of lists of integers, in a fifth of its time; None for other rows."""
    if type(rows[0]) is list and rows[0] and type(rows[0][0]) is int:
        # Results other than int64, and errors, are left to torch.
        with contextlib.suppress(TypeError, ValueError):
            array = numpy.array(rows)
            if array.dtype == numpy.int64:
                return torch.tensor(array)
    return None


def _is_named(feature: Any) -> bool:
    is_plain = isinstance(feature, (torch.Tensor, numpy.ndarray, list, tuple, str, bytes))
    return isinstance(feature, Mapping) or (hasattr(feature, "__dict__") and not is_plain)


def _collate_unnamed(features: list[Any]) -> Any:
    try:
        return default_collate(features)
    except (TypeError, RuntimeError) as error:
        raise _stacking_error("Cannot make a batch of the samples:", features, error) from error


def _stacking_error(problem: str, values: list[Any], error: Exception) -> TaskError:
    """Return why samples, or their parts of one name, cannot be stacked; keep the place of one that is unlike most."""
    signatures = [(type(value).__name__, _shape(value)) for value in values]
    type_names = sorted({type_name for type_name, _ in signatures})
    shapes = sorted({shape for _, shape in signatures if shape is not None})
    if "NoneType" in type_names:
        num_missing = sum(value is None for value in values)
        reason, remedy = f"{num_missing} of {len(values)} are None or missing.", "Give every sample the same parts."
    elif len(shapes) > 1:
        reason = f"the shapes differ ({', '.join(map(str, shapes[:3]))})."
        remedy = "Give every sample the same shape; for texts, pass the tokenizer (or a data_collator that pads)."
    elif len(type_names) > 1:
        reason, remedy = f"the types differ ({', '.join(type_names)}).", "Give every sample the same type."
    elif type_names == ["str"]:
        remedy = "Number the classes in the dataset." if "'label" in problem else "Tokenize it."
        reason = f"it is text, such as {values[0][:40]!r}."
    else:
        reason, remedy = f"its type is {type_names[0]}, which makes no tensor ({error}).", _CONVERT_REMEDY
    stacking_error = TaskError(problem, reason, remedy)
    odd_positions = [
        position for position, signature in enumerate(signatures) if signature != max(signatures, key=signatures.count)
    ]
    if odd_positions:
        keep_facts(stacking_error, place=odd_positions[0])
    return stacking_error


def _shape(value: Any) -> tuple[int, ...] | None:
    if hasattr(value, "shape"):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, (list, tuple)) else None


def _collate_named(features: list[Any]) -> dict[str, Any]:
    try:
        rows: list[Mapping[str, Any]] = [f if isinstance(f, Mapping) else vars(f) for f in features]
    except TypeError as error:
        raise _stacking_error("Cannot make a batch of the samples:", features, error) from error
    batch = {}
    label = next((name for name in _LABELS if rows[0].get(name) is not None), None)
    if label is not None:
        batch["labels"] = _column(rows, label, _stack_labels)
    elif isinstance(rows[0].get("labels"), str):
        batch["labels"] = _column(rows, "labels", _stack)
    for name, value in rows[0].items():
        if name not in _LABELS and value is not None and not isinstance(value, (str, bytes)):
            batch[name] = _column(rows, name, _stack)
    return batch


def _column(rows: list[Mapping[str, Any]], name: str, stack: Callable[[list[Any]], torch.Tensor]) -> torch.Tensor:
    try:
        return stack([row[name] for row in rows])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        values = [row.get(name) for row in rows]
        raise _stacking_error(f"Cannot stack {name!r} of {len(rows)} samples:", values, error) from error


def _stack(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if isinstance(values[0], (numpy.ndarray, numpy.generic)):
        return torch.from_numpy(numpy.stack(values))
    numbers = _numbers(values)
    return torch.tensor(values) if numbers is None else numbers


def _stack_labels(values: list[Any]) -> torch.Tensor:
    """Stack labels; integers become int64 and others float32, whatever their precision was."""
    labels = torch.stack(values) if isinstance(values[0], torch.Tensor) else torch.as_tensor(numpy.asarray(values))
    if isinstance(values[0], torch.Tensor) and labels.dim() > 1:
        return labels
    return labels.float() if labels.is_floating_point() else labels.long()
