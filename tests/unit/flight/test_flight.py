"""The flight log: what its lines say, that a resume goes on in it, and that nothing else changes; excluded samples."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import Stop, assert_same, outcome
from support.tiny import Net, make_arguments, make_rows
from torch.nn import functional as F

from hftrain import ConfigError, FlightLog, Trainer, TrainerCallback, set_seed
from hftrain.extras.flight.reading import read_ledger, read_sessions

NUM_ROWS, SIZE = 50, 4


def make(folder: Path, *callbacks: Any, rows: Any = None, **options: Any) -> Trainer:
    set_seed(3)
    own = {name: options.pop(name) for name in ("flight_log", "exclude_samples") if name in options}
    settings = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": SIZE,
        "learning_rate": 0.01,
        "save_strategy": "no",
    }
    args = make_arguments(folder, **{**settings, **options})
    rows = make_rows(NUM_ROWS) if rows is None else rows
    return Trainer(Net(dropout=0.1), args, train_dataset=rows, callbacks=list(callbacks), **{"flight_log": True, **own})


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the steps of a single process, without times."""
    return [{name: value for name, value in line.items() if name != "ms"} for (line,) in read_ledger(folder).values()]


class Fail(TrainerCallback):
    """End the run with an error when a step begins."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("as asked")


class Seen(TrainerCallback):
    """Note the content of each micro-batch."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def wrap_parts(self, parts: Any) -> Any:
        train = parts.hooks.training_step

        def step(model: Any, batch: Any, num_items: Any) -> Any:
            self.batches.append(batch["x"].clone())
            return train(model, batch, num_items)

        return replace(parts, hooks=replace(parts.hooks, training_step=step))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"dataloader_num_workers": 2},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"train_sampling_strategy": "sequential", "dataloader_drop_last": True},
    ],
    ids=str,
)
def test_lines_name_the_samples_of_each_step_and_change_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    seen, rows = Seen(), make_rows(NUM_ROWS)
    logged = make(tmp_path / "a", seen, **options)
    logged.train()
    told = [samples for line in lines(tmp_path / "a") for samples in line["samples"]]
    assert len(told) == len(seen.batches)
    for samples, batch in zip(told, seen.batches, strict=True):
        assert torch.equal(torch.stack([rows[index]["x"] for index in samples]), batch)
    plain = make(tmp_path / "b", flight_log=False, **options)
    plain.train()
    assert_same(outcome(logged), outcome(plain))
    assert not (tmp_path / "b" / "flight").exists()


def test_lines_have_the_numbers_of_the_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, logging_steps=1, gradient_accumulation_steps=2)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for line, entry in zip(lines(tmp_path), logs, strict=True):
        assert line["step"] == entry["step"]
        assert sum(line["losses"]) == pytest.approx(entry["loss"], rel=1e-6)
        assert line["norm"] == pytest.approx(entry["grad_norm"])
        assert line["rate"] == pytest.approx(entry["learning_rate"])
        assert line["skipped"] is False
    (times,) = {tuple(line["ms"]) for (line,) in read_ledger(tmp_path).values()}
    assert times == ("data", "forward", "backward", "step")
    assert len({line["weights"] for line in lines(tmp_path)}) == len(logs)


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 2}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_resumed_run_goes_on_in_its_log_twice(tmp_path: Path, options: dict[str, Any]) -> None:
    run = partial(make, save_strategy="steps", save_steps=4, **options)
    run(tmp_path / "whole").train()
    for at in (6, 11, None):  # each is cut after a checkpoint, and the next does those steps again
        with pytest.raises(RuntimeError, match="as asked") if at else nullcontext():
            run(tmp_path / "parts", Fail(at)).train(resume_from_checkpoint=at != 6)
    text = (tmp_path / "parts" / "flight" / "rank0.jsonl").read_text()
    assert [text.count(f'"step": {step},') for step in (4, 5, 6, 7)] == [1, 2, 2, 1]
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_torn_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, max_steps=12).train()
    path = tmp_path / "flight" / "rank0.jsonl"
    whole = lines(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert lines(tmp_path) == whole[:-1]
    path.write_text(path.read_text() + '\n[1]\n{"step": "x"}\n\x00\n')
    assert lines(tmp_path) == whole[:-1]


def test_a_failed_write_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "flight").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="flight log could not be written"):
        make(tmp_path, max_steps=12).train()


