"""Keeping predictions: batch by batch, padded, in the data's order over all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.loops.buffers import PADDING
from hftrain.loops.gather import Kept, put_back

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8)
RunRanks = Callable[..., list[Any]]


class Alone:
    """One rank."""

    world_size = 1


def concatenate(batches: list[Any]) -> Any:
    """Keep batches on one rank."""
    kept = Kept()
    for batch in batches:
        kept.add(batch)
    return kept.joined(Alone(), is_interleaved=False)  # type: ignore[arg-type]


# -- one tree or many, against NumPy ---------------------------------------------------------------------------------


class Case:
    """A random structure, and batches of it whose sizes and inner lengths are random too."""

    def __init__(self, seed: int, *, num_batches: int | None = None, varies: bool = True) -> None:
        self.random = random.Random(seed)
        self.varies = varies
        num_batches = self.random.randint(1, 6) if num_batches is None else num_batches
        self.structure = self._make_structure(depth=0)
        self.sizes = [self.random.randint(0, 4) for _ in range(num_batches)]
        self.batches = [self._fill(self.structure, size) for size in self.sizes]

    def _make_structure(self, depth: int) -> Any:
        kind = self.random.choice(["tensor", "tensor", "dict", "tuple", "list"]) if depth < 3 else "tensor"
        if kind == "tensor":
            shape = [self.random.randint(1, 3) for _ in range(self.random.randint(0, 3))]
            return {"shape": shape, "dtype": self.random.choice(DTYPES)}
        parts = [self._make_structure(depth + 1) for _ in range(self.random.randint(1, 3))]
        return {f"k{i}": part for i, part in enumerate(parts)} if kind == "dict" else (kind, parts)

    def _fill(self, structure: Any, size: int) -> Any:
        if isinstance(structure, tuple):
            kind, parts = structure
            filled = [self._fill(part, size) for part in parts]
            return tuple(filled) if kind == "tuple" else filled
        if "dtype" not in structure:
            return {key: self._fill(part, size) for key, part in structure.items()}
        shape = [length + self.random.randint(0, 3) * self.varies for length in structure["shape"]]
        values = [self.random.randint(-9, 9) for _ in range(size * int(numpy.prod(shape)))]
        return torch.tensor(values, dtype=structure["dtype"]).reshape(size, *shape)


def expected(batches: list[Any]) -> Any:
    """Concatenate with NumPy, cell by cell, into arrays filled with the padding."""
    first = batches[0]
    if isinstance(first, dict):
        return {key: expected([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (list, tuple)):
        return tuple(expected([batch[index] for batch in batches]) for index in range(len(first)))
    arrays = [batch.numpy() for batch in batches]
    shape = numpy.max([array.shape[1:] for array in arrays], axis=0).astype(int)
    rows = sum(len(array) for array in arrays)
    whole = numpy.full((rows, *shape), PADDING, dtype=arrays[0].dtype)
    row = 0
    for array in arrays:
        for sample in array:
            whole[(row, *(slice(0, n) for n in sample.shape))] = sample
            row += 1
    return whole


def assert_equal(actual: Any, wanted: Any) -> None:
    assert type(actual) is type(wanted)
    if isinstance(wanted, dict):
        assert list(actual) == list(wanted)
        wanted, actual = tuple(wanted.values()), tuple(actual.values())
    if isinstance(wanted, tuple):
        assert len(actual) == len(wanted)
        for one, other in zip(actual, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert actual.dtype == wanted.dtype
        numpy.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("varies", [False, True])
def test_concatenation_is_numpys(varies: bool) -> None:
    for seed in range(150):
        case = Case(seed, varies=varies)
        assert_equal((concatenate(case.batches)), expected(case.batches))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_types_that_cannot_hold_the_padding_are_widened_where_it_is_needed(dtype: torch.dtype) -> None:
    even = concatenate([torch.ones(1, 2, dtype=dtype)] * 2)
    assert even.dtype == torch.empty(0, dtype=dtype).numpy().dtype
    uneven = concatenate([torch.ones(1, 2, dtype=dtype), torch.zeros(1, 3, dtype=dtype)])
    assert uneven.tolist() == [[1, 1, PADDING], [0, 0, 0]]


# -- keeping ---------------------------------------------------------------------------------------------------------


def test_arrays_and_numbers_are_kept_like_tensors() -> None:
    kept = Kept()
    for number in (1, 2):
        kept.add({"array": numpy.full((2, number), number), "number": float(number), "flag": True, "none": None})
    joined = kept.joined(Alone(), is_interleaved=False)
    assert list(joined) == ["array", "number", "flag"]
    assert joined["array"].tolist() == [[1, PADDING], [1, PADDING], [2, 2], [2, 2]]
    assert joined["number"].tolist() == [1.0, 2.0]
    assert joined["flag"].tolist() == [True, True]


@pytest.mark.parametrize("tree", ["text", (torch.ones(1), ["text"]), {"cache": object()}])
def test_what_cannot_be_kept_is_named(tree: Any) -> None:
    with pytest.raises(TaskError, match=r"They hold a (str|object), and only tensors, arrays and numbers"):
        Kept().add(tree)


# -- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("widths", [(2, 2), (2, 3), (3, 2)])
def test_ranks_agree_on_a_type(run_ranks: RunRanks, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    batches = [torch.ones(1, width).to(dtype) for width in widths]

    def join(group: Any) -> Any:
        kept = Kept()
        kept.add(batches[group.rank])
        return kept.joined(group, is_interleaved=False)

    one, other = run_ranks(join, 2)
    numpy.testing.assert_array_equal(one, other)
    numpy.testing.assert_array_equal(one, (concatenate(batches)))


def test_rows_go_back_to_their_samples_several_of_one_together() -> None:
    order = [2, 0, 1]
    one, several, other = numpy.array([2, 0, 1]), numpy.array([20, 21, 0, 1, 10, 11]), numpy.arange(4)
    found = put_back({"one": one, "several": (several, several.tolist()), "other": other, "none": None}, order)
    assert found["one"].tolist() == [0, 1, 2]
    assert [list(rows) for rows in found["several"]] == [[0, 1, 10, 11, 20, 21]] * 2
    assert found["other"].tolist() == [0, 1, 2, 3]
    assert found["none"] is None
