"""A mixture of training sets that is stopped twice draws what it would have drawn, to the sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, assert_same, outcome
from support.tiny import Net, Rows, make_arguments, make_rows
from torch.utils.data import IterableDataset

from hftrain import ConfigError, Mixture, TaskModule, Trainer, TrainerCallback, set_seed

SIZES = {"web": 26, "code": 10, "math": 5}


def rows(name: str) -> Rows:
    """Rows whose third number tells their set, and whose fourth tells their place there."""
    found = make_rows(SIZES[name])
    for place, row in enumerate(found):
        row["x"][2:] = torch.tensor([list(SIZES).index(name), place])
    return found


class Stream(IterableDataset[Any]):
    """A stream without a state that splits itself among workers."""

    def __init__(self, name: str) -> None:
        self.rows = rows(name)

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


class Position(Stream):
    place, is_loaded = 0, False

    def __iter__(self) -> Any:
        mine = list(super().__iter__())
        self.place = self.place if self.is_loaded else 0
        self.is_loaded = False
        while self.place < len(mine):
            self.place += 1
            yield mine[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.is_loaded = state["place"], True


class Recording(TaskModule):
    def __init__(self) -> None:
        super().__init__(Net(dropout=0.2))
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any) -> Any:
        self.seen += [(int(row[2]), int(row[3])) for row in batch["x"]]
        return self.model(**batch)[0]


class ChangeAt(TrainerCallback):
    def __init__(self, mixture: Mixture, changes: dict[int, dict[str, float]]) -> None:
        self.mixture, self.changes = mixture, changes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.changes:
            self.mixture.set_weights(self.changes[state.global_step])


CHANGES = {3: {"web": 1, "code": 1, "math": 0}, 8: {"web": 1, "code": 3, "math": 1}}
SCHEDULE = {0: 0.1, 4: 0.9, "0.7dur": 0.3}


def train(
    folder: Path,
    *,
    make: Any = rows,
    stop: int | None = None,
    resume: bool = False,
    kind: str = "fixed",
    strategy: str | None = None,
    **options: Any,
) -> tuple[Trainer, list[tuple[int, int]]]:
    set_seed(1)
    weights: dict[str, Any] = {"web": 0.7, "code": 0.2, "math": SCHEDULE if kind == "scheduled" else 0.1}
    mode = options.pop("mode", "min_size")
    sets = {name: make(name) if mode == "sequential" else (make(name), weight) for name, weight in weights.items()}
    mixture = Mixture(sets, window=6, mode=mode, epoch_size=options.pop("epoch_size", None))
    callbacks = [StopAt(stop), *([ChangeAt(mixture, CHANGES)] if kind == "changed" else [])]
    if isinstance(mixture, IterableDataset):
        options = {"max_steps": 14, **options}
    arguments = make_arguments(folder, **{"save_strategy": "steps", "save_steps": 1000, **options})
    task = Recording()
    trainer = Trainer(task, arguments, train_dataset=mixture, callbacks=callbacks, strategy=strategy)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, task.seen


def check(folder: Path, stops: tuple[int, int], **options: Any) -> tuple[Trainer, list[tuple[int, int]]]:
    """Compare a run that is stopped twice with one that is not."""
    whole, seen = train(folder / "whole", **options)
    parts: list[tuple[int, int]] = []
    for stop in (*stops, None):
        last, found = train(folder / "parts", stop=stop, resume=bool(parts), **options)
        parts += found
    assert parts == seen
    assert_same(outcome(last), outcome(whole))
    return whole, seen


# A pass over the map-style sets has 7 updates.
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "stops"), [("fixed", (7, 14)), ("changed", (3, 9)), ("scheduled", (5, 8))])
def test_map_style_sets_continue_exactly(tmp_path: Path, kind: str, workers: int, stops: tuple[int, int]) -> None:
    whole, seen = check(tmp_path, stops, kind=kind, dataloader_num_workers=workers, num_train_epochs=3)
    counts = Counter(number for number, _ in seen)
    logs = [line for line in whole.state.log_history if "loss" in line][-1]
    for number, (name, size) in enumerate(SIZES.items()):
        assert logs[f"mixture_{name}_samples"] == counts[number]
        assert logs[f"mixture_{name}_epochs"] == pytest.approx(counts[number] / size)
        # In each pass of a set, each of its samples once.
        places = [place for found, place in seen if found == number]
        passes = [places[at : at + size] for at in range(0, len(places), size)]
        assert all(len(set(each)) == len(each) for each in passes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Stream, Position], ids=["stateless", "stateful"])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size", "sequential"])
def test_streams_continue_exactly(tmp_path: Path, make: Any, workers: int, mode: str) -> None:
    whole, seen = check(tmp_path, (5, 8), make=make, mode=mode, dataloader_num_workers=workers)
    logs = [line for line in whole.state.log_history if "loss" in line][-1]
    counts = Counter(number for number, _ in seen)
    expected = {f"mixture_{name}_samples": counts[number] for number, name in enumerate(SIZES)}
    assert {name: value for name, value in logs.items() if name.endswith("_samples")} == ({} if workers else expected)


@pytest.mark.parametrize(("kind", "workers"), [("changed", 0), ("scheduled", 0), ("scheduled", 2)])
@pytest.mark.parametrize("make", [Stream, Position], ids=["stateless", "stateful"])
def test_streams_with_other_weights_continue_exactly(tmp_path: Path, make: Any, kind: str, workers: int) -> None:
    options: dict[str, Any] = {"make": make, "kind": kind, "dataloader_num_workers": workers, "mode": "max_size_cycle"}
    _, seen = check(tmp_path, (3, 9), **options)
    assert seen != train(tmp_path / "fixed", **{**options, "kind": "fixed"})[1]


@pytest.mark.parametrize(("make", "workers"), [(rows, 0), (rows, 2), (Stream, 0), (Stream, 2)])
def test_scheduled_weights_begin_with_their_update(tmp_path: Path, make: Any, workers: int) -> None:
    sets = {"web": (make("web"), {0: 1, 3: 0, 6: 1}), "code": (make("code"), {0: 0, 3: 1, "0.75dur": 0})}
    arguments = make_arguments(tmp_path, max_steps=8, dataloader_num_workers=workers)
    task = Recording()
    Trainer(task, arguments, train_dataset=Mixture(sets, mode="max_size_cycle")).train()
    found = {(place // 4, number) for place, (number, _) in enumerate(task.seen)}
    assert found == {(step, int(3 <= step < 6)) for step in range(8)}


@pytest.mark.parametrize(("workers", "ahead"), [(0, 1), (2, 4)])
def test_changed_weights_wait_for_what_was_read_ahead(tmp_path: Path, workers: int, ahead: int) -> None:
    mixture = Mixture({"web": (rows("web"), 1), "code": (rows("code"), 0)}, epoch_size=60)
    task = Recording()
    arguments = make_arguments(tmp_path, max_steps=12, dataloader_num_workers=workers)
    change = ChangeAt(mixture, {3: {"web": 0, "code": 1}})
    Trainer(task, arguments, train_dataset=mixture, callbacks=[change]).train()
    assert [number for number, _ in task.seen] == [0] * 4 * (3 + ahead) + [1] * 4 * (12 - 3 - ahead)


def test_changed_weights_of_streams_in_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="that workers read"):
        train(tmp_path, make=Stream, kind="changed", dataloader_num_workers=2)


def test_scheduled_weights_of_streams_in_persistent_workers_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    with pytest.raises(ConfigError, match="stream workers that outlive"):
        train(tmp_path, make=Stream, kind="scheduled", **options)


def test_mixture_of_other_sets_is_refused(tmp_path: Path) -> None:
    train(tmp_path, stop=3)
    mixture = Mixture({"web": rows("web"), "books": rows("code"), "math": rows("math")}, epoch_size=37)
    trainer = Trainer(Recording(), make_arguments(tmp_path), train_dataset=mixture)
    with pytest.raises(ConfigError, match="books"):
        trainer.train(resume_from_checkpoint=True)


def test_second_training_begins_with_the_first_weights(tmp_path: Path) -> None:
    mixture = Mixture({"web": (rows("web"), 1), "code": (rows("code"), 1)})
    seen = []
    for _ in range(2):
        set_seed(1)
        task, change = Recording(), ChangeAt(mixture, {1: {"web": 0, "code": 1}})
        Trainer(task, make_arguments(tmp_path), train_dataset=mixture, callbacks=[change]).train()
        seen.append(task.seen)
    assert seen[0] == seen[1]
