"""Documents in rows: which goes where, what a row holds, and streams that go on in the middle of a buffer."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from support.stateful import Lines
from torch.utils.data import IterableDataset

from hftrain import ConfigError, pack_dataset
from hftrain.core.errors import TaskError
from hftrain.data.datasets import has_state

SIZES = torch.randint(1, 20, (60,), generator=torch.Generator().manual_seed(0)).tolist()
# Every token tells its document and its place there.
DOCUMENTS = [{"input_ids": [1000 * number + place for place in range(size)]} for number, size in enumerate(SIZES, 1)]

TOKENS = list(chain.from_iterable(each["input_ids"] for each in DOCUMENTS))


class Stream(IterableDataset[Any]):
    """A stream that saves nothing."""

    def __iter__(self) -> Any:
        return iter(DOCUMENTS)


def documents_of(rows: Any) -> list[list[int]]:
    """Return the parts of documents in rows, without the padding."""
    found = []
    for row in rows:
        starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            tokens = row["input_ids"][start:stop].tolist()
            assert row["position_ids"][start:stop].tolist() == list(range(stop - start))
            is_padding = not any(tokens)
            assert row["labels"][start:stop].tolist() == [
                -100,
                *([-100] * (stop - start) if is_padding else tokens)[1:],
            ]
            found += [] if is_padding else [tokens]
    return found


@pytest.mark.parametrize("source", [DOCUMENTS, Stream(), Lines(DOCUMENTS)], ids=["map", "stream", "stateful"])
@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
@pytest.mark.parametrize("length", [7, 32])
def test_every_token_is_in_one_row(source: Any, packing: str, length: int) -> None:
    rows = list(pack_dataset(source, length, packing=packing, buffer_size=9))
    assert {len(column) for row in rows for column in row.values()} == {length}
    parts = documents_of(rows)
    assert sorted(chain(*parts)) == TOKENS
    if packing == "bfd" and length == 32:
        assert sorted(parts) == [each["input_ids"] for each in DOCUMENTS]  # none is cut
    if packing == "wrapped":
        assert len(rows) == -(-sum(SIZES) // length)
        assert list(chain(*parts)) == TOKENS


def test_best_fit_fills_the_room_that_is_left() -> None:
    rows = pack_dataset([{"input_ids": [size] * size} for size in (3, 6, 4, 2, 5)], 10)
    assert [row["input_ids"].tolist() for row in rows] == [[6] * 6 + [4] * 4, [5] * 5 + [3] * 3 + [2] * 2]


def test_own_labels_are_kept() -> None:
    (row,) = pack_dataset([{"input_ids": [1, 2, 3], "labels": [9, -100, 7]}, {"input_ids": [], "labels": []}], 4)
    assert row["labels"].tolist() == [-100, -100, 7, -100]


@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
@pytest.mark.parametrize("buffer_size", [1, 10, 61])
def test_stream_goes_on_at_any_row_twice(packing: str, buffer_size: int) -> None:
    options: dict[str, Any] = {"packing": packing, "buffer_size": buffer_size}
    stream = pack_dataset(Lines(DOCUMENTS), 16, **options)
    for _ in range(2):  # the second pass begins in the state that the first one has left
        whole, states = [], [copy.deepcopy(stream.state_dict())]
        for row in stream:
            whole.append(row["input_ids"].tolist())
            states.append(copy.deepcopy(stream.state_dict()))
        for number, state in enumerate(states[1:], 1):
            other = pack_dataset(Lines(DOCUMENTS), 16, **options)
            other.load_state_dict(state)
            again = copy.deepcopy(other.state_dict())
            rest = iter(other)
            first = next(rest, None)
            assert (first is None) == (number == len(whole))
            if first is not None:
                assert first["input_ids"].tolist() == whole[number]
            third = pack_dataset(Lines(DOCUMENTS), 16, **options)
            third.load_state_dict(again)
            assert [row["input_ids"].tolist() for row in third] == whole[number:]
            third.load_state_dict(other.state_dict())
            assert [row["input_ids"].tolist() for row in third] == whole[number + 1 :]


def test_stream_has_a_state_if_its_documents_have() -> None:
    assert has_state(pack_dataset(Lines(DOCUMENTS), 8))
    assert not has_state(pack_dataset(Stream(), 8))


@pytest.mark.parametrize("options", [{"packing": "ffd"}, {"length": 1}, {"length": 8.0}, {"buffer_size": 0}])
def test_wrong_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        pack_dataset(DOCUMENTS, **{"length": 8, **options})


@pytest.mark.parametrize(
    ("sample", "word"), [({"text": "a"}, "input_ids"), ({"input_ids": [1, 2], "labels": [1]}, "labels")]
)
def test_sample_that_holds_no_tokens_is_refused(sample: Any, word: str) -> None:
    with pytest.raises((ConfigError, TaskError), match=word):
        pack_dataset([sample], 8)[0]


def test_share_of_one_process_is_refused() -> None:
    source = Stream()
    source.num_replicas, source.rank = 2, 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="whole stream"):
        pack_dataset(source, 8)
