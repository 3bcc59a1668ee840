"""What a checkpoint takes on disk, and what happens when the disk has not got it.

Full disks are real ones where the system lets a test mount a small one; elsewhere those tests are skipped, and the
others, which say what the disk answers, remain.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows
from support.writes import At, make_trainer, wait_for_writes
from torch import nn

from hftrain import CheckpointError, ConfigError, SavePolicy, Trainer
from hftrain.checkpoint import manager, writer
from hftrain.checkpoint.manifest import list_checkpoints, verify
from hftrain.run import contents
from hftrain.run import saving as room
from hftrain.storage import files
from hftrain.storage.tensors import tree_bytes

MODES = pytest.mark.parametrize("save_async", [False, True], ids=["now", "later"])


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def policy(on_full_disk: Any, save_async: bool) -> SavePolicy:
    return SavePolicy(on_full_disk=on_full_disk, save_async=save_async)


def once_written(function: Callable[[], None]) -> Callable[[], None]:
    """Return what waits for a write in the background, and then calls a function."""

    def call() -> None:
        wait_for_writes()
        function()

    return call


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- how much --------------------------------------------------------------------------------------------------------


def wide_net() -> Net:
    net = Net()
    net.layers[0], net.layers[1], net.layers[4] = nn.Linear(4, 90_000), nn.Identity(), nn.Linear(90_000, 3)
    return net


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}, {"optim": "sgd"}], ids=str)
def test_size_is_known_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found: list[int] = []

    def note(*args: Any, **named: Any) -> int:
        found.append(checkpoint_bytes(*args, **named))
        return found[-1]

    checkpoint_bytes = room.checkpoint_bytes
    monkeypatch.setattr(room, "checkpoint_bytes", note)
    trainer = make_trainer(tmp_path, model=wide_net(), max_steps=2, **options)
    trainer.train()
    before_training, predicted, before_saving = found
    assert before_training <= predicted == before_saving
    actual = folder_bytes(tmp_path / "checkpoint-2")
    assert actual <= before_saving <= 1.05 * actual + (1 << 20)


def test_leftovers_of_a_killed_save_are_gone_even_if_nothing_more_is_saved(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    left = [tmp_path / f".{kind}-checkpoint-9-0123abcd" for kind in ("staging", "trash")]
    for folder in left:
        folder.mkdir()
    make_trainer(tmp_path, save_strategy="no").train(resume_from_checkpoint=True)
    assert all(folder.exists() for folder in left), "this run has no business there"
    assert make_trainer(tmp_path).train(resume_from_checkpoint=True).global_step == 12
    assert names(tmp_path) == ["checkpoint-12"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-12", "journal.jsonl"}


# -- a shortage that is foreseen; the disk's answer is a stand-in ------------------------------------------------------


@pytest.fixture
def say_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that sets what the disk says; a function of the number of checkpoints, or a number."""

    def set_answer(answer: Any) -> None:
        def free(folder: Path) -> int:
            return answer(len(list_checkpoints(folder))) if callable(answer) else answer

        for module in (files, manager, writer):
            monkeypatch.setattr(module, "free_bytes", free)

    return set_answer


@pytest.mark.parametrize("on_full_disk", ["warn", "prune", "stop"])
def test_folder_without_room_for_one_is_refused_before_the_first_step(
    tmp_path: Path, say_free: Callable[[Any], None], on_full_disk: Any
) -> None:
    say_free(1000)
    steps = At()
    with pytest.raises(ConfigError, match=r"One takes about 1\.0\d MB, and 1 kB are free there"):
        make_trainer(tmp_path, steps, policy=policy(on_full_disk, False)).train()
    assert steps.step == 0


def test_folder_without_room_for_the_optimizer_is_refused_after_the_first_step(
    tmp_path: Path, say_free: Callable[[Any], None]
) -> None:
    model, steps = wide_net(), At()
    say_free(2 * tree_bytes(model.state_dict()))
    with pytest.raises(ConfigError, match=r"One takes about 9\.\d+ MB, and 5\.\d+ MB are free there"):
        make_trainer(tmp_path, steps, model=model).train()
    assert steps.step == 1


