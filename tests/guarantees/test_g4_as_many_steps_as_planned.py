"""G4: a run never ends normally with fewer steps than planned, and never does one more, however it is resumed.

Runs are stopped and resumed in another shape. What is planned is a number of passes: each sample of the data once in
each pass, whatever the batches; or, with `max_steps`, a number of updates.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.stateful import Placed
from support.tiny import Net, Stream, make_arguments, on_tensor_ranks
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from hftrain import CheckpointError, Trainer, TrainerCallback, set_seed

NUM = 22
EACH = dict.fromkeys(range(NUM), 1)


class Counted(Dataset[dict[str, torch.Tensor]]):
    """Samples that are known by a number, and that count how often they are read."""

    def __init__(self, num: int = NUM) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num, 4, generator=generator)
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.num_reads += 1
        return {"x": self.x[index], "labels": torch.tensor(index % 3), "id": torch.tensor(index)}


class Recorder(Trainer):
    seen: dict[int, list[int]]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        batch = {name: value for name, value in inputs.items() if name != "input_ids"}
        self.seen.setdefault(self._session.progress.epoch, []).extend(batch.pop("id").tolist())
        return super().training_step(model, batch, num_items_in_batch)


def make(folder: Path, batch: int, accumulation: int = 1, *callbacks: TrainerCallback, **options: Any) -> Recorder:
    set_seed(1)
    data = options.pop("data", None)
    kind, strategy = options.pop("kind", Recorder), options.pop("strategy", None)
    defaults: dict[str, Any] = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1000}
    args = make_arguments(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        remove_unused_columns=False,
        **{**defaults, **options},
    )
    data = Counted() if data is None else data
    trainer = kind(Net(), args, train_dataset=data, callbacks=list(callbacks), strategy=strategy)
    trainer.seen = {}
    return trainer  # type: ignore[no-any-return]


def run_in_shapes(folder: Path, shapes: Sequence[tuple[int, int]], stops: Sequence[int], **options: Any) -> Recorder:
    """Run a training in several shapes (batch, accumulation), one after the other; return the last with all samples."""
    seen: dict[int, list[int]] = {}
    for index, (shape, stop) in enumerate(itertools.zip_longest(shapes, stops)):
        trainer = make(folder, *shape, *([] if stop is None else [StopAt(stop)]), **options)
        trainer.train(resume_from_checkpoint=index > 0)
        assert stop in (None, trainer.state.global_step)
        for epoch, samples in trainer.seen.items():
            seen.setdefault(epoch, []).extend(samples)
    trainer.seen = seen
    return trainer


def assert_each_pass_is_whole(trainer: Recorder, num_epochs: int = 3, each: dict[int, int] = EACH) -> None:
    assert sorted(trainer.seen) == list(range(num_epochs))
    for samples in trainer.seen.values():
        assert Counter(samples) == each


SHAPES = {
    "batch 2 to 4": ((2, 1), (4, 1)),
    "batch 4 to 2": ((4, 1), (2, 1)),
    "batch 4 to 3": ((4, 1), (3, 1)),
    "accumulation 1 to 3": ((2, 1), (2, 3)),
    "accumulation 3 to 1": ((2, 3), (2, 1)),
    "both": ((5, 2), (2, 3)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stop", [1, 3, 4, 6, 8])
def test_every_pass_reads_each_sample_once(tmp_path: Path, name: str, stop: int) -> None:
    old, new = SHAPES[name]
    resumed = run_in_shapes(tmp_path, SHAPES[name], [stop])
    assert_each_pass_is_whole(resumed)
    # What was left, in windows of the new shape.
    num_batches = math.ceil(NUM / old[0])
    per_epoch = math.ceil(num_batches / old[1])
    epoch, steps = divmod(stop, per_epoch)
    used = min(steps * old[0] * old[1], NUM)
    left = math.ceil(math.ceil((NUM - used) / new[0]) / new[1])
    left += (2 - epoch) * math.ceil(math.ceil(NUM / new[0]) / new[1])
    state = resumed.state
    assert state.global_step == state.max_steps == stop + left
    assert state.epoch == 3.0
    # The schedule has the length of the plan, and so ends at 0.
    lines = [line for line in state.log_history if "learning_rate" in line]
    assert lines[-1]["learning_rate"] == pytest.approx(1e-2 / state.max_steps)
    assert resumed.lr_scheduler.last_epoch == state.max_steps


def test_a_run_changes_its_shape_at_every_stop(tmp_path: Path) -> None:
    resumed = run_in_shapes(tmp_path, [(2, 1), (4, 1), (4, 1), (3, 2), (7, 1)], [3, 5, 6, 10])
    assert_each_pass_is_whole(resumed)
    again = make(tmp_path, 7)
    again.train(resume_from_checkpoint=True)
    assert again.seen == {}


def test_a_changed_run_that_is_resumed_again_equals_one_that_is_not(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        make(tmp_path / name, 2, 1, StopAt(3)).train()
    whole = make(tmp_path / "whole", 4)
    whole.train(resume_from_checkpoint=True)
    make(tmp_path / "parts", 4, 1, StopAt(4)).train(resume_from_checkpoint=True)
    again = make(tmp_path / "parts", 4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == whole.state.global_step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_the_change_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, 2, 1, StopAt(25)).train()
    caplog.clear()
    make(tmp_path, 4).train(resume_from_checkpoint=True)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    # 25 steps: two passes of 11, and 6 samples of the third.
    assert len(said) == 1
    assert "batch_size 2 -> 4" in said[0]
    assert "epoch 2, sample 6 of 22, from which on" in said[0]
    assert "4 steps left, 29 in all (before: 33)" in said[0]


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 3)])
def test_a_finished_run_does_no_further_step(tmp_path: Path, shape: tuple[int, int], caplog: Any) -> None:
    first = make(tmp_path, 2, num_train_epochs=1)
    first.train()
    again = make(tmp_path, *shape, num_train_epochs=1)
    output = again.train(resume_from_checkpoint=True)
    assert (again.seen, output.global_step) == ({}, first.state.global_step)
    assert "0 steps left" in caplog.text or "no step is left" in caplog.text
    for name, value in first.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (3, 2)])
def test_more_passes_train_on(tmp_path: Path, shape: tuple[int, int]) -> None:
    make(tmp_path, 2, num_train_epochs=1).train()
    longer = make(tmp_path, *shape, num_train_epochs=3)
    longer.train(resume_from_checkpoint=True)
    assert [Counter(longer.seen[epoch]) for epoch in (1, 2)] == [EACH, EACH]
    assert 0 not in longer.seen


@pytest.mark.parametrize("passes", [1.5, 2.25])
@pytest.mark.parametrize("stop", [2, 11, 13])
def test_a_part_of_a_pass_ends_where_it_would_have(tmp_path: Path, passes: float, stop: int) -> None:
    resumed = run_in_shapes(tmp_path, [(2, 1), (4, 1)], [stop], num_train_epochs=passes)
    num_samples = sum(map(len, resumed.seen.values()))
    # Up to the next batch's end in the new shape.
    assert passes * NUM <= num_samples <= passes * NUM + 4
    assert max(Counter(resumed.seen[0]).values()) == 1
    assert len(resumed.seen[0]) == NUM


@pytest.mark.parametrize(("before", "after"), [((2, 1), (4, 1)), ((4, 1), (2, 3))])
def test_max_steps_are_what_they_say(tmp_path: Path, before: tuple[int, int], after: tuple[int, int]) -> None:
    make(tmp_path, *before, StopAt(5), max_steps=8).train()
    resumed = make(tmp_path, *after, max_steps=20)
    assert resumed.train(resume_from_checkpoint=True).global_step == 20
    again = make(tmp_path, *after, max_steps=20)
    assert again.train(resume_from_checkpoint=True).global_step == 20
    assert again.seen == {}


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_samples_that_fill_no_batch_stay_out(tmp_path: Path, stop: int) -> None:
    resumed = run_in_shapes(tmp_path, [(8, 1), (3, 1)], [stop], dataloader_drop_last=True)
    for epoch, samples in resumed.seen.items():
        assert max(Counter(samples).values()) == 1
        # A pass that was over in the old shape is over.
        expected = 16 if stop >= 2 * (epoch + 1) else 21 if stop <= 2 * epoch else 8 + 12
        assert len(samples) == expected


def test_workers_go_on_at_the_sample(tmp_path: Path) -> None:
    resumed = run_in_shapes(tmp_path, [(2, 1), (4, 1)], [3], num_train_epochs=2, dataloader_num_workers=2)
    assert_each_pass_is_whole(resumed, 2)


@pytest.mark.parametrize("batch", [2, 4])
def test_what_was_trained_on_is_not_read_again(tmp_path: Path, batch: int) -> None:
    make(tmp_path, 2, 1, StopAt(25)).train()
    resumed = make(tmp_path, batch)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.train_dataset.num_reads == NUM - 6


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.rows)


@pytest.mark.parametrize("batch", [2, 3, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_at_the_sample(tmp_path: Path, batch: int, workers: int) -> None:
    rows = [Counted()[index] for index in range(NUM)]
    options = {"dataloader_num_workers": workers, "num_train_epochs": 2}
    resumed = run_in_shapes(tmp_path, [(2, 1), (batch, 1)], [3], data=Sized(rows), **options)
    assert_each_pass_is_whole(resumed, 2)


class SizedPlaced(Placed):
    """It tells where it is, and how long."""

    def __len__(self) -> int:
        return len(self.rows)


@pytest.mark.parametrize("batch", [2, 4])
def test_a_stream_with_a_state_goes_on_from_it(tmp_path: Path, batch: int, caplog: Any) -> None:
    rows = [Counted()[index] for index in range(NUM)]
    first = make(tmp_path, 2, 1, StopAt(14), data=SizedPlaced(rows))
    first.train()
    caplog.clear()
    resumed = make(tmp_path, batch, data=SizedPlaced(rows))
    resumed.train(resume_from_checkpoint=True)
    assert first.seen[1] + resumed.seen[1] == resumed.seen[2] == list(range(NUM))
    assert resumed.train_dataset.num_reads == NUM - 6 + NUM
    assert len(caplog.records) == (batch != 2)


def test_a_stream_without_length_goes_on_at_the_sample(tmp_path: Path) -> None:
    rows = [Counted()[index] for index in range(NUM)]
    resumed = run_in_shapes(tmp_path, [(2, 1), (4, 1)], [14], data=Stream(rows), max_steps=18)
    assert resumed.state.global_step == 18
    # 11 batches of 2; then 3 of 2 and 4 of 4.
    assert (resumed.seen[0], resumed.seen[1]) == (list(range(NUM)), list(range(NUM)))


class CutFirst(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            control.should_epoch_stop = True


@pytest.mark.parametrize("batch", [4, 2])
def test_a_run_with_a_pass_cut_short_has_as_many_passes(tmp_path: Path, batch: int) -> None:
    whole = make(tmp_path / "whole", 4, 1, CutFirst())
    whole.train()
    make(tmp_path / "parts", 4, 1, CutFirst(), StopAt(4)).train()
    resumed = make(tmp_path / "parts", batch, 1, CutFirst())
    resumed.train(resume_from_checkpoint=True)
    assert resumed._session is None
    assert len(resumed.seen[2]) == NUM
    assert sorted(resumed.seen) == [1, 2]
    if batch == 4:
        assert resumed.state.global_step == whole.state.global_step == 2 + 6 + 6


# -- what would lose the position is refused ---------------------------------------------------------------------------


class OwnBatches(Recorder):
    """Brings batches of sizes that nobody knows beforehand."""

    def get_train_dataloader(self) -> Any:
        class Ragged(BatchSampler):
            def __iter__(self) -> Any:
                yield from ([0], [1, 2, 3], [4, 5], [6, 7, 8, 9])

            def __len__(self) -> int:
                return 4

        return DataLoader(self.train_dataset, batch_sampler=Ragged(RandomSampler(range(10)), 4, False))


REFUSED = {
    "data_seed=7": {"data_seed": 7},
    "samples=24": {"data": Counted(24)},
    "drop_last=True": {"dataloader_drop_last": True},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("batch", [2, 4])
def test_a_run_whose_position_would_be_lost_is_refused(tmp_path: Path, name: str, batch: int) -> None:
    make(tmp_path, 2, 1, StopAt(3)).train()
    with pytest.raises(CheckpointError, match=name):
        make(tmp_path, batch, **REFUSED[name]).train(resume_from_checkpoint=True)


def test_a_run_in_another_precision_does_as_many_steps_as_planned(tmp_path: Path) -> None:
    make(tmp_path, 2, 1, StopAt(3)).train()
    resumed, whole = make(tmp_path, 2, bf16=True), make(tmp_path / "whole", 2)
    assert resumed.train(resume_from_checkpoint=True).global_step == whole.train().global_step


def test_another_order_by_length_is_refused(tmp_path: Path) -> None:
    options = {"group_by_length": True, "length_column_name": None}
    for batch, accumulation, stop in ((4, 1, 2), (2, 2, 4)):
        trainer = make(tmp_path, batch, accumulation, StopAt(stop), data=Lengthy(), **options)
        trainer.train(resume_from_checkpoint=batch == 2)
    with pytest.raises(CheckpointError, match=r"grouping=2 \(the checkpoint has 4\)"):
        make(tmp_path, 2, 1, data=Lengthy(), **options).train(resume_from_checkpoint=True)


class Lengthy(Counted):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "input_ids": torch.arange(1 + index % 5)[:1].repeat(3)}


def test_batches_of_unknown_sizes_keep_their_number(tmp_path: Path) -> None:
    make(tmp_path, 4, 1, StopAt(2), kind=OwnBatches).train()
    with pytest.raises(CheckpointError, match="batch_size=2"):
        make(tmp_path, 2, kind=OwnBatches).train(resume_from_checkpoint=True)
    resumed = make(tmp_path, 4, 2, kind=OwnBatches)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.seen[0], len(resumed.seen[1])) == ([4, 5, 6, 7, 8, 9], 10)


def test_a_stream_of_several_workers_keeps_its_batches(tmp_path: Path) -> None:
    rows = [Counted()[index] for index in range(NUM)]
    options = {"dataloader_num_workers": 2, "max_steps": 8, "data": Stream(rows)}
    make(tmp_path, 2, 1, StopAt(3), **options).train()
    with pytest.raises(CheckpointError, match=r"batch_size=4 \(the checkpoint has 2\)"):
        make(tmp_path, 4, **options).train(resume_from_checkpoint=True)


# -- several processes -------------------------------------------------------------------------------------------------


def train_part(
    folder: str,
    batch: int,
    stop: int | None,
    resume: bool,
    kind: str = "map",
    dispatch: bool | None = None,
    mesh: bool = False,
) -> tuple[dict[int, list[int]], int]:
    """Train until a step, or to the end; answer with this rank's samples of each pass, and the step reached."""
    rows = [Counted()[index] for index in range(NUM)]
    data = {"map": Counted(), "sized": Sized(rows), "placed": SizedPlaced(rows)}[kind]
    options = {"num_train_epochs": 2, "accelerator_config": {"dispatch_batches": dispatch}, "data": data}
    options["strategy"] = on_tensor_ranks() if mesh else None
    trainer = make(Path(folder), batch, 1, *([] if stop is None else [StopAt(stop)]), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.seen, trainer.state.global_step


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "after", "data"),
    [
        ((1, 4), (2, 4), {}),
        ((2, 3), (1, 4), {}),
        ((2, 2), (1, 4), {"kind": "placed"}),
        ((1, 3), (2, 2), {"kind": "sized"}),
        ((2, 3), (1, 4), {"kind": "placed", "dispatch": False}),
    ],
    ids=str,
)
def test_another_number_of_ranks_reads_each_sample_once(
    tmp_path: Path, launch_distributed: Any, before: tuple[int, int], after: tuple[int, int], data: dict[str, Any]
) -> None:
    seen: dict[int, list[int]] = {}
    for (num_ranks, batch), stop in ((before, 3), (after, None)):
        options = {"folder": str(tmp_path / "out"), "batch": batch, "stop": stop, "resume": stop is None, **data}
        results = [train_part(**options)] if num_ranks == 1 else run(launch_distributed, options)
        steps = {step for _, step in results}
        for samples, _ in results:
            for epoch, found in samples.items():
                seen.setdefault(int(epoch), []).extend(found)
    used = 3 * before[0] * before[1]
    size = after[0] * after[1]
    assert steps == {3 + math.ceil((NUM - used) / size) + math.ceil(NUM / size)}
    assert sorted(seen) == [0, 1]
    for found in seen.values():
        assert set(found) == set(range(NUM))
        # The last round is filled up, so that all ranks get as many; nothing else is read twice.
        assert len(found) - NUM < size


@pytest.mark.distributed
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)], ids=str)
def test_tensor_ranks_read_each_sample_once(tmp_path: Path, launch_distributed: Any, before: int, after: int) -> None:
    seen: dict[str, list[int]] = {}
    for num_ranks, batch, stop in ((before, 3, 3), (after, 4, None)):
        options = {"folder": str(tmp_path / "out"), "batch": batch, "stop": stop, "resume": stop is None}
        options["mesh"] = num_ranks == 2
        results = [train_part(**options)] if num_ranks == 1 else run(launch_distributed, options)
        samples, steps = results[0]
        assert results == [results[0]] * num_ranks
        for epoch, found in samples.items():
            seen.setdefault(str(epoch), []).extend(found)
    assert steps == 3 + math.ceil((NUM - 9) / 4) + math.ceil(NUM / 4)
    assert [Counter(seen[epoch]) for epoch in ("0", "1")] == [EACH, EACH]


def run(launch_distributed: Any, options: dict[str, Any]) -> list[Any]:
    ended = launch_distributed(train_part, num_processes=2, kwargs=options, forks=True)
    assert ended.returncode == 0, ended.output
    return list(ended.results)
