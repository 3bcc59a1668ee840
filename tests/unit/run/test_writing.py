"""Checkpoints written while training goes on."""

from __future__ import annotations

import builtins
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_rows
from support.writes import At, Gate, make_trainer, same_files

from hftrain import CheckpointError, SavePolicy, Trainer
from hftrain.checkpoint.manifest import list_checkpoints, verify
from hftrain.checkpoint.weights import read_weights
from hftrain.core.signatures import Hooks
from hftrain.extras import background
from hftrain.extras.background import HostCopies

ASYNC = SavePolicy(save_async=True)


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}, {"save_safetensors": False}], ids=str)
def test_async_save_writes_the_same_files(tmp_path: Path, options: dict[str, Any]) -> None:
    make_trainer(tmp_path / "now", At(2, 4, 5), **options).train()
    make_trainer(tmp_path / "later", At(2, 4, 5), policy=ASYNC, **options).train()
    same_files(tmp_path / "later", tmp_path / "now")
    for path in list_checkpoints(tmp_path / "later"):
        verify(path)


def test_async_save_is_of_its_step_however_far_training_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    steps = At(2, do={8: gate.opened.set})
    make_trainer(tmp_path, steps, policy=ASYNC).train()
    assert gate.threads[0] is not threading.main_thread()
    saved = read_weights(tmp_path / "checkpoint-2")
    assert not torch.equal(saved["layers.0.weight"], steps.weights[8]["layers.0.weight"])
    for name, value in saved.items():
        assert torch.equal(value, steps.weights[2][name]), name
    verify(tmp_path / "checkpoint-2")


def test_async_save_reaches_the_disk_in_another_thread_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stall counted, not timed: while a step saves, the main thread opens, flushes and renames nothing."""
    touched: list[str] = []

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            is_journal = str(args[0]).endswith("journal.jsonl")  # which gets a line
            if is_saving and not is_journal and threading.current_thread() is threading.main_thread():
                touched.append(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    is_saving = False
    save = Trainer._save_checkpoint

    def note_save(*args: Any) -> None:
        nonlocal is_saving
        is_saving = True
        save(*args)
        is_saving = False

    trainer = make_trainer(tmp_path, At(3), policy=ASYNC)
    monkeypatch.setattr(Trainer, "_save_checkpoint", note_save)
    monkeypatch.setattr(Hooks, "is_overridden", lambda self, *names: False)
    for module, names in ((builtins, ("open",)), (os, ("open", "fsync", "rename", "replace", "mkdir", "unlink"))):
        for name in names:
            watch(module, name)
    watch(torch, "save")
    trainer.train()
    assert (tmp_path / "checkpoint-3").is_dir()
    assert touched == []


def test_first_async_save_finds_its_memory_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall counted, not timed: no tensor of model and optimizer waits for new memory, at any save."""
    made: list[tuple[str, int]] = []
    make = HostCopies._allocate

    def note(self: HostCopies, like: torch.Tensor, *, is_pinned: bool) -> torch.Tensor:
        made.append((threading.current_thread().name, like.numel()))
        return make(self, like, is_pinned=is_pinned)

    def join() -> None:
        for thread in threading.enumerate():
            if thread.name == "hftrain-reserve":
                thread.join()
        reserved.extend(made)
        made.clear()

    reserved: list[tuple[str, int]] = []
    monkeypatch.setattr(HostCopies, "_allocate", note)
    # Whole batches: none of their tensors has the size of a parameter.
    trainer = make_trainer(tmp_path, At(5, 7, do={4: join}), policy=ASYNC, train_dataset=make_rows(24))
    trainer.train()
    sizes = sorted(parameter.numel() for parameter in trainer.model.parameters())
    assert {name for name, _ in reserved} == {"hftrain-reserve"}
    assert sorted(size for _, size in reserved) == sorted([*(3 * sizes), *([1] * len(sizes))])  # and the step numbers
    # Random numbers and the like.
    assert [size for _, size in made if size in sizes and size > 1] == []


def test_async_save_tells_callbacks_later_and_of_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    steps = At(2, do={5: gate.opened.set})
    trainer = make_trainer(tmp_path, steps, policy=ASYNC)
    trainer.train()
    assert [saved for saved, _ in steps.told] == [2, 12]
    assert steps.told[0][1] >= 5
    assert trainer.state.global_step == 12