def test_folder_without_room_is_of_no_concern_to_a_run_that_saves_nothing(
    tmp_path: Path, say_free: Callable[[Any], None]
) -> None:
    say_free(0)
    make_trainer(tmp_path, save_strategy="no").train()


def test_resumed_run_with_a_checkpoint_needs_no_room(tmp_path: Path, say_free: Callable[[Any], None]) -> None:
    make_trainer(tmp_path, max_steps=3).train()
    say_free(0)
    resumed = make_trainer(tmp_path, max_steps=6)
    assert resumed.train(resume_from_checkpoint=True).global_step == 6
    assert names(tmp_path) == ["checkpoint-3"]
    with pytest.raises(ConfigError, match="0 B are free"):
        make_trainer(tmp_path, max_steps=9, policy=policy("stop", False)).train(resume_from_checkpoint=True)


@MODES
def test_warn_goes_on_without_the_checkpoint_and_tries_again(
    tmp_path: Path, say_free: Callable[[Any], None], caplog: pytest.LogCaptureFixture, save_async: bool
) -> None:
    say_free(1 << 30)
    steps = At(2, 4, 6, do={3: lambda: say_free(0), 5: lambda: say_free(1 << 30)})
    make_trainer(tmp_path, steps, policy=policy("warn", save_async)).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6", "checkpoint-12"]
    (warning,) = [record.getMessage() for record in caplog.records if "Skipped" in record.getMessage()]
    assert "Skipped the checkpoint of step 4" in warning
    assert "the last one is checkpoint-2" in warning
    assert [saved for saved, _ in steps.told] == [2, 6, 12]


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_skipped_checkpoint_is_never_the_best(tmp_path: Path, say_free: Any, fill: Any, is_foreseen: bool) -> None:
    say_free(1 << 30)
    shortage = (lambda: say_free(0)) if is_foreseen else (lambda: fill(errno.ENOSPC))
    trainer = make_trainer(
        tmp_path, At(do={3: shortage}), eval_strategy="steps", eval_steps=2, save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
    )  # fmt: skip
    trainer.train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


@MODES
def test_prune_deletes_older_checkpoints_first(
    tmp_path: Path, say_free: Callable[[Any], None], save_async: bool
) -> None:
    say_free(lambda count: 0 if count > 2 else 1 << 30)
    make_trainer(tmp_path, At(2, 4, 6, 8), policy=policy("prune", save_async)).train()
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8", "checkpoint-12"]


def test_prune_never_deletes_the_best_and_the_newest(tmp_path: Path, say_free: Callable[[Any], None]) -> None:
    say_free(1 << 30)
    trainer = make_trainer(
        tmp_path, At(do={5: lambda: say_free(0)}), policy=policy("prune", False), save_steps=2, learning_rate=10.0,
        eval_strategy="steps", eval_steps=2, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint or "").name
    assert set(names(tmp_path)) == {best, "checkpoint-4"}


@MODES
def test_prune_never_deletes_what_keep_best_keeps(
    tmp_path: Path, say_free: Callable[[Any], None], save_async: bool
) -> None:
    class Evaluate(Trainer):
        def _evaluate(
            self, trial: Any = None, ignore_keys_for_eval: Any = None, skip_scheduler: bool = False
        ) -> dict[str, float]:
            return {"eval_loss": {2: 3.0, 4: 1.0, 6: 2.0}.get(self.state.global_step, 9.0)}

    say_free(lambda count: 0 if count > 3 else 1 << 30)
    make_trainer(
        tmp_path, kind=Evaluate, save_steps=2, eval_strategy="steps", eval_steps=2, save_total_limit=9,
        metric_for_best_model="eval_loss", greater_is_better=False,
        policy=SavePolicy(on_full_disk="prune", keep_best=2, save_async=save_async),
    ).train()  # fmt: skip
    # The two best, and of the others the newest alone: where 4 are there no more fit.
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-10", "checkpoint-12"]


@MODES
def test_stop_ends_the_run(tmp_path: Path, say_free: Callable[[Any], None], save_async: bool) -> None:
    say_free(1 << 30)
    steps = At(2, 4, do={3: lambda: say_free(2000)})
    with pytest.raises(CheckpointError, match=r"checkpoint of step 4 .* takes about .* MB, and 2 kB are free"):
        make_trainer(tmp_path, steps, policy=policy("stop", save_async)).train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert steps.step == 4