def test_files_rotate(tmp_path: Path) -> None:
    make(tmp_path, flight_log=FlightLog(rotate_bytes=2000, flush_every=4)).train()
    packed = sorted((tmp_path / "flight").glob("rank0.*.jsonl.gz"))
    assert len(packed) > 2
    assert json.loads(gzip.decompress(packed[0].read_bytes()).splitlines()[0])["begin"] == 0
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 40))


def test_an_error_loses_no_step_before_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="as asked"):
        make(tmp_path, Fail(7)).train()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 8))


def test_losses_of_samples_are_those_of_the_outputs(tmp_path: Path) -> None:
    log = FlightLog(
        sample_losses=lambda outputs, batch: F.mse_loss(outputs[1], outputs[1].detach() * 0, reduction="none").sum(1)
    )
    make(tmp_path, flight_log=log, max_steps=3).train()
    for line in lines(tmp_path):
        assert [len(each) for each in line["sample_losses"]] == [len(each) for each in line["samples"]]


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 2}, {"gradient_accumulation_steps": 3}], ids=str)
def test_excluded_samples_come_in_no_batch_and_the_others_stay_where_they_were(tmp_path: Path, options: Any) -> None:
    excluded = {1, 7, 30}
    make(tmp_path / "all", **options).train()
    make(tmp_path / "some", exclude_samples=sorted(excluded), **options).train()
    for whole, part in zip(lines(tmp_path / "all"), lines(tmp_path / "some"), strict=True):
        assert part["samples"] == [[each for each in samples if each not in excluded] for samples in whole["samples"]]


def test_a_batch_with_nothing_left_gets_another_sample(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[0, 1, 2, 3, 49]")
    options = {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
    make(tmp_path, exclude_samples=str(path), **options).train()
    assert [line["samples"] for line in lines(tmp_path)][:2] == [[[4]], [[4, 5, 6, 7]]]
    assert lines(tmp_path)[-1]["samples"] == [[48]]


def test_a_list_given_at_a_resume_counts_from_there_on(tmp_path: Path) -> None:
    """Twice in a row, as in a run that had it from the checkpoint on."""
    run = partial(make, save_strategy="steps", save_steps=4)
    run(tmp_path / "a", Stop(4)).train()
    for at in (9, None):
        last = run(tmp_path / "a", Stop(at), exclude_samples=[3, 40])
        last.train(resume_from_checkpoint=True)
    run(tmp_path / "b", Stop(4)).train()
    whole = run(tmp_path / "b", exclude_samples=[3, 40])
    whole.train(resume_from_checkpoint=True)
    assert_same(outcome(last), outcome(whole))
    assert not {3, 40} & {each for line in lines(tmp_path / "a")[4:] for samples in line["samples"] for each in samples}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([NUM_ROWS], "sample 50"),
        ("missing.json", "missing.json"),
        ([True], "whole numbers"),
        (range(NUM_ROWS), "all samples"),
        (3, "whole numbers"),
    ],
)
def test_lists_are_checked(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, exclude_samples=value).train()


def test_data_without_a_length_is_logged(tmp_path: Path) -> None:
    class Endless(torch.utils.data.Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return make_rows(NUM_ROWS)[index]

    class Ordered(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return range(NUM_ROWS)

    args = make_arguments(tmp_path, max_steps=2, per_device_train_batch_size=SIZE)
    Ordered(Net(), args, train_dataset=Endless(), flight_log=True).train()
    assert [line["samples"] for line in lines(tmp_path)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


@pytest.mark.parametrize(
    "settings", [{"flush_every": 0}, {"rotate_bytes": 0}, {"hang_timeout_s": -1.0}, {"on_broken": "ignore"}]
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FlightLog(**settings)


def test_a_session_says_what_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    make(tmp_path, max_steps=1).train()
    (session,) = read_sessions(tmp_path)
    assert session["data"] == {"dataset": "list", "samples": NUM_ROWS, "fingerprint": None}
    assert session["environment"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert session["environment"]["threads"] == torch.get_num_threads()
    assert session["environment"]["device"].startswith("cpu")
