"""The proofs of `hftrain check`: each returns what it found, and raises `Failed` where it must not be so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from hftrain.callbacks import TrainerCallback
from hftrain.checkpoint.weights import load_weights
from hftrain.checkpoint.writer import SavePolicy
from hftrain.core.devices import device_name, find_device_type
from hftrain.core.errors import HFTrainError
from hftrain.core.launcher import read_launch
from hftrain.extras.check.probes import BATCH, STEPS, batches, make_trainer, new_net, samples, train, train_by_hand
from hftrain.storage.files import free_bytes, readable_bytes
from hftrain.storage.locks import FolderLock
from hftrain.strategies.launching import launch
from hftrain.strategies.registry import create_strategy

# How far numbers may be apart, relative to the largest: rounding in another order, with room.
_BOUNDS = {"fp32": 1e-4, "bf16": 0.05}
_MAX_COST_RATIO, _TIMED_STEPS, _TIMED_WIDTH = 2.0, 64, 2048
_MIN_MEMORY = 1 << 30
_CPU = torch.device("cpu")
_WAITS = {"cuda": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")}
_TAKE_LOCK = """
import pathlib, sys
from hftrain.storage.locks import FolderLock
print(FolderLock(pathlib.Path(sys.argv[1])).take())
"""


class Failed(Exception):
    """A proof has failed; the arguments say what was found, and what to do about it."""


class Absent(Exception):
    """There is nothing here to prove; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    name: str
    status: str
    found: str
    remedy: str = ""


def prove_all(output_dir: Path | None, *, only: str | None = None) -> Iterator[Outcome]:
    """Run the proofs where this process stands, and yield their outcomes. Collective under a launcher.

    Args:
        output_dir: A folder to prove locks and renames in; None proves them in a temporary one.
    """
    for name, proof in PROOFS.items() if only is None else [(only, PROOFS[only])]:
        with _folder(output_dir, name) as folder:
            try:
                yield Outcome(name, "PASS", proof(output_dir or folder if proof is prove_folder else folder))
            except Absent as absent:
                yield Outcome(name, "not here", str(absent))
            except Failed as failed:
                yield Outcome(name, "FAIL", *failed.args)
            except Exception as error:  # whatever it is, the other proofs still tell something
                is_known = isinstance(error, HFTrainError)
                remedy = "Do as the error says." if is_known else "Attach this to a report: no proof should end so."
                yield Outcome(name, "FAIL", str(error) if is_known else f"{type(error).__name__}: {error}", remedy)


@contextmanager
def _folder(output_dir: Path | None, proof: str) -> Iterator[Path]:
    """Yield a folder for a proof, the same one in all processes."""
    if read_launch().world_size == 1:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    launch_id = "-".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    whole = Path(output_dir or tempfile.gettempdir()) / f".hftrain-check-{launch_id}"
    yield whole / proof
    if read_launch().rank == 0 and proof == [*PROOFS][-1]:  # others may still read what is left of the earlier ones
        shutil.rmtree(whole, ignore_errors=True)


def prove_device(folder: Path) -> str:
    """Tell which devices there are, and that the first has memory left."""
    kind = find_device_type()
    if kind == "cpu":
        return f"no accelerator; CPU ({device_name(_CPU)}), threads: {torch.get_num_threads()}"
    description = f"{torch.accelerator.device_count()} x {device_name(torch.device(kind, 0))} ({kind})"
    read_memory = getattr(torch.get_device_module(kind), "mem_get_info", None)
    if read_memory is not None:
        free, total = read_memory(0)
        description += f", {readable_bytes(free)} of {readable_bytes(total)} free"
        if free < _MIN_MEMORY:
            raise Failed(description, "Another process holds the memory: end it, or choose another device.")
    return description


def prove_numbers(folder: Path, *, precision: str) -> str:
    """Compare a training on the device with one of plain torch on the CPU."""
    trainer, result = train(folder, bf16=precision == "bf16")
    expected = train_by_hand(_CPU, trainer.args.world_size, torch.bfloat16 if precision == "bf16" else None)
    text = f"{trainer.strategy.device.type} and a loop on the CPU differ by {result.distance(expected):.1e}"
    if not result.distance(expected) <= _BOUNDS[precision]:
        raise Failed(text, "Update the driver and torch; leave torch.backends.cuda.matmul.allow_tf32 off.")
    return text


