"""Reading and collating whole batches at once, if no user code is involved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hftrain.data.collators import DefaultDataCollator, collate_columns, default_data_collator
from hftrain.data.columns import RemoveColumnsCollator, TextRemover

# The column types whose values are the same in Arrow and in Python.
_NUMBERS = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float32", "float64"})


class WholeBatches(Dataset[Any]):
    """Read batches identical to those that `collate` makes of a dataset's rows.

    Batches whose samples differ in shape, have missing values or have a non-int index are read by rows.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self._table: Any = dataset.with_format("arrow") if _is_of_columns(dataset) else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return a batch; called by torch's loaders."""
        batch = _of_tensors(self.dataset, indices) if self._table is None else self._of_columns(indices)
        if batch is not None:
            return batch
        read = getattr(self.dataset, "__getitems__", None)
        return self.collate([self.dataset[index] for index in indices] if read is None else read(indices))

    def _of_columns(self, indices: list[Any]) -> dict[str, Any] | None:
        # A callback may have set a format in the meantime.
        if not _are_ints(indices) or self.dataset.format["type"] is not None:
            return None
        table = self._table[indices]
        columns = {}
        for name in table.column_names:
            array = _array(table[name])
            if array is None:
                return None
            columns[name] = array
        return collate_columns(columns)


def whole_batches(dataset: Any, collate: Any) -> WholeBatches | None:
    """Return a reader of whole batches for a dataset; None if rows must be read and collated one by one.

    With `default_data_collator`, these are a `TensorDataset`, a `Subset` of one, and a `datasets.Dataset` of numbers
    without a format. Subclasses of these are read by rows.
    """
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    is_whole = type(inner) is TensorDataset or _is_of_columns(dataset)
    names = getattr(dataset, "column_names", ())
    return WholeBatches(dataset, collate) if is_whole and _is_default(collate, names) else None


def as_it_is(batch: Any) -> Any:
    """Return a batch that is already collated."""
    return batch


def _is_default(collate: Any, names: Collection[str]) -> bool:
    while type(collate) in (RemoveColumnsCollator, TextRemover):
        if not collate.keeps(names):
            return False
        collate = collate.data_collator
    is_object = type(collate) is DefaultDataCollator and collate.return_tensors == "pt"
    return is_object or collate is default_data_collator


def _is_of_columns(dataset: Any) -> bool:
    """Recognise a `datasets.Dataset` of numbers whose columns are read as Python objects; imports nothing."""
    kind = type(dataset)
    if (kind.__module__, kind.__qualname__) != ("datasets.arrow_dataset", "Dataset"):
        return False
    format_ = dataset.format
    is_plain = format_["type"] is None and format_["columns"] == dataset.column_names
    return is_plain and all(map(_holds_numbers, dataset.features.values()))


def _holds_numbers(feature: Any) -> bool:
    while type(feature).__name__ in ("List", "LargeList", "Sequence"):
        feature = feature.feature
    return type(feature).__name__ in ("Value", "ClassLabel") and feature.dtype in _NUMBERS


def _are_ints(indices: list[Any]) -> bool:
    return set(map(type, indices)) == {int}


def _of_tensors(dataset: Any, indices: list[Any]) -> list[torch.Tensor] | None:
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    tensors = dataset.tensors
    # For other tensors, stacking gives a different memory layout than indexing.
    if not _are_ints(indices) or not all(type(tensor) is torch.Tensor and _is_dense(tensor) for tensor in tensors):
        return None
    places = torch.tensor(indices, device="cpu")
    return [tensor[places] for tensor in tensors]


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _array(column: Any) -> numpy.ndarray[Any, Any] | None:
    """Return an Arrow column of numbers, or of lists of equal lengths, as an array; else None."""
    values = column.combine_chunks()
    shape = [len(values)]
    while hasattr(values, "flatten") and values.null_count == 0 and _length(values):
        shape.append(_length(values))
        values = values.flatten()
    if values.null_count or hasattr(values.type, "value_type"):
        return None
    array: numpy.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _length(lists: Any) -> int:
    """Return the common length of an Arrow array's lists; 0 if lengths differ or the values are not lists."""
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False) if hasattr(lists, "value_lengths") else []
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0
