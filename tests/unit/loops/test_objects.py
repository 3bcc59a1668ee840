"""Objects among predictions: plain data, whatever its nesting, there and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from hftrain.core.errors import TaskError
from hftrain.extras.predictions.gather import Kept
from hftrain.extras.predictions.objects import Objects, decode, encode, to_plain
from hftrain.strategies.single import SingleDeviceStrategy


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2.5, "text", [1, "a", None], (1, (2, [3])), {"a": 1, 2: "b", (1, 2): [None]}, [], {}, (),
        Objects(["a", ("b",)]), {"array": "is only a key", "items": 1},
    ],
)  # fmt: skip
def test_plain_data_comes_back_with_its_types(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(to_plain(value)))))
    assert back == value
    if not isinstance(value, Objects):
        assert type(back) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "complex64", "U3"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_arrays_come_back_with_their_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = numpy.ones(shape).astype(dtype)
    back = decode(json.loads(json.dumps(encode([array]))))[0]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()
    back[...] = 0


def test_tensors_and_numpy_numbers_become_arrays_and_numbers() -> None:
    plain = to_plain({"a": torch.ones(2, requires_grad=True), "b": numpy.float32(1.5), "c": torch.ones(1).bfloat16()})
    assert plain["a"].tolist() == [1, 1]
    assert plain["b"] == 1.5
    assert plain["c"].dtype == numpy.float32


@pytest.mark.parametrize("value", [object(), [{"a": {1, 2}}], numpy.array([object()], dtype=object)])
def test_anything_else_is_named(value: Any) -> None:
    with pytest.raises(TaskError, match=r"They hold a (object|set|ndarray), which cannot travel"):
        to_plain(value)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_objects_of_all_ranks_stand_in_the_datas_order(
    run_ranks: Callable[..., list[Any]], is_interleaved: bool
) -> None:
    batches = [(torch.arange(n) + 10 * n, [{"n": n, "boxes": torch.ones(i, 2)} for i in range(n)]) for n in (2, 1, 3)]
    shares = [batches[::2], batches[1::2], []] if is_interleaved else [batches[:2], batches[2:], []]

    def join(group: Any) -> Any:
        kept = Kept(takes_objects=True)
        for batch in shares[group.rank]:
            kept.add(batch)
        return kept.joined(group, is_interleaved=is_interleaved)

    for numbers, objects in run_ranks(join, 3):
        assert numbers.tolist() == [20, 21, 10, 30, 31, 32]
        assert [(entry["n"], len(entry["boxes"])) for entry in objects] == [(n, i) for n in (2, 1, 3) for i in range(n)]


def test_object_that_is_no_list_counts_once_per_batch() -> None:
    kept = Kept(takes_objects=True)
    for text in ("a", "b"):
        kept.add({"text": text, "x": torch.ones(3)})
    joined = kept.joined(SingleDeviceStrategy(use_cpu=True), is_interleaved=False)
    assert joined["text"] == ["a", "b"]
    assert joined["x"].shape == (6,)