def prove_resume(folder: Path) -> str:
    """Compare a resumed training that draws on the device with an uninterrupted one, to the bit."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": STEPS // 2}
    trainer, whole = train(folder, net=new_net(dropout=0.3), **settings)
    expected_numbers = torch.rand(4, device=trainer.strategy.device).tolist()
    checkpoint = str(folder / f"checkpoint-{STEPS // 2}")
    trainer, resumed = train(folder, net=new_net(dropout=0.3), resume=checkpoint, **settings)
    if not resumed.equals(whole):
        text = f"the resumed run differs by {resumed.distance(whole):.1e}"
        raise Failed(text, "Set full_determinism=True: kernels of this device may add up in any order.")
    if torch.rand(4, device=trainer.strategy.device).tolist() != expected_numbers:
        raise Failed("the random numbers of the device differ after it", "Update the device's package for torch.")
    return f"equal to the bit after {STEPS} steps, with dropout"


def prove_background_save(folder: Path) -> str:
    """Read back what was saved while the training went on."""
    weights_by_step: dict[int, dict[str, torch.Tensor]] = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights = kwargs["model"].state_dict()
            weights_by_step[state.global_step] = {name: value.detach().cpu().clone() for name, value in weights.items()}

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(folder, Keep(), save_policy=SavePolicy(save_async=True), **settings).train()
    for step in range(2, STEPS + 1, 2):
        net = new_net()
        load_weights(net, folder / f"checkpoint-{step}")
        if not all(torch.equal(value, weights_by_step[step][name]) for name, value in net.state_dict().items()):
            raise Failed(f"checkpoint-{step} holds other weights than the step had", "Leave save_async out.")
    return f"{STEPS // 2} checkpoints hold the weights of their steps"


def prove_folder(folder: Path) -> str:
    """Rename files and folders over others, and lock against another process."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".hftrain-check-") as name:
        inner = Path(name)
        for text in ("old", "new"):
            (inner / "part").write_text(text, encoding="utf-8")
            os.replace(inner / "part", inner / "file")
        (inner / "staged").mkdir()
        os.rename(inner / "staged", inner / "folder")
        if (inner / "file").read_text(encoding="utf-8") != "new" or not (inner / "folder").is_dir():
            raise Failed("a file that was renamed over another one is the old one", "Save to another file system.")
        lock = FolderLock(inner)
        lock.take()
        other = subprocess.run([sys.executable, "-c", _TAKE_LOCK, name], capture_output=True, text=True, check=False)
        lock.release()
        if other.stdout.strip() != "False":
            remedy = "Let only one run at a time write there, or mount the file system with locks."
            raise Failed("a second process could lock a folder that is locked", remedy)
    return f"locks and renames hold; {readable_bytes(free_bytes(folder))} free"


def prove_waits(folder: Path) -> str:
    """Count, by torch's profiler, what steps that do not log wait for."""
    kind = find_device_type()
    if kind not in _WAITS and read_launch().world_size > 1:
        raise Absent("here, the counts that several processes exchange on the host look like waits")
    profile, number, waits = torch.profiler.profile(), STEPS - 3, _WAITS.get(kind, ("aten::_local_scalar_dense",))

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                profile.start()
            elif state.global_step == 2 + number:
                profile.stop()

    make_trainer(folder, Watch(), logging_strategy="no").train()
    counts = {event.key: event.count for event in profile.key_averages() if event.key in waits}
    if counts:
        waiting = ", ".join(f"{name} {count / number:g}" for name, count in counts.items())
        raise Failed(f"a step that does not log waits: {waiting}", "Attach this to a report.")
    return f"0 in {number} steps that do not log"