def test_async_save_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(background, "_SHORT_WAIT_S", 0.0)
    steps = At(2, 4, 6, do={4: lambda: threading.Timer(0.2, gate.opened.set).start()})
    make_trainer(tmp_path, steps, policy=ASYNC).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (2, 4, 6, 12)]
    assert steps.told[0] == (2, 4)
    assert sum("waited" in record.getMessage() for record in caplog.records) == 1


def refuse_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr("hftrain.storage.files.commit", fail)


def test_async_error_is_raised_within_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    refuse_commits(monkeypatch)

    def open_and_wait() -> None:
        assert gate.reached.wait(60)
        gate.opened.set()
        gate.threads[0].join()

    steps = At(2, do={5: open_and_wait})
    trainer = make_trainer(tmp_path, steps, policy=ASYNC)
    with pytest.raises(CheckpointError, match=r"Cannot write .*checkpoint-2\..*not allowed"):
        trainer.train()
    assert steps.step == 5
    assert list(tmp_path.iterdir()) == []


def test_async_error_of_the_last_save_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, policy=ASYNC)
    refuse_commits(monkeypatch)
    with pytest.raises(CheckpointError, match=r"Cannot write .*checkpoint-12\."):
        trainer.train()


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_error_in_training_waits_for_the_write_and_comes_before_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_refused: bool
) -> None:
    gate = Gate(monkeypatch)

    def fail() -> None:
        threading.Timer(0.2, gate.opened.set).start()
        raise ArithmeticError

    if is_refused:
        refuse_commits(monkeypatch)
    with pytest.raises(ArithmeticError):
        make_trainer(tmp_path, At(2, do={4: fail}), policy=ASYNC).train()
    assert ("could not be written in the background" in caplog.text) == is_refused
    if not is_refused:
        verify(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("resume", [None, True])
def test_an_interrupt_does_not_wait_for_the_write_and_the_next_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, resume: bool | None
) -> None:
    gate = Gate(monkeypatch)

    def interrupt() -> None:
        assert gate.reached.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, At(2, do={4: interrupt}), policy=ASYNC).train()
    assert gate.threads[0].is_alive()
    assert list_checkpoints(tmp_path) == []
    # A run that began now would take the half-written checkpoint for one that a kill has left, and delete it.
    threading.Timer(0.2, gate.opened.set).start()
    later = At()
    make_trainer(tmp_path, later).train(resume_from_checkpoint=resume)
    assert not gate.threads[0].is_alive()
    assert "Waiting for the checkpoint that the interrupted run still writes" in caplog.text
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-12"]
    assert min(later.weights) == (3 if resume else 1)


def test_async_save_leaves_an_own_rotation_to_the_main_thread(tmp_path: Path) -> None:
    class Keeping(Trainer):
        def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
            rotated.append((self.state.global_step, threading.current_thread() is threading.main_thread()))

    rotated: list[tuple[int, bool]] = []
    make_trainer(tmp_path, At(2, 4), policy=ASYNC, save_total_limit=1, kind=Keeping).train()
    assert rotated == [(2, True), (4, True), (12, True)]
    assert len(list_checkpoints(tmp_path)) == 3


@pytest.mark.parametrize("hook", ["save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler"])
def test_own_writing_is_done_at_once_with_one_warning(
    tmp_path: Path, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    def own(self: Trainer, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return getattr(Trainer, hook)(self, *args, **options)

    threads: list[threading.Thread] = []
    steps = At(2, 4)
    make_trainer(tmp_path, steps, policy=ASYNC, kind=type("Own", (Trainer,), {hook: own})).train()
    assert set(threads) == {threading.main_thread()}
    assert steps.told == [(2, 2), (4, 4), (12, 12)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"Own.{hook} writes" in warnings[0]


@pytest.mark.parametrize("attribute", ["strategy", "model"])
def test_what_others_write_is_written_at_once(
    tmp_path: Path, attribute: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, policy=ASYNC)
    if attribute == "strategy":
        monkeypatch.setattr(type(trainer.strategy), "saves_in_background", False)
    else:
        quantizer = type("Quantizer", (), {"is_qat_trainable": True})  # a stand-in for transformers' own
        monkeypatch.setattr(Net, "hf_quantizer", quantizer, raising=False)
    trainer.train()
    assert "save_async=True changes nothing" in caplog.text
    verify(tmp_path / "checkpoint-12")


def test_async_save_can_be_asked_for_without_a_save_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    make_trainer(tmp_path, At(3), policy=ASYNC, save_strategy="no").train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3"]
    assert gate.threads[0] is not threading.main_thread()
