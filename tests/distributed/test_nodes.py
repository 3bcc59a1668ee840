"""Two processes that pretend to be two machines: each is the first of its machine, in a folder of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Task, make_arguments, make_rows

from hftrain import CheckpointError, ConfigError, Trainer, set_seed
from hftrain.storage.locks import FolderLock

pytestmark = pytest.mark.distributed


def pretend(root: str) -> Path:
    """Become the only process of a machine; return its disk."""
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    disk = Path(root) / f"machine{os.environ['RANK']}"
    disk.mkdir(exist_ok=True)
    return disk


def train(folder: Path, *, resume: Any = None, **options: Any) -> tuple[Trainer, list[float]]:
    set_seed(7)
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 2}
    args = make_arguments(folder, save_on_each_node=True, **{**defaults, **options})
    trainer = Trainer(Net(0.1), args, train_dataset=make_rows(24), eval_dataset=make_rows(7, seed=2))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def machine(root: str) -> dict[str, Any]:
    disk = pretend(root)
    trainer, losses = train(disk)
    trainer.save_model()
    trainer.save_state()
    kept = [files(disk), files(disk / "checkpoint-4")]
    _, resumed = train(disk, resume=str(disk / "checkpoint-4"))
    _, newest = train(disk, resume=True, max_steps=8)
    if os.environ["RANK"] == "1":
        (disk / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    try:
        train(disk, resume=str(disk / "checkpoint-6"))
        refusal = ""
    except CheckpointError as error:
        refusal = str(error)
    return {"kept": kept, "losses": losses, "resumed": resumed, "newest": newest[:6], "refusal": refusal}


def test_each_machine_keeps_whole_checkpoints_and_resumes_from_its_own(tmp_path: Path, run_distributed: Any) -> None:
    answers = run_distributed(machine, root=str(tmp_path))
    for rank, answer in enumerate(answers):
        folders, content = answer["kept"]
        assert {"checkpoint-4", "checkpoint-6", "model.safetensors", "trainer_state.json"} <= set(folders)
        assert "checkpoint-2" not in folders
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= set(content)
        assert [name for name in content if name.startswith("rng")] == [f"rng_state_{rank}.pth"]
        assert answer["resumed"] == answer["newest"] == answer["losses"]
    assert "It is missing on this machine" in answers[1]["refusal"]
    assert "It is missing on another machine" in answers[0]["refusal"]


def shared_storage(root: str, locks: bool) -> str:
    pretend(root)
    with pytest.MonkeyPatch.context() as patch:
        if not locks:
            patch.setattr(FolderLock, "take", lambda self: True)  # as on storage that locks nothing
        try:
            train(Path(root) / "shared")
        except (CheckpointError, ConfigError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("locks", [True, False])
def test_storage_that_machines_share_is_noticed(tmp_path: Path, run_distributed: Any, locks: bool) -> None:
    answers = run_distributed(shared_storage, root=str(tmp_path), locks=locks)
    assert all(answers)
    assert any("leave save_on_each_node out" in answer for answer in answers)
    assert not (tmp_path / "shared" / "checkpoint-2").exists()


def test_model_that_is_split_over_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no machine has all that a checkpoint needs"):
        Trainer(Task(), make_arguments(tmp_path, save_on_each_node=True), strategy="fsdp")
