"""The modes and shares of a mixture mean what they mean in datasets, torchdata and Lightning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

datasets = pytest.importorskip("datasets")

from hftrain import Mixture  # noqa: E402

pytestmark = pytest.mark.interop

SIZES = {"a": 70, "b": 30, "c": 20}
WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}
STRATEGIES = {
    "min_size": "first_exhausted",
    "max_size_cycle": "all_exhausted",
    "max_size": "all_exhausted_without_replacement",
}
CRITERIA = {
    "min_size": "FIRST_DATASET_EXHAUSTED",
    "max_size_cycle": "CYCLE_UNTIL_ALL_DATASETS_EXHAUSTED",
    "max_size": "ALL_DATASETS_EXHAUSTED",
}


def make_sets(kind: str) -> dict[str, Any]:
    found = {name: datasets.Dataset.from_dict({"x": [f"{name}{i}" for i in range(n)]}) for name, n in SIZES.items()}
    return {name: each.to_iterable_dataset() for name, each in found.items()} if kind == "streams" else found


def read(mixture: Any, kind: str) -> list[str]:
    """Return the samples of a pass, without a shuffle inside the sets."""
    order = mixture if kind == "streams" else map(mixture.__getitem__, mixture.train_sampler(seed=1, shuffle=False))
    return [sample["x"] for sample in order]


def torchdata_pass(mode: str) -> list[str]:
    nodes = pytest.importorskip("torchdata.nodes")
    sources = {name: nodes.IterableWrapper([f"{name}{i}" for i in range(n)]) for name, n in SIZES.items()}
    return list(nodes.Loader(nodes.MultiNodeWeightedSampler(sources, WEIGHTS, stop_criteria=CRITERIA[mode], seed=1)))


def check_pass(found: list[str], mode: str, *, slack: int) -> None:
    """Check when a pass has ended; `slack` is how many samples an exact share may end before a whole pass."""
    times, counts = Counter(found), Counter(sample[0] for sample in found)
    if mode == "max_size":
        assert counts == SIZES
        assert set(times.values()) == {1}
    elif mode == "min_size":
        assert set(times.values()) == {1}
        assert any(counts[name] >= SIZES[name] - slack for name in SIZES)
    else:
        assert len(times) == sum(SIZES.values())
        # It ends when the last set has been read for the first time.
        assert min(counts[name] / SIZES[name] for name in SIZES) <= 1


@pytest.mark.parametrize("kind", ["map", "streams"])
@pytest.mark.parametrize("mode", STRATEGIES)
def test_passes_end_as_in_the_peers_and_shares_are_theirs(kind: str, mode: str) -> None:
    sets = make_sets(kind)
    ours = read(Mixture({name: (sets[name], WEIGHTS[name]) for name in sets}, mode=mode, window=10), kind)
    theirs = datasets.interleave_datasets(
        list(make_sets(kind).values()), probabilities=list(WEIGHTS.values()), seed=1, stopping_strategy=STRATEGIES[mode]
    )
    passes = {"ours": ours, "datasets": [sample["x"] for sample in theirs], "torchdata": torchdata_pass(mode)}
    for name, found in passes.items():
        check_pass(found, mode, slack=0 if name == "ours" else 1)
        # As long as every set has samples, ours has exact shares and theirs are shares on average.
        counts = Counter(sample[0] for sample in found[:60])
        for number, weight in WEIGHTS.items():
            assert abs(counts[number] - 60 * weight) <= (0 if name == "ours" else 12)


@pytest.mark.parametrize("kind", ["map", "streams"])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_equal_weights_take_turns_with_the_same_samples_as_datasets(kind: str, mode: str) -> None:
    ours = read(Mixture(make_sets(kind), mode=mode, window=3), kind)
    theirs = datasets.interleave_datasets(list(make_sets(kind).values()), stopping_strategy=STRATEGIES[mode])
    expected = [sample["x"] for sample in theirs]
    # A stream's end is found by the draw after its last sample.
    assert abs(len(ours) - len(expected)) <= 3
    for start in range(0, min(len(ours), len(expected)) - 2, 3):
        assert sorted(ours[start : start + 3]) == sorted(expected[start : start + 3])


@pytest.mark.parametrize("kind", ["map", "streams"])
def test_sequential_is_concatenation(kind: str) -> None:
    expected = datasets.concatenate_datasets(list(make_sets(kind).values()))
    assert read(Mixture(make_sets(kind), mode="sequential"), kind) == [sample["x"] for sample in expected]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_modes_have_the_names_and_counts_of_lightning(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # its import sets it
    combined = pytest.importorskip("lightning.pytorch.utilities.combined_loader")
    loader = combined.CombinedLoader({name: [f"{name}{i}" for i in range(n)] for name, n in SIZES.items()}, mode)
    theirs: Counter[str] = Counter()
    for batch, _, _ in iter(loader):
        theirs.update(sample[0] for sample in (batch.values() if isinstance(batch, dict) else [batch]) if sample)
    assert Counter(sample[0] for sample in read(Mixture(make_sets("map"), mode=mode, window=3), "map")) == theirs
