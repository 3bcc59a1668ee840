"""G9: loading a checkpoint never runs code from it, and ends in a CheckpointError, in little time and memory.

The attacker has the folder: where it has a manifest, its checksums are right. Each slot is tried in a process of its
own that may reserve little memory, so that a bomb cannot pass for an error.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hostile
from support.forking import ForkServer
from support.tiny import Net, make_arguments, make_rows

from hftrain import CheckpointError, EarlyStoppingCallback, StepOutput, TaskModule, Trainer, TrainerCallback, set_seed
from hftrain.checkpoint.manifest import write_manifest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

STEP = 3
SECONDS_PER_CASE = 20
MEMORY_BYTES = 1 << 30
JSON_SLOTS = ("trainer_state.json", "manifest.json")
ZIP_SLOTS = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin")
FLAT_SLOTS = ("model.safetensors", "task_state.safetensors")


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__(Net())
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(**batch)
        return StepOutput(loss=loss * self.scale, outputs=logits, labels=batch["labels"])


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP:
            control.should_save = control.should_training_stop = True


def make_trainer(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    set_seed(1)
    return Trainer(
        Task(),
        make_arguments(folder, save_strategy="steps", save_steps=100, max_steps=STEP + 2, logging_steps=2,
                       metric_for_best_model="loss", eval_strategy="steps", eval_steps=4, **options),
        train_dataset=make_rows(22),
        eval_dataset=make_rows(4),
        callbacks=[EarlyStoppingCallback(3), *callbacks],
        precision="fp16",
    )  # fmt: skip


def make_sources(folder: str) -> None:
    """Train what the cases change copies of."""
    for form in ("safetensors", "bin"):
        make_trainer(Path(folder) / form, StopAt(), save_safetensors=form == "safetensors").train()


def sign(folder: Path) -> None:
    """Give a changed checkpoint a manifest that proves it."""
    facts = json.loads((folder / "manifest.json").read_text("utf-8"))["facts"]
    write_manifest(folder, facts, step=STEP)


def forge(folder: Path, body: Any) -> None:
    """Write a manifest with a checksum that is right, whatever it says."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    text = json.dumps({**body, "checksum": digest} if isinstance(body, dict) else body)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def attempt(folder: Path) -> str:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a hang that not even Python's handlers end
    signal.alarm(SECONDS_PER_CASE)
    try:
        make_trainer(folder.parent).train(resume_from_checkpoint=str(folder))
        return "trained"
    except CheckpointError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)


def prepared(sources: Path, slot: str) -> Path:
    """Return a fresh copy of a checkpoint that has a file for a slot."""
    source, work = sources / ("bin" if slot == "pytorch_model.bin" else "safetensors"), sources / "work"
    shutil.rmtree(work, ignore_errors=True)
    return Path(shutil.copytree(source / f"checkpoint-{STEP}", work / f"checkpoint-{STEP}"))


def try_slot(sources: str, slot: str, names: list[str], kind: str, manifest: str) -> dict[str, Any]:
    """Put hostile files of a kind into one slot, each in turn, and resume."""
    os.chdir(sources)  # where the canary would be
    before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {}
    for name in names:
        folder = prepared(Path(sources), slot)
        path = folder / slot
        if slot.startswith("model") and slot != "model.safetensors":  # of weights in several files
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
            )
        path.unlink(missing_ok=True)
        getattr(hostile, kind)[name](path)
        if manifest == "absent":
            (folder / "manifest.json").unlink(missing_ok=True)
        elif slot != "manifest.json" and not path.is_symlink() and (path.is_file() or not path.exists()):
            sign(folder)
        found[name] = attempt(folder)
        if Path(hostile.CANARY).exists():
            return {name: "ran code"}
    used_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return {**found, "memory": "refused" if used_bytes < MEMORY_BYTES else f"{used_bytes} bytes"}


def try_trees(sources: str, slot: str, every: int, manifest: str) -> dict[str, str]:
    """Put a value of each other kind into every place of one file's content, and resume."""
    os.chdir(sources)
    is_json = slot.endswith(".json")
    original = prepared(Path(sources), slot) / slot
    tree = json.loads(original.read_text("utf-8")) if is_json else torch.load(original, weights_only=True)
    if slot == "manifest.json":
        del tree["checksum"]
    values = [*hostile.json_kinds(), *(() if is_json else (torch.ones(()), torch.ones(3, 3)))]
    cases = list(itertools.product(hostile.paths_of(tree), range(len(values))))
    found = {}
    for at, number in cases[::every]:
        folder = prepared(Path(sources), slot)
        content = hostile.changed(tree, at, values[number])
        if slot == "manifest.json":
            forge(folder, content)
        else:
            (folder / slot).write_text(json.dumps(content)) if is_json else torch.save(content, folder / slot)
        if manifest == "absent":  # as the Hugging Face Trainer leaves it
            (folder / "manifest.json").unlink()
            (folder / "training_args.bin").write_bytes(b"")
        elif slot != "manifest.json":
            sign(folder)
        found[f"{at} = {values[number]!r:.40}"] = attempt(folder)
    return found


