"""Several processes and a remote folder: with one mirror for all, and on machines that share nothing but the store.

The store is fsspec's local one, which processes can share and which is remote by its protocol.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.resuming import Stop
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer

from hftrain import CheckpointError, Trainer, set_seed
from hftrain.run import output
from hftrain.storage import files

pytestmark = pytest.mark.distributed


def train(folder: str, *, stop: int = 99, resume: Any = None, strategy: Any = None, **options: Any) -> list[float]:
    set_seed(7)
    defaults = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 4}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer(
        Path(folder) if "://" not in folder else folder, Task() if strategy else Net(0.1), train_dataset=make_rows(24),
        eval_dataset=make_rows(7, seed=2), callbacks=[Stop(stop)], strategy=strategy,
        **{**defaults, **evaluation, **options},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def begin(root: str, *, is_apart: bool) -> tuple[str, Path]:
    """Return the store and this process's cache; two processes apart pretend to be two machines."""
    if is_apart:
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
        files._MAX_LOOKS = 1
    cache = Path(root) / (f"cache{os.environ['RANK']}" if is_apart else "cache")
    os.environ["HFTRAIN_CACHE"] = str(cache)
    return f"local://{root}/store/run", cache


def run(root: str, is_apart: bool, strategy: str | None) -> dict[str, Any]:
    url, cache = begin(root, is_apart=is_apart)
    whole = train(f"{root}/whole", strategy=strategy)
    train(url, stop=3, strategy=strategy)
    os.environ["HFTRAIN_CACHE"] = f"{cache}_new"
    resumed = train(url, resume=True, strategy=strategy)
    named = train(f"{root}/named", resume=f"{url}/checkpoint-3", strategy=strategy)
    return {"whole": whole, "resumed": resumed, "named": named}


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("is_apart", "strategy"), [(False, None), (True, "fsdp")])
def test_processes_commit_one_checkpoint_and_resume_from_it(
    tmp_path: Path, run_distributed: Any, is_apart: bool, strategy: str | None
) -> None:
    answers = run_distributed(run, root=str(tmp_path), is_apart=is_apart, strategy=strategy)
    for answer in answers:
        assert answer["resumed"] == answer["named"] == answer["whole"]
    found = names(tmp_path / "store" / "run")
    assert {"checkpoint-6/manifest.json", "checkpoint-6/rng_state_0.pth", "checkpoint-6/rng_state_1.pth"} <= set(found)
    assert not any(name.startswith(".") for name in found), found


def fail(root: str) -> str:
    url, _ = begin(root, is_apart=True)
    train(url, stop=2)
    if os.environ["RANK"] == "1":
        os.environ["HFTRAIN_CACHE"] = "/proc/none"  # where no checkpoint can be fetched to
        output.check_writable = lambda folder: None
    try:
        train(url, resume=True)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def cannot_publish(root: str) -> str:
    url, _ = begin(root, is_apart=False)
    trainer = Trainer(Net(), make_arguments(url, max_steps=1), train_dataset=make_rows(24))
    trainer.train()
    if trainer.is_world_process_zero():
        (Path(root) / "store").write_text("no folder")
    try:
        trainer.save_model()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_model_that_cannot_be_published_is_an_error_of_all(tmp_path: Path, run_distributed: Any) -> None:
    answers = run_distributed(cannot_publish, root=str(tmp_path))
    assert "Cannot upload files to local://" in answers[0]
    assert "The main process could not upload its files" in answers[1]


def test_a_machine_that_cannot_fetch_ends_all(tmp_path: Path, run_distributed: Any) -> None:
    answers = run_distributed(fail, root=str(tmp_path))
    assert "Cannot read" in answers[1]
    assert "Another process could not fetch" in answers[0]
