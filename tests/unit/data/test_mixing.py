"""What a mixture draws: shares that are exact in each window, passes of each set, and modes as in the peers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hftrain import ConfigError, Mixture, TaskError

SETS = {"a": list(range(100)), "b": list(range(1000, 1030)), "c": list(range(2000, 2007))}
WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}


class Stream(IterableDataset[int]):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(self.numbers)


def mix(kind: Any = list, weights: Any = WEIGHTS, **options: Any) -> Mixture:
    sets = {name: kind(numbers) for name, numbers in SETS.items()}
    return Mixture({name: (sets[name], weights[name]) if weights else sets[name] for name in sets}, **options)


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize(("mode", "counts"), [("min_size", (49, 14, 7)), ("max_size_cycle", (105, 30, 15))])
def test_windows_have_exact_shares(kind: Any, mode: str, counts: tuple[int, ...]) -> None:
    found = [number // 1000 for number in mix(kind, mode=mode, window=10)]
    for start in range(0, len(found) - 9, 10):
        assert Counter(found[start : start + 10]) == {0: 7, 1: 2, 2: 1}
    # A stream's end is only found by the draw after its last sample.
    assert len(found) - sum(counts) in (range(10) if kind is Stream else [0])


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("mode", ["max_size", "sequential"])
def test_each_sample_comes_once(kind: Any, mode: str) -> None:
    found = list(mix(kind, None if mode == "sequential" else WEIGHTS, mode=mode))
    assert sorted(found) == [number for numbers in SETS.values() for number in numbers]
    assert ([number // 1000 for number in found] == sorted(number // 1000 for number in found)) == (
        mode == "sequential"
    )


def test_shares_that_no_window_can_hold_are_made_up_for() -> None:
    found = [number // 1000 for number in mix(weights={"a": 1, "b": 1, "c": 1}, window=4, epoch_size=200)]
    for stop in range(4, 200, 4):
        assert all(abs(found[:stop].count(number) - stop / 3) < 1.5 for number in range(3))


def test_own_loader_reads_with_the_sampler() -> None:
    mixture = mix()
    found = [
        int(number) for batch in DataLoader(mixture, 7, sampler=mixture.train_sampler(seed=42)) for number in batch
    ]
    assert found == list(mix())
    with pytest.raises(ConfigError, match="sampler"):
        next(iter(DataLoader(mixture, 7)))


@pytest.mark.parametrize(
    ("sets", "options", "match"),
    [
        ({}, {}, "0 sets"),
        ({"a": [1]}, {"mode": "max"}, "The modes are min_size"),
        ({"a": [1]}, {"window": 0}, "window=0"),
        ({"a": ([1], 0.5)}, {"mode": "sequential"}, "datasets alone"),
        ({"a": ([1], 0.0)}, {}, "not all of them 0"),
        ({"a": ([1], -0.5), "b": ([1], 1)}, {}, "from 0"),
        ({"a": ([1], {5: 0.5})}, {}, "begins with update 0"),
        ({"a": [1], "b": Stream([1])}, {}, "Cannot mix 'a'"),
        ({"a": [1], "b": []}, {}, "Cannot mix 'b'"),
    ],
)
def test_wrong_sets_are_refused(sets: Any, options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Mixture(sets, **options)


def test_empty_stream_is_refused_when_it_is_read_again() -> None:
    mixture = Mixture({"a": Stream(list(range(100))), "b": Stream([])}, mode="max_size_cycle")
    with pytest.raises(TaskError, match="gave no sample"):
        list(mixture)


def test_changes_of_weights_are_checked() -> None:
    with pytest.raises(ConfigError, match="The sets are a, b, c"):
        mix().set_weights({"a": 1})
    with pytest.raises(ConfigError, match="schedule"):
        mix(weights={**WEIGHTS, "a": {0: 1, 9: 0}}).set_weights(WEIGHTS)
