"""G3: nothing wrong is accepted silently: it raises and names the file, or an older checkpoint is taken and said so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_resumable, make_rows
from torch import nn

from hftrain import CheckpointError, Trainer
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.strategies.single import SingleDeviceStrategy

NAMES = ("manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json",
         "training_args.bin")  # fmt: skip
SHARDS = tuple(f"{kind}_shard-{rank:05d}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in range(2))
SHARDED_NAMES = (*SHARDS, *(name for name in NAMES if name not in ("model.safetensors", "rng_state.pth")),
                 "rng_state_0.pth", "rng_state_1.pth")  # fmt: skip


def make_trainer(folder: Path, model: nn.Module | None = None, **options: Any) -> Trainer:
    options = {"max_steps": 5, "save_steps": 2, "train_dataset": make_rows(24), **options}
    return make_resumable(folder, seed=5, model=Net(dropout=0.1) if model is None else model, **options)


def delete(path: Path) -> None:
    path.unlink()


def swap(path: Path) -> None:
    """Put the file of the older checkpoint in its place, or where that is the same another file."""
    older = path.parent.with_name("checkpoint-2") / path.name
    is_same = older.read_bytes() == path.read_bytes()
    shutil.copy(path.with_name("scheduler.pt") if is_same else older, path)


def cut_at(share: float) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)]) and None


def flip_at(share: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(share * len(data)), len(data) - 1)] ^= 1
        path.write_bytes(data)

    return flip


DAMAGES = {"delete": delete, "cut": cut_at(0.5), "flip": flip_at(0.6), "swap": swap}
MORE_DAMAGES = {
    **{f"cut at {share}": cut_at(share) for share in (0.0, 0.1, 0.9, 0.999)},
    **{f"flip at {share / 16}": flip_at(share / 16) for share in range(17)},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole") / "out"
    trainer = make_trainer(folder)
    trainer.train()
    return folder, dict(trainer.model.state_dict())


def damaged(whole: Path, work: Path, name: str, damage: Callable[[Path], None]) -> Path:
    """Return a copy of a run's folder whose newest checkpoint has one damaged file."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(whole, work, ignore=shutil.ignore_patterns("checkpoint-5"))
    damage(work / "checkpoint-4" / name)
    return work / "checkpoint-4"


@pytest.mark.parametrize("name", NAMES)
def test_damaged_file_is_named_or_passed_over(
    whole: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for damage in DAMAGES.values():
        check_damage(whole, tmp_path / "work", caplog, name, damage)


@pytest.mark.guarantees
@pytest.mark.parametrize("name", NAMES)
def test_file_that_is_damaged_anywhere_is_named_or_passed_over(
    whole: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for damage in MORE_DAMAGES.values():
        check_damage(whole, tmp_path / "work", caplog, name, damage)


def check_damage(
    whole: tuple[Path, Any],
    work: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    newest = damaged(whole[0], work, name, damage)
    with pytest.raises(CheckpointError, match=f"{name}|no manifest"):
        make_trainer(work).train(resume_from_checkpoint=str(newest))
    caplog.clear()
    trainer = make_trainer(work)
    trainer.train(resume_from_checkpoint=True)
    assert "Skipped" in caplog.text
    assert name in caplog.text
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(value, whole[1][key]), "the run that fell back ends elsewhere"


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("kind", "named"), [(Deeper, "more.weight"), (Wider, r"layers\.0\.weight: .*\[8, 4\].*\[16, 4\]")]
)
def test_checkpoint_of_another_model_is_refused_before_training(
    whole: tuple[Path, Any], tmp_path: Path, kind: type[Net], named: str
) -> None:
    trainer = make_trainer(tmp_path, kind())
    with pytest.raises(CheckpointError, match=named):
        trainer.train(resume_from_checkpoint=str(whole[0] / "checkpoint-4"))
    assert trainer.state.log_history == [] or trainer.state.global_step == 4


# -- sharded, on two ranks ---------------------------------------------------------------------------------------------


def train_sharded(folder: str, *, resume: bool) -> list[list[float]]:
    trainer = make_trainer(Path(folder), fsdp="full_shard")
    trainer.train(resume_from_checkpoint=resume or None)
    state = trainer.strategy.model_state(trainer.model_wrapped)
    return [value.flatten().tolist() for value in state.values()]


@pytest.mark.distributed
def test_damaged_shard_is_named_or_passed_over(
    tmp_path: Path, run_distributed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, work = tmp_path / "out", tmp_path / "work"
    learnt = run_distributed(train_sharded, folder=str(folder), resume=False)
    assert {*SHARDED_NAMES} == {path.name for path in (folder / "checkpoint-4").iterdir()}
    # Which checkpoint is taken the main process decides alone, as this process does here.
    manager = CheckpointManager(work, group=SingleDeviceStrategy())
    for name in SHARDED_NAMES:
        for damage in DAMAGES.values():
            newest = damaged(folder, work, name, damage)
            caplog.clear()
            assert manager.latest() == work / "checkpoint-2"
            assert name in caplog.text
            if name != "manifest.json" or damage is not delete:
                with pytest.raises(CheckpointError, match=name):
                    manager.open(newest)
    damaged(folder, work, SHARDS[3], flip_at(0.9))
    assert run_distributed(train_sharded, folder=str(work), resume=True) == learnt