# -- a shortage that comes while writing -------------------------------------------------------------------------------


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Return a function that lets every flush fail with an error of the system, until it is told None: a stand-in."""

    fsync_tree = files.fsync_tree

    def set_error(number: int | None) -> None:
        def fail(folder: Path) -> None:
            if number is not None:
                raise OSError(number, "stand-in")
            fsync_tree(folder)

        monkeypatch.setattr("hftrain.storage.files.fsync_tree", fail)

    return set_error


@MODES
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_warn_goes_on_when_the_disk_is_full_after_all(
    tmp_path: Path, fill: Callable[[int | None], None], number: int, save_async: bool
) -> None:
    steps = At(2, 4, 8, do={3: once_written(lambda: fill(number)), 7: once_written(lambda: fill(None))})
    make_trainer(tmp_path, steps, policy=policy("warn", save_async)).train()
    assert {path.name for path in tmp_path.iterdir()} == {*names(tmp_path), "journal.jsonl"}
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8", "checkpoint-12"]
    assert [saved for saved, _ in steps.told] == [2, 8, 12]


@MODES
@pytest.mark.parametrize(
    ("on_full_disk", "number"), [("warn", errno.EIO), ("prune", errno.EIO), ("stop", errno.ENOSPC)]
)
def test_other_errors_of_the_disk_and_stop_end_the_run(
    tmp_path: Path, fill: Callable[[int | None], None], on_full_disk: Any, number: int, save_async: bool
) -> None:
    steps = At(2, 4, do={3: once_written(lambda: fill(number))})
    with pytest.raises(CheckpointError, match=r"Cannot write .*checkpoint-4\."):
        make_trainer(tmp_path, steps, policy=policy(on_full_disk, save_async)).train()
    assert names(tmp_path) == ["checkpoint-2"]


# -- a real small disk -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this system lets a test mount no disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the predictions say that there is room, so that the disk itself is what fails."""
    monkeypatch.setattr(contents, "_ALLOWANCE_BYTES", -(1 << 40))


@MODES
@pytest.mark.parametrize("is_foreseen", [True, False], ids=["foreseen", "unforeseen"])
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_small_disk_costs_checkpoints_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_async: bool, is_foreseen: bool
) -> None:
    with small_disk(tmp_path / "disk", "30m") as disk:
        # 2.2 MB of weights, twice as much of state: 8.6 MB a checkpoint.
        if not is_foreseen:
            blind(monkeypatch)
        for on_full_disk, kept in (("warn", [2, 4, 6]), ("prune", [8, 10, 12])):
            output_dir = disk / "out"
            trainer = Trainer(
                wide_net(),
                make_arguments(output_dir, save_strategy="steps", save_steps=2, max_steps=12),
                train_dataset=make_rows(),
                save_policy=policy(on_full_disk, save_async),
            )
            assert trainer.train().global_step == 12
            assert names(output_dir) == [f"checkpoint-{step}" for step in kept]
            assert len(list(output_dir.iterdir())) == len([*kept, "journal.jsonl"])
            for path in list_checkpoints(output_dir):
                verify(path)
            shutil.rmtree(output_dir)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_small_disk_for_less_than_one_checkpoint_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk, pytest.raises(ConfigError, match=r"One takes about 9\.\d+ MB"):
        make_trainer(disk / "out", model=wide_net()).train()


# -- two runs --------------------------------------------------------------------------------------------------------


def test_second_run_in_the_folder_of_one_that_goes_on_is_refused(tmp_path: Path) -> None:
    found: list[str] = []

    def meddle() -> None:
        staged = files.begin(tmp_path / "checkpoint-9")  # what the first is writing
        with pytest.raises(ConfigError, match=r"Another run is saving there.*its own output_dir"):
            make_trainer(tmp_path).train()
        make_trainer(tmp_path, save_strategy="no").train()
        found.append(staged.name)
        assert staged.is_dir()
        files.discard(staged)

    trainer = make_trainer(tmp_path, At(do={2: meddle}))
    trainer.train()
    assert len(found) == 1
    make_trainer(tmp_path).train()
