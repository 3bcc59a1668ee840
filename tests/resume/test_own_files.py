"""Files that an override writes into a checkpoint: proved with it, resumed past, never run, deleted with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt, check_resumes
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer, set_seed


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


class Writing(Trainer):
    """Writes its arguments as other trainers do, and files of its own."""

    def _save(self, output_dir: str, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict=state_dict)
        folder = Path(output_dir)
        torch.save(self.written(), folder / "training_args.bin")
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text("{}")
        (folder / "notes.txt").write_text("as they are")

    def written(self) -> Any:
        return self.args


def make(folder: Path, kind: type[Trainer], *callbacks: Any, **options: Any) -> Any:
    set_seed(1)
    args = make_arguments(folder, **{"save_strategy": "steps", "save_steps": 1000, **options})
    return kind(Net(dropout=0.2), args, train_dataset=make_rows(), callbacks=list(callbacks))


@pytest.mark.parametrize("what", ["pickle", "list", "nothing", "text", "bomb"])
def test_run_goes_on_whatever_an_override_left_of_its_arguments(tmp_path: Path, what: str) -> None:
    class Own(Writing):
        def _save(self, output_dir: str, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict=state_dict)
            path = Path(output_dir) / "training_args.bin"
            if what == "nothing":
                path.unlink()
            elif what == "text":
                path.write_text("no pickle")

        def written(self) -> Any:
            return {"pickle": self.args, "list": [1, 2], "bomb": Bomb(tmp_path / "boom")}.get(what)

    check_resumes(lambda folder, *callbacks: make(folder, Own, *callbacks), tmp_path, [5])
    assert not (tmp_path / "boom").exists()


def test_changed_arguments_are_named_only_if_they_can_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in (Trainer, Writing):
        make(tmp_path / kind.__name__, kind, StopAt(5)).train()
        caplog.clear()
        make(tmp_path / kind.__name__, kind, learning_rate=0.5).train(resume_from_checkpoint=True)
        assert ("learning_rate (was 0.01, now 0.5)" in caplog.text) == (kind is Trainer)


def test_own_files_are_proved_and_rotated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, Writing, save_steps=2, save_total_limit=2).train()
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-10", "checkpoint-12"]
    last = tmp_path / "checkpoint-12"
    assert (last / "notes.txt").read_text() == "as they are"
    (last / "1_Pooling" / "config.json").write_text("changed")
    resumed = make(tmp_path, Writing, StopAt(11))
    assert resumed.train(resume_from_checkpoint=True).global_step == 11
    assert "Skipped" in caplog.text
