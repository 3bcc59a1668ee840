from __future__ import annotations

import logging
import multiprocessing
from itertools import islice
from typing import Any

import pytest
from support.loading import build, stream_share
from support.resuming import assert_same
from support.stateful import Lines, StatefulRows, StatefulStream
from support.tiny import Stream, make_rows
from torch.utils.data import DataLoader

from hftrain.core.errors import TaskError
from hftrain.data.datasets import has_state
from hftrain.data.feed import TrainFeed
from hftrain.data.states import Stamped, resumable_loader
from hftrain.extras.streams import EvenedStream


def make_feed(dataset: Any, *, workers: int = 0, persistent: bool = False, **config: Any) -> TrainFeed:
    config = {"batch_size": 4, **config}
    loader = build(dataset, num_workers=workers, persistent_workers=persistent, **config)
    return TrainFeed(resumable_loader(loader, seed=42, rank=0), seed=42)


def xs(batches: Any) -> list[list[float]]:
    return [[float(row["x"].sum()) for row in batch] for batch in batches]


def stop_and_go(make: Any, num: int, *, epoch: int = 0) -> tuple[list[Any], list[Any], TrainFeed, Any]:
    """Return the batches of an epoch, those after `num` read by another feed, that feed, and its dataset."""
    whole = make()[0]
    for earlier in range(epoch):
        list(whole.open(earlier))
    expected = xs(whole.open(epoch))
    stopped = make()[0]
    for earlier in range(epoch):
        list(stopped.open(earlier))
    iterator = stopped.open(epoch)
    for _ in range(num):
        next(iterator)
    state = stopped.state_dict()
    resumed, dataset = make()
    resumed.load_state_dict(state)
    assert_same(resumed.state_dict(), state)
    batches = resumed.open(epoch, skip=num)
    # A save before the first batch, as after an evaluation that was left, is that of the checkpoint.
    assert_same(resumed.state_dict(), state)
    return expected[num:], xs(batches), resumed, dataset


@pytest.mark.parametrize(
    ("num", "epoch", "persistent"), [(1, 0, False), (4, 1, False), (5, 0, True), (7, 1, True), (8, 0, False)]
)
def test_stream_with_a_state_goes_on_in_workers_after_any_batch(num: int, epoch: int, persistent: bool) -> None:
    # 26 rows: the first worker has a last batch of one, the second one too.
    make = lambda: (make_feed(StatefulStream(26), workers=2, persistent=persistent), None)  # noqa: E731
    expected, got, resumed, _ = stop_and_go(make, num, epoch=epoch)
    assert got == expected
    whole = make()[0]
    for earlier in range(epoch + 1):
        list(whole.open(earlier))
    assert xs(resumed.open(epoch + 1)) == xs(whole.open(epoch + 1))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
@pytest.mark.parametrize("num", [1, 6])
def test_map_style_data_with_a_state_goes_on_in_workers(num: int) -> None:
    got, state = list[Any](), None
    for number in (num, 1, 7):  # the second one ends after a batch of the first of its workers
        feed = make_feed(StatefulRows(26), workers=3)
        feed.load_state_dict(state)
        got += xs(islice(feed.open(0, skip=len(got)), number))
        state = feed.state_dict()
    assert got == xs(make_feed(StatefulRows(26), workers=3).open(0))


