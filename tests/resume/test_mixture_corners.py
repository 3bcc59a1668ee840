"""A mixture in unusual company: each combination continues exactly after two stops, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from resume.test_mixture import CHANGES, SIZES, ChangeAt, Position, Recording, Stream, check, rows
from support.resuming import StopAt, assert_same, outcome
from support.tiny import make_arguments, make_rows
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hftrain import (
    ConfigError,
    GradientAccumulationScheduler,
    Mixture,
    Trainer,
    TrainerCallback,
    pack_dataset,
    set_seed,
)

KINDS = pytest.mark.parametrize("make", [rows, Stream, Position], ids=["rows", "stateless", "stateful"])
Seen = list[tuple[int, int]]


def mix(make: Any = rows, weights: Sequence[Any] = (0.7, 0.2, 0.1), **options: Any) -> Mixture:
    sets = {name: (make(name), weight) for name, weight in zip(SIZES, weights, strict=True)}
    return Mixture(sets, **{"window": 6, "epoch_size": 28, **options})


def train(
    folder: Path,
    mixture: Mixture,
    *callbacks: Any,
    stop: int | None = None,
    resume: bool = False,
    kind: type[Trainer] = Trainer,
    limits: Any = None,
    **options: Any,
) -> tuple[Trainer, Seen]:
    set_seed(1)
    arguments = make_arguments(folder, **{"save_strategy": "steps", "save_steps": 1000, "max_steps": 21, **options})
    task = Recording()
    trainer = kind(task, arguments, train_dataset=mixture, callbacks=[StopAt(stop), *callbacks], **(limits or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, task.seen


def check_stops(
    folder: Path,
    make: Callable[[], Mixture],
    stops: tuple[int, int],
    callback: Callable[[Mixture], TrainerCallback] | None = None,
    **options: Any,
) -> Seen:
    """Compare a run that is stopped twice with one that is not."""

    def run(name: str, **more: Any) -> tuple[Trainer, Seen]:
        mixture = make()
        return train(folder / name, mixture, *([callback(mixture)] if callback else []), **more, **options)

    whole, seen = run("whole")
    parts: Seen = []
    for stop in (*stops, None):
        last, found = run("parts", stop=stop, resume=bool(parts))
        parts += found
    assert parts == seen
    assert_same(outcome(last), outcome(whole))
    return seen


def assert_whole_passes(seen: Seen) -> None:
    """Check that in each pass of a set, each of its samples comes once."""
    for number, size in enumerate(SIZES.values()):
        places = [place for found, place in seen if found == number]
        assert all(len({*places[at : at + size]}) == len(places[at : at + size]) for at in range(0, len(places), size))


@KINDS
def test_logs_at_the_end_of_a_pass_count_it_once(tmp_path: Path, make: Any) -> None:
    trainer, seen = train(tmp_path, mix(make), logging_strategy="epoch")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    for number, line in enumerate(lines, start=1):
        counts = Counter(found for found, _ in seen[: 28 * number])
        assert [line[f"mixture_{name}_samples"] for name in SIZES] == [counts[found] for found in range(3)]
    assert len(lines) == 3


class ByEpoch(TrainerCallback):
    WEIGHTS = ((0.7, 0.2, 0.1), (0, 0.5, 0.5), (0.2, 0.2, 0.6))

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def change(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.mixture.set_weights(dict(zip(SIZES, self.WEIGHTS[min(2, int(state.epoch or 0))], strict=True)))


class AtBegin(ByEpoch):
    on_epoch_begin = ByEpoch.change


class AtEnd(ByEpoch):
    on_epoch_end = ByEpoch.change


@KINDS
@pytest.mark.parametrize("kind", [AtBegin, AtEnd])
@pytest.mark.parametrize("stops", [(7, 14), (5, 10), (9, 12)], ids=str)
def test_weights_of_each_pass_continue_exactly(tmp_path: Path, make: Any, kind: Any, stops: tuple[int, int]) -> None:
    seen = check_stops(tmp_path, lambda: mix(make, mode="max_size_cycle"), stops, kind)
    assert {number for number, _ in seen[28:56]} == {1, 2}


@pytest.mark.parametrize("stops", [(7, 14), (5, 10)], ids=str)
def test_weights_of_each_pass_reach_persistent_workers(tmp_path: Path, stops: tuple[int, int]) -> None:
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    check_stops(tmp_path, lambda: mix(mode="max_size_cycle"), stops, AtEnd, **options)


class FromTheStart(ByEpoch):
    on_train_begin = ByEpoch.change


def test_weights_set_when_a_training_begins_hold_after_a_resume(tmp_path: Path) -> None:
    check_stops(tmp_path, mix, (5, 6), FromTheStart, num_train_epochs=1, max_steps=-1)


def test_weights_set_between_two_trainings_hold_in_the_second(tmp_path: Path) -> None:
    mixture = mix()
    train(tmp_path / "first", mixture, max_steps=9)
    mixture.set_weights({"web": 0, "code": 1, "math": 0})
    assert {number for number, _ in train(tmp_path / "second", mixture, max_steps=3)[1]} == {1}


# 7 batches: updates of 3, 3 and 1.
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["changed", "scheduled"])
@pytest.mark.parametrize("stops", [(3, 6), (2, 4)], ids=str)
def test_short_last_update_continues_exactly(tmp_path: Path, workers: int, kind: str, stops: tuple[int, int]) -> None:
    options = {"num_train_epochs": 3, "gradient_accumulation_steps": 3, "dataloader_num_workers": workers}
    check(tmp_path, stops, kind=kind, **options)


def test_schedule_follows_updates_over_a_short_one(tmp_path: Path) -> None:
    mixture = mix(weights=({0: 1, 4: 0}, {0: 0, 4: 1}, 0))
    _, seen = train(tmp_path, mixture, num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=3)
    # The fifth update begins with the eleventh batch.
    assert {(place // 4 >= 10, number) for place, (number, _) in enumerate(seen)} == {(False, 0), (True, 1)}


@pytest.mark.parametrize("make", [rows, Stream])
@pytest.mark.parametrize("workers", [0, 2])
def test_limited_passes_continue_exactly(tmp_path: Path, make: Any, workers: int) -> None:
    options = {"limits": {"limit_train_batches": 5}, "dataloader_num_workers": workers, "max_steps": 15}
    seen = check_stops(tmp_path, lambda: mix(make), (5, 8), **options)
    if make is rows:
        assert_whole_passes(seen)


@pytest.mark.parametrize("make", [rows, Stream])
def test_overfitting_reads_the_same_batches(tmp_path: Path, make: Any) -> None:
    seen = check_stops(tmp_path, lambda: mix(make), (4, 7), limits={"overfit_batches": 3}, max_steps=9)
    assert seen[:12] == seen[12:24] == seen[24:]


def test_overfitting_with_other_weights_is_refused(tmp_path: Path) -> None:
    options = {"limits": {"overfit_batches": 3}, "max_steps": 9}
    with pytest.raises(ConfigError, match="overfit_batches"):
        train(tmp_path / "a", mix(weights=(0.7, 0.2, {0: 0, 4: 1})), **options)
    mixture = mix()
    with pytest.raises(ConfigError, match="overfit_batches"):
        train(tmp_path / "b", mixture, ChangeAt(mixture, {5: {"web": 0, "code": 1, "math": 1}}), **options)


@pytest.mark.parametrize("kind", ["changed", "scheduled"])
def test_persistent_workers_continue_exactly(tmp_path: Path, kind: str) -> None:
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "num_train_epochs": 3}
    check(tmp_path, (7, 9), kind=kind, **options)


class OwnBatches(BatchSampler):
    """Batches of a size that nobody can know."""

    def __iter__(self) -> Iterator[list[int]]:
        return super().__iter__()


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        dataset: Any = self.train_dataset
        return DataLoader(dataset, batch_sampler=OwnBatches(dataset.train_sampler(seed=42), 4, False))


@pytest.mark.parametrize("changes", [{}, CHANGES])
def test_own_batches_continue_exactly(tmp_path: Path, changes: Any) -> None:
    def callback(mixture: Mixture) -> TrainerCallback:
        return ChangeAt(mixture, changes)

    assert_whole_passes(check_stops(tmp_path, mix, (7, 12), callback, kind=OwnLoader))


def test_schedule_with_unknown_batches_is_refused(tmp_path: Path) -> None:
    scheduled = mix(weights=(0.7, 0.2, {0: 0, 4: 1}))
    with pytest.raises(ConfigError, match="by its own loader"):
        train(tmp_path / "a", scheduled, kind=OwnLoader)
    growing = GradientAccumulationScheduler({0: 1, 2: 2})
    with pytest.raises(ConfigError, match="unknown"):
        train(tmp_path / "b", scheduled, growing, max_steps=8, gradient_accumulation_steps=2)


class Copying(TrainerCallback):
    """Copies the mixture while it is read, as workers that do not fork receive it."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for found in (pickle.loads(pickle.dumps(self.mixture)), copy.deepcopy(self.mixture)):
            assert found.state() == self.mixture.state()
            assert getattr(found, "state_dict", found.state).__self__ is found
            assert next(iter(found))["x"].shape == (4,)


