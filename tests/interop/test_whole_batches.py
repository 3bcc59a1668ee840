"""Batches read as a whole are those of the rows, and whatever is a user's is read by rows."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy
import pytest
import torch
from support.loading import build
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

datasets: Any = pytest.importorskip("datasets")

from hftrain.core.errors import TaskError  # noqa: E402
from hftrain.data.collators import DefaultDataCollator, default_data_collator  # noqa: E402
from hftrain.data.columns import RemoveColumnsCollator, TextRemover  # noqa: E402
from hftrain.data.feed import TrainFeed  # noqa: E402
from hftrain.data.sharding import RankLoader  # noqa: E402
from hftrain.data.whole_batches import WholeBatches, whole_batches  # noqa: E402

pytestmark = pytest.mark.interop

NUM = 23
INDICES = [3, 0, 3, 22]


class CountsRows(TensorDataset):
    """A user's class."""

    num_read = 0

    def __getitem__(self, index: int) -> Any:
        type(self).num_read += 1
        return super().__getitem__(index)


def tensors(kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    return kind(torch.randn(NUM, 2, 3), torch.arange(NUM), torch.arange(NUM, dtype=torch.float16) > 4)


def columns(**more: Any) -> Any:
    rng = numpy.random.default_rng(0)
    features = {"x": datasets.List(datasets.Value("int32")), "label": datasets.ClassLabel(num_classes=3)}
    rows = {"x": rng.integers(0, 9, (NUM, 4)).tolist(), "label": rng.integers(0, 3, NUM).tolist()}
    kinds = {name: kind for name, (kind, _) in more.items()}
    values = {name: column for name, (_, column) in more.items()}
    return datasets.Dataset.from_dict(rows | values, features=datasets.Features(features | kinds))


def value(dtype: str, column: Any, depth: int = 0) -> tuple[Any, Any]:
    feature: Any = datasets.Value(dtype)
    for _ in range(depth):
        feature = datasets.List(feature)
    return feature, column


def assert_same_batch(whole: Any, rows: Any) -> None:
    assert type(whole) is type(rows)
    if isinstance(rows, dict):
        assert list(whole) == list(rows)
        whole, rows = list(whole.values()), list(rows.values())
    for one, other in zip(whole, rows, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


def by_rows(dataset: Any, indices: list[int], collate: Any = default_data_collator) -> Any:
    return collate([dataset[index] for index in indices])


REALS = numpy.random.default_rng(1).normal(size=NUM).tolist()
BIG = [2**31 + i for i in range(NUM)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"a": value("float64", REALS), "b": value("float32", [[r, 2 * r] for r in REALS], 1)},
        {"a": value("int64", BIG), "b": value("uint8", [[[1, 2]] * 3] * NUM, 2), "labels": value("float64", REALS)},
        {"a": value("bool", [True, False] * 11 + [True]), "b": value("bool", [[True, False]] * NUM, 1)},
        {"label_ids": value("float32", REALS), "c": value("uint32", BIG), "d": value("int8", [-1] * NUM)},
    ],
)
def test_columns_are_those_of_the_rows(more: Any) -> None:
    for dataset in (columns(**more), columns(**more).shuffle(seed=1), columns(**more).select(range(NUM))):
        whole = whole_batches(dataset, default_data_collator)
        assert whole is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            batch = whole.__getitems__(INDICES)
        assert_same_batch(batch, by_rows(dataset, INDICES))
    if "label_ids" in more:
        dataset = dataset.remove_columns("label")
        whole = whole_batches(dataset, DefaultDataCollator())
        assert whole is not None
        assert_same_batch(whole.__getitems__(INDICES), by_rows(dataset, INDICES))


@pytest.mark.parametrize("kind", ["bool", "float64", "int8"])
@pytest.mark.parametrize("depth", [0, 1])
def test_labels_are_those_of_the_rows(kind: str, depth: int) -> None:
    column: Any = [bool(i % 2) if kind == "bool" else i % 5 / (3 if kind == "float64" else 1) for i in range(NUM)]
    column = [int(each) for each in column] if kind == "int8" else column
    feature, rows = value(kind, [[each] * 2 for each in column] if depth else column, depth)
    dataset = datasets.Dataset.from_dict({"label": rows}, features=datasets.Features({"label": feature}))
    whole = whole_batches(dataset, default_data_collator)
    assert whole is not None
    assert_same_batch(whole.__getitems__(INDICES), by_rows(dataset, INDICES))


def test_real_numbers_have_torchs_default_type() -> None:
    dataset = columns(a=value("float64", REALS), label_ids=value("float64", REALS)).remove_columns("label")
    whole = whole_batches(dataset, default_data_collator)
    assert whole is not None
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_batch(whole.__getitems__(INDICES), by_rows(dataset, INDICES))
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_row_is_read(monkeypatch: Any) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("A row was read.")

    for dataset in (columns(), tensors(), Subset(tensors(), list(range(5, 12)))):
        whole = whole_batches(dataset, default_data_collator)
        assert whole is not None
        expected = by_rows(dataset, [1, 6, 2])
        with monkeypatch.context() as patch:
            patch.setattr(datasets.Dataset, "__getitems__", fail)
            patch.setattr(TensorDataset, "__getitem__", fail)
            patch.setattr(whole, "collate", fail)
            assert_same_batch(whole.__getitems__([1, 6, 2]), expected)