@pytest.mark.parametrize(
    ("make", "workers", "changed", "num_left", "told"),
    [
        (StatefulStream, 0, {"workers": 1}, 6, "num_workers was 0, now 1"),
        (lambda num: Stream(make_rows(num)), 0, {"workers": 1}, 6, "num_workers was 0, now 1"),
        (StatefulStream, 1, {"workers": 1, "batch_size": 3}, 8, "batch_size was 4, now 3"),
    ],
)
def test_what_cannot_go_on_exactly_is_said(
    make: Any, workers: int, changed: Any, num_left: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    feed = make_feed(make(26), workers=workers)
    next(feed.open(0))
    other = make_feed(make(26), **changed)
    other.load_state_dict(feed.state_dict())
    with caplog.at_level(logging.WARNING):
        assert len(list(other.open(0, skip=1))) == num_left
    assert f"cannot go on exactly where it was: {told}" in caplog.text


def test_workers_with_a_state_do_not_persist_for_map_style_data() -> None:
    with pytest.warns(UserWarning, match="they do not persist"):
        feed = make_feed(StatefulRows(26), workers=1, persistent=True)
    assert not feed.loader.persistent_workers  # type: ignore[attr-defined]
    first = xs(feed.open(0))
    assert multiprocessing.active_children() == []
    assert len(first) == 7


def test_batches_are_pinned_and_states_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hftrain.data.states.pin_memory", lambda batch, *_: ("pinned", batch))
    sent = Stamped([1], 0, {"given": 1})
    assert sent.pin_memory() is sent
    assert (sent.batch, sent.state) == (("pinned", [1]), {"given": 1})


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num", [8, 9, 11, 13, 16])
def test_ranks_share_a_stream_with_a_state_as_one_without(num: int, drop_last: bool) -> None:
    def shares(dataset: Any) -> list[list[float]]:
        parts = [stream_share(dataset, drop_last=drop_last, rank=rank, world_size=2) for rank in range(2)]
        return [[float(row["x"].sum()) for row in part] for part in parts]

    class InOrder(StatefulStream):
        def __iter__(self) -> Any:
            return iter(self.rows)

    assert shares(InOrder(num)) == shares(Stream(make_rows(num)))


def test_share_of_a_rank_goes_on_up_to_its_filled_end() -> None:
    def make(rank: int) -> Any:
        stream = stream_share(StatefulStream(9, draws=False), rank=rank, world_size=2, seed=0)
        return TrainFeed(DataLoader(stream, batch_size=2, collate_fn=list), seed=0)

    for rank in range(2):
        expected = xs(make(rank).open(0))
        assert [len(batch) for batch in expected] == [2, 2, 2]
        for num in (1, 2, 3):
            stopped, resumed = make(rank), make(rank)
            iterator = stopped.open(0)
            for _ in range(num):
                next(iterator)
            resumed.load_state_dict(stopped.state_dict())
            assert xs(resumed.open(0, skip=num)) == expected[num:], (rank, num)


@pytest.mark.parametrize("kind", [StatefulStream, Lines])
def test_run_after_a_resumed_one_begins_at_the_start(kind: Any) -> None:
    dataset = StatefulStream(22, draws=False) if kind is StatefulStream else Lines(make_rows(22))
    stopped, resumed = make_feed(dataset), make_feed(dataset)
    next(batches := stopped.open(0))
    resumed.load_state_dict(stopped.state_dict())
    num_left = len(list(resumed.open(0, skip=1)))
    resumed.close()
    assert (num_left, len(list(make_feed(dataset).open(0)))) == (5, 6)
    del batches


def test_run_that_went_back_leaves_a_dataset_where_it_has_read_to() -> None:
    dataset = StatefulStream(22, draws=False, starts_over=False)
    feed = make_feed(dataset)
    batches = feed.open(0)
    next(batches)
    state = feed.state_dict()
    next(batches)
    feed.load_state_dict(state)
    last = list(islice(feed.open(0, skip=1), 3)), dataset.state_dict()
    feed.close()
    assert dataset.state_dict() == last[1]


def make_dispatched(num: int, *, persistent: bool = False) -> TrainFeed:
    """Return what the main process of two reads for both, with two workers."""
    workers = {"num_workers": 2, "persistent_workers": persistent}
    loader = build(StatefulStream(num), batch_size=4, dispatch_batches=True, world_size=2, **workers)
    return TrainFeed(resumable_loader(loader, seed=42, rank=0).loader, seed=42)


# Of 26 rows each worker fills its 13 up to 16, within a batch; of 18 its 9, with a batch more; 32 need no filling.
@pytest.mark.parametrize(("num", "taken", "persistent"), [(26, 7, True), (18, 6, False), (32, 7, True)])
def test_filled_stream_goes_on_in_workers_from_its_end_and_in_later_epochs(
    num: int, taken: int, persistent: bool
) -> None:
    make = lambda: (make_dispatched(num, persistent=persistent), None)  # noqa: E731
    expected, got, resumed, _ = stop_and_go(make, taken, epoch=1)
    assert got == expected
    assert len(expected) == 8 - taken
    whole = make_dispatched(num)
    for epoch in range(4):
        later = xs(whole.open(epoch))
        if epoch > 1:
            assert xs(resumed.open(epoch)) == later


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_every_pass_of_a_filled_stream_begins_at_its_start(counts: bool, options: Any) -> None:
    def make() -> TrainFeed:
        loader = build(Lines(range(1, 27), counts=counts), batch_size=3, dispatch_batches=True, world_size=2, **options)
        return TrainFeed(resumable_loader(loader, seed=42, rank=0).loader, seed=42)

    feed, states = make(), list[Any]()
    passes = [[batch for batch in feed.open(epoch) if states.append(feed.state_dict()) is None] for epoch in range(4)]  # type: ignore[func-returns-value]
    for epoch, batches in enumerate(passes):
        begun = 100 * epoch * (counts and not options)  # a worker begins each epoch as at first
        assert [line for batch in batches for line in batch] == [begun + line for line in (*range(1, 27), 1, 2, 3, 4)]
    for place in range(0, len(states), 9 if options else 1):  # each resume starts a process
        resumed = make()
        resumed.load_state_dict(states[place])
        assert list(resumed.open(place // 10, skip=place % 10 + 1)) == passes[place // 10][place % 10 + 1 :]
        for epoch in range(place // 10 + 1, 4):
            assert list(resumed.open(epoch)) == passes[epoch]


def test_stream_that_does_not_lead_back_to_its_start_cannot_be_filled_up() -> None:
    class Stuck(StatefulStream):
        def load_state_dict(self, state: Any) -> None:
            self.rows = []

    stream = EvenedStream(Stuck(3), unit=2)
    with pytest.raises(TaskError, match="it gave none"):
        list(stream)
    assert len(list(EvenedStream(StatefulStream(1), unit=4))) == 4


@pytest.mark.parametrize(("version", "keeps"), [("4.8.0", False), ("5.0.0", True)])
def test_states_of_streams_of_older_datasets_are_not_used(
    version: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hftrain.data.datasets.installed_versions", lambda *names: dict.fromkeys(names, version))
    stream = StatefulStream(4)
    assert has_state(stream)
    stream._ex_iterable = object()  # what datasets' streams have; a stand-in, as its old releases are not installed
    assert has_state(stream) is keeps