@KINDS
def test_mixture_can_be_sent_to_workers_during_a_training(tmp_path: Path, make: Any) -> None:
    mixture = mix(make)
    assert len(train(tmp_path, mixture, Copying(mixture), max_steps=9)[1]) == 36


@pytest.mark.parametrize("options", [{"window": 7}, {"mode": "max_size_cycle"}], ids=str)
def test_resume_with_another_mixture_is_refused(tmp_path: Path, options: Any) -> None:
    train(tmp_path, mix(), stop=3)
    with pytest.raises(ConfigError, match="Cannot resume with a mixture"):
        train(tmp_path, mix(**options), resume=True)


def test_resume_with_a_set_that_has_grown_is_refused(tmp_path: Path) -> None:
    train(tmp_path, mix(), stop=3)
    with pytest.raises(ConfigError, match="lengths"):
        train(tmp_path, mix(lambda name: [*rows(name), *make_rows(1)]), resume=True)


def test_one_trainer_continues_its_own_mixture(tmp_path: Path) -> None:
    _, seen = train(tmp_path / "whole", mix())
    set_seed(1)
    task, stop, arguments = Recording(), StopAt(5), {"save_strategy": "steps", "save_steps": 1000, "max_steps": 21}
    trainer = Trainer(task, make_arguments(tmp_path / "parts", **arguments), train_dataset=mix(), callbacks=[stop])
    for at, next_stop in ((5, 9), (9, None), (None, None)):
        trainer.train(resume_from_checkpoint=at != 5)
        stop.step = next_stop
    assert task.seen == seen