def serve(action: str, **options: Any) -> Any:
    return {"make_sources": make_sources, "try_slot": try_slot, "try_trees": try_trees}[action](**options)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(serve) as server:
        yield server


@pytest.fixture(scope="module")
def sources(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("sources"))
    server.call(action="make_sources", folder=folder)
    return folder


SLOTS = {
    **dict.fromkeys(ZIP_SLOTS, "ZIPPED"),
    **dict.fromkeys((*FLAT_SLOTS, "model-00001-of-00001.safetensors"), "FLAT"),
    **dict.fromkeys((*JSON_SLOTS, "model.safetensors.index.json"), "WRITTEN"),
}
# Every slot of a kind is read by the same function, so the short form tries large files in one slot of each.
LARGE = {"compressed", "colliding keys", "many", "giant", "giant header", "large header"}
NO_LOSS = {"absent", "nothing", "other names", "other values"}

# The arguments are read only to say what changed. What cannot be read safely is left alone, and the run goes on: it is
# the pickle of the Hugging Face Trainer, or what an override wrote.
UNREAD = {*hostile.ZIPPED, "empty", "text", "pickle", "pickle protocol 0"}


def assert_all_refused(found: dict[str, str], *, harmless: Iterable[str] = ()) -> None:
    wrong = {name: how for name, how in found.items() if not how.startswith("refused") and name not in harmless}
    assert not wrong, json.dumps(wrong, indent=1)


def check_slot(server: ForkServer, sources: str, slot: str, manifest: str, *, leave_out: Iterable[str] = ()) -> None:
    for kind in (SLOTS[slot], "ANYWHERE"):
        names = [name for name in getattr(hostile, kind) if name not in leave_out]
        options = {"sources": sources, "slot": slot, "names": names, "kind": kind, "manifest": manifest}
        found = server.call(action="try_slot", **options, memory_bytes=MEMORY_BYTES)
        harmless = {*NO_LOSS, *UNREAD} if slot == "training_args.bin" else set()
        assert_all_refused(found, harmless=harmless)


@pytest.mark.parametrize("slot", SLOTS)
def test_hostile_file_is_refused_in_every_slot(server: ForkServer, sources: str, slot: str) -> None:
    is_first = slot in ("optimizer.pt", "model.safetensors", "trainer_state.json")
    check_slot(server, sources, slot, "signed", leave_out=() if is_first else LARGE)


@pytest.mark.guarantees
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("slot", "manifest"),
    [(slot, "signed") for slot in SLOTS] + [(slot, "absent") for slot in SLOTS if slot != "manifest.json"],
)
def test_hostile_file_is_refused_whatever_the_manifest_says(
    server: ForkServer, sources: str, slot: str, manifest: str
) -> None:
    check_slot(server, sources, slot, manifest)


def test_hostile_file_is_refused_without_a_manifest(server: ForkServer, sources: str) -> None:
    check_slot(server, sources, "optimizer.pt", "absent", leave_out=LARGE)


def check_trees(server: ForkServer, sources: str, slot: str, manifest: str, *, every: int) -> dict[str, str]:
    options = {"sources": sources, "slot": slot, "every": every, "manifest": manifest}
    found = server.call(action="try_trees", **options, memory_bytes=MEMORY_BYTES)
    wrong = {name: how for name, how in found.items() if not how.startswith("refused") and how != "trained"}
    assert not wrong, json.dumps(wrong, indent=1)
    return found


TREES = [*((slot, "signed") for slot in (*JSON_SLOTS, *ZIP_SLOTS)), ("trainer_state.json", "absent")]


@pytest.mark.parametrize(("slot", "manifest"), TREES)
def test_wrong_value_in_a_file_ends_in_a_checkpoint_error(
    server: ForkServer, sources: str, slot: str, manifest: str
) -> None:
    check_trees(server, sources, slot, manifest, every=1 if slot == "scaler.pt" else 29)


@pytest.mark.guarantees
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("slot", "manifest"), TREES)
def test_every_wrong_value_in_a_file_ends_in_a_checkpoint_error(
    server: ForkServer, sources: str, slot: str, manifest: str
) -> None:
    check_trees(server, sources, slot, manifest, every=1)