def prove_cost(folder: Path) -> str:
    """Compare the time of a Trainer's step with that of a loop written by hand, in this process."""
    if read_launch().world_size > 1:
        raise Absent("measured in one process")
    wait: Callable[[], None] = torch.cpu.synchronize if find_device_type() == "cpu" else torch.accelerator.synchronize

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wait()
            ends_s.append(time.perf_counter())

    ends_s: list[float] = []
    data, net = samples(_TIMED_STEPS * BATCH), new_net(width=_TIMED_WIDTH)
    settings: dict[str, Any] = {"logging_strategy": "no", "max_steps": _TIMED_STEPS}
    trainer = make_trainer(folder, Clock(), net=net, train_dataset=data, **settings)
    trainer.train()
    trainer_s = _fastest(ends_s)
    net, ends_s = net.train(), []
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(_TIMED_STEPS // STEPS):
        for batch in batches(trainer.strategy.device, BATCH):
            net(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            wait()
            ends_s.append(time.perf_counter())
    loop_s = _fastest(ends_s)
    times = f"{trainer_s * 1e3:.2f} ms, by hand {loop_s * 1e3:.2f} ms"
    if trainer_s > loop_s * _MAX_COST_RATIO + 1e-3:
        raise Failed(times, "Run it again on a quiet machine; set dataloader_num_workers if reading takes the time.")
    return times


def _fastest(ends_s: list[float]) -> float:
    """Return the time of a step that only a tenth are below: the others waited for what else runs here."""
    return quantiles((end - start for start, end in pairwise(ends_s)), n=10)[0]


def _on_ranks(proof: Callable[[Path], str], folder: Path) -> str:
    """Run a proof in the processes that a launcher has started, or in one for each device, two on the CPU."""
    if read_launch().world_size > 1:
        return proof(folder)
    number = 2 if find_device_type() == "cpu" else torch.accelerator.device_count()
    if number < 2:
        raise Absent("one device; start with torchrun to prove more")
    outcome, *_ = launch(_prove_or_fail, proof, folder, num_processes=number)
    if isinstance(outcome, tuple):
        raise Failed(*outcome)
    return outcome


def _prove_or_fail(proof: Callable[[Path], str], folder: Path) -> str | tuple[str, ...]:
    """Return what a proof finds, also wrong: an error of one process would end the others'."""
    try:
        return proof(folder)
    except Failed as failed:
        return failed.args


def prove_exchange(folder: Path) -> str:
    """Sum a tensor over the processes, and measure how fast that is. Collective."""
    strategy = create_strategy("ddp")
    strategy.launch()
    try:
        number, backend = strategy.world_size, getattr(strategy, "backend", None)
        tensor = torch.full((1 << 22,), strategy.rank + 1.0, device=strategy.device)
        for _ in range(2):  # the first one connects
            start_s = time.perf_counter()
            last = float(strategy.reduce(tensor, op="sum")[-1])
        seconds = time.perf_counter() - start_s
    finally:
        strategy.close()
    if last != number * (number + 1) / 2:
        raise Failed(f"{number} processes over {backend} sum up wrongly", "Try again with NCCL_P2P_DISABLE=1.")
    return f"{number} processes over {backend}: 16 MiB in {seconds * 1e3:.1f} ms"


def prove_strategy(name: str, folder: Path) -> str:
    """Compare a training of several processes with one process of plain torch on the CPU. Collective."""
    trainer, result = train(folder, strategy=name)
    number = trainer.strategy.world_size
    difference = result.distance(train_by_hand(_CPU, number))
    trainer.strategy.close()
    text = f"{number} processes and a loop in one differ by {difference:.1e}"
    if not difference <= _BOUNDS["fp32"]:
        raise Failed(text, "See the line 'processes': the gradients are not averaged as they should be.")
    return text


PROOFS: dict[str, Callable[[Path], str]] = {
    "device": prove_device,
    "numbers in float32": partial(prove_numbers, precision="fp32"),
    "numbers in bfloat16": partial(prove_numbers, precision="bf16"),
    "resume": prove_resume,
    "background save": prove_background_save,
    "folder": prove_folder,
    "waits": prove_waits,
    "cost of a step": prove_cost,
    "processes": partial(_on_ranks, prove_exchange),
    "ddp": partial(_on_ranks, partial(prove_strategy, "ddp")),
    "fsdp": partial(_on_ranks, partial(prove_strategy, "fsdp")),
}