class Documents(IterableDataset[Any]):
    def __init__(self, token: int) -> None:
        self.token = token

    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": [self.token] * (3 + place % 3)} for place in range(30)])


def test_rows_are_packed_of_a_mixture_whose_weights_stay() -> None:
    mixture = Mixture({"one": Documents(1), "two": Documents(2)}, window=2)
    tokens = Counter(token for row in pack_dataset(mixture, 8) for token in row["input_ids"].tolist())
    assert tokens[1] == 120
    assert abs(tokens[2] - 120) <= 5
    with pytest.raises(ConfigError, match="Pack the sets"):
        next(iter(pack_dataset(Mixture({"one": (Documents(1), {0: 1, 9: 2}), "two": Documents(2)}), 8)))
    with pytest.raises(ConfigError, match="a dataset around the mixture"):
        mixture.set_weights({"one": 1, "two": 2})


def test_samples_are_not_grouped_by_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Its own sampler decides"):
        train(tmp_path, mix(), train_sampling_strategy="group_by_length")


def test_very_different_sizes_are_read_to_the_end() -> None:
    sets: dict[str, Any] = {"one": [-1], "many": list(range(5000))}
    assert len(list(Mixture(sets, mode="max_size_cycle"))) == 10_000
    assert sorted(Mixture(sets, mode="max_size")) == list(range(-1, 5000))
    assert sorted(Mixture({"one": ([-1], 1), "many": (range(50), 0)}, mode="max_size")) == list(range(-1, 50))


@pytest.mark.parametrize("make", [rows, Stream])
def test_rehearsal_leaves_a_scheduled_mixture_as_it_was(tmp_path: Path, make: Any) -> None:
    weights = (0.7, 0.2, {0: 0, 4: 1})
    _, seen = train(tmp_path / "whole", mix(make, weights), max_steps=9)
    mixture = mix(make, weights)
    train(tmp_path / "rehearsal", mixture, limits={"fast_dev_run": 2}, max_steps=9)
    assert train(tmp_path / "after", mixture, max_steps=9)[1] == seen
