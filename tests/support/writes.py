"""Runs whose checkpoints are written slowly, badly, or onto a disk that is too small."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from support.resuming import assert_same
from support.tiny import make_resumable

from hftrain import SavePolicy, Trainer, TrainerCallback
from hftrain.checkpoint import manager
from hftrain.storage.tensors import load_containers

SYNC_LIMIT_S = 60.0


class Gate:
    """Hold the write of every checkpoint, after its files are complete, until it is opened.

    Args:
        monkeypatch: pytest's.
    """

    def __init__(self, monkeypatch: Any) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.threads: list[threading.Thread] = []
        write_manifest = manager.write_manifest

        def write(*args: Any, **options: Any) -> Any:
            self.threads.append(threading.current_thread())
            self.reached.set()
            assert self.opened.wait(SYNC_LIMIT_S)
            return write_manifest(*args, **options)

        monkeypatch.setattr(manager, "write_manifest", write)


class At(TrainerCallback):
    """Do something at a step's end, save at some, and note the weights there and the saves that are told."""

    def __init__(self, *saves: int, do: dict[int, Any] | None = None) -> None:
        self.saves, self.do = saves, do or {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.told: list[tuple[int, int]] = []
        self.step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step
        self.weights[self.step] = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}
        control.should_save = control.should_save or self.step in self.saves
        if self.step in self.do:
            self.do[self.step]()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append((state.global_step, self.step))


def same_files(ours: Path, theirs: Path) -> None:
    """Compare two folders of checkpoints bit by bit, except for what tells when, where and by whom they were made."""
    names = [path.relative_to(theirs) for path in sorted(theirs.rglob("*")) if path.is_file()]
    assert names == [path.relative_to(ours) for path in sorted(ours.rglob("*")) if path.is_file()]
    for name in names:
        if name.name in ("manifest.json", "trainer_state.json", "training_args.bin", "journal.jsonl"):
            continue
        # Not by their bytes: metadata come in any order, and a tensor's memory may be larger than what it shows of it.
        if name.suffix in (".safetensors", ".pt", ".pth", ".bin"):
            assert_same(_read(ours / name), _read(theirs / name), str(name))
        else:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def _read(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return load_containers(path)
    with safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def wait_for_writes() -> None:
    """Return when nothing is written in the background of this process."""
    for thread in threading.enumerate():
        if thread.name == "hftrain-save":
            thread.join(SYNC_LIMIT_S)


def make_trainer(
    folder: Path, *callbacks: TrainerCallback, policy: SavePolicy | None = None, **options: Any
) -> Trainer:
    """Return a Trainer of 12 steps that saves when a callback says so, and at the end."""
    return make_resumable(folder, *callbacks, save_policy=policy, **{"logging_steps": 3, **options})