@pytest.mark.parametrize(
    "dataset",
    [
        columns(t=value("string", ["a"] * NUM)),
        columns(t=value("float16", REALS)),
        columns(t=value("uint64", BIG)),
        columns(t=(datasets.Array2D((1, 2), "int32"), [[[1, 2]]] * NUM)),
        columns().with_format("torch"),
        columns().with_format("numpy"),
        columns().with_format(columns=["x"]),
        columns().with_transform(lambda rows: rows),
        type("Own", (datasets.Dataset,), {})(columns().data.table),
        tensors(CountsRows),
        Subset(tensors(CountsRows), range(NUM)),
        Subset(columns(), range(NUM)),
        [{"x": 1}],
    ],
)
def test_other_data_is_read_by_rows(dataset: Any) -> None:
    assert whole_batches(dataset, default_data_collator) is None


@pytest.mark.parametrize(
    "collate",
    [
        list,
        lambda rows: default_data_collator(rows),
        default_collate,
        DefaultDataCollator("np"),
        type("Own", (DefaultDataCollator,), {})(),
        RemoveColumnsCollator(default_data_collator, ["x"], None, "Net", description="training"),
        RemoveColumnsCollator(list, ["x", "label"], None, "Net", description="training"),
        type("OwnPruner", (TextRemover,), {})(default_data_collator, description="training"),
    ],
)
def test_a_users_collator_gets_rows(collate: Any) -> None:
    assert whole_batches(columns(), collate) is None


@pytest.mark.parametrize("wrap", [TextRemover, lambda c, **o: RemoveColumnsCollator(c, ["x", "label"], None, "N", **o)])
def test_what_is_before_the_default_collator_has_nothing_to_do(wrap: Any) -> None:
    collate = wrap(wrap(default_data_collator, description="training"), description="training")
    assert isinstance(whole_batches(columns(), collate), WholeBatches)


def outcome(read: Any, dataset: Any, indices: Any) -> Any:
    """Return the batch, or else what the error says; of an index error, whose words are of a row, its class."""
    try:
        return read(dataset, indices)
    except (TaskError, RuntimeError) as error:
        return str(error)
    except IndexError as error:
        return type(error)


@pytest.mark.parametrize(
    ("dataset", "indices"),
    [
        (columns(y=value("int64", [[1] * (1 + i % 2) for i in range(NUM)], 1)), [0, 2, 4]),
        (columns(y=value("int64", [[] for _ in range(NUM)], 1)), [0, 2]),
        (columns(y=value("int64", [None] * NUM)), [0, 2]),
        (columns(y=value("int64", [[None]] * NUM, 1)), None),
        (columns(y=value("int64", [[1] * (1 + i % 2) for i in range(NUM)], 1)), None),
        (columns(), [0, numpy.int64(2)]),
        (tensors(), [0, torch.tensor(2)]),
        (tensors(), [0, -1]),
        (tensors(), [True, True]),
        (Subset(tensors(), torch.arange(NUM)), [0, 2]),
        (TensorDataset(torch.randn(NUM, 2, 3, 4).transpose(1, 2)), [0, 2]),
        (TensorDataset(torch.randn(NUM, 3).to_sparse()), [0, 2]),
        (columns(), [NUM]),
        (tensors(), [NUM]),
    ],
)
def test_unusual_batches_are_those_of_the_rows(dataset: Any, indices: Any) -> None:
    """Also their errors; without indices, all samples are asked for."""
    whole = whole_batches(dataset, default_data_collator)
    assert whole is not None
    indices = list(range(len(dataset))) if indices is None else indices
    found, expected = (outcome(read, dataset, indices) for read in (lambda *args: whole.__getitems__(args[1]), by_rows))
    if isinstance(expected, (str, type)):
        assert found == expected
    else:
        assert_same_batch(found, expected)


def test_a_format_that_is_set_in_the_middle_counts() -> None:
    dataset = columns()
    batches = iter(build(dataset, collate=default_data_collator, batch_size=4, shuffle=False))
    assert next(batches)["x"].shape == (4, 4)
    dataset.set_transform(lambda rows: {"x": [[7]] * len(rows["x"])})
    assert next(batches)["x"].tolist() == [[7]] * 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [columns, tensors])
def test_a_loader_gives_the_batches_of_torchs(make: Any, workers: int, monkeypatch: Any) -> None:
    dataset = make()
    options = {"collate": default_data_collator, "batch_size": 4, "num_workers": workers, "seed": 3}
    options |= {"persistent_workers": workers > 0}
    loader = build(dataset, **options)
    assert loader.dataset is dataset
    feed = TrainFeed(loader, seed=3)
    epochs = [list(feed.open(epoch)) for epoch in (0, 1)]
    later = list(feed.open(1, skip=2))
    monkeypatch.setattr(RankLoader, "_get_iterator", DataLoader._get_iterator)
    rows = TrainFeed(build(dataset, **options), seed=3)
    expected = [list(rows.open(epoch)) for epoch in (0, 1)]
    for found, batches in zip([*epochs, later], [*expected, expected[1][2:]], strict=True):
        for one, other in zip(found, batches, strict=True):
            assert_same_batch(one, other)


def test_it_is_torch_that_asks_for_the_iterator(monkeypatch: Any) -> None:
    asked = []
    monkeypatch.setattr(WholeBatches, "__getitems__", lambda self, indices: asked.append(indices))
    list(build(tensors(), collate=default_data_collator, batch_size=8, shuffle=False))
    assert [len(indices) for indices in asked] == [8, 8, 7]


def test_it_can_be_sent_to_a_worker() -> None:
    whole = pickle.loads(pickle.dumps(whole_batches(columns(), default_data_collator)))
    assert_same_batch(whole.__getitems__(INDICES), by_rows(columns(), INDICES))
