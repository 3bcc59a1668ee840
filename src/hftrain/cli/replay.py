"""`hftrain replay`: do a step of a run again, with every module looked at."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.manifest import checkpoint_step
from hftrain.checkpoint.rotation import LocalCheckpoints
from hftrain.cli.answer import Answer
from hftrain.cli.scripts import changed_construction, only_with, redirect, until_training
from hftrain.core.errors import ConfigError
from hftrain.core.launcher import read_launch
from hftrain.core.parameters import is_partitioned
from hftrain.core.seed import capture_rng, restore_rng
from hftrain.core.signatures import Hooks, taking
from hftrain.core.tree import batch_size_of, is_samples, map_tensors, tensors_of
from hftrain.core.types import Owns
from hftrain.extras.batch_size.micro_batches import split_batch
from hftrain.extras.flight.ledger import FlightLog
from hftrain.extras.flight.observing import Observer, first_not_finite, own_part
from hftrain.extras.flight.reading import FOLDER, Lines, first_parting, lines_of, read_ledger, read_sessions
from hftrain.run.parts import TrainerHooks
from hftrain.storage.files import is_url
from hftrain.trainer.trainer import Trainer


def show_replay(
    run: str, *, step: int, output: str | None = None, changes: Sequence[str] = (), script: Sequence[str] = ()
) -> Answer:
    """Do a step of a run again, from the checkpoint before it and with the command that made the run.

    Args:
        run: Its output folder, which is only read.
        step: The step, from 1.
        output: A new folder for what was observed and the batches; None: ``replay-step<N>``.
        changes: Arguments to change, each as ``args.bf16=false``.
        script: The script and its arguments; empty: those that the flight log names.
    """
    folder = new_folder(output or f"replay-step{step}", what="replay")
    before = ledger_with(run, step)
    start = do_step(run, step, str(folder), script=script, changes=_parsed(changes), has_samples=True)
    if read_launch().rank:
        return Answer([], None)
    after = read_ledger(folder)
    calls = read_ranks(folder, "modules")[0]
    done = f"Did step {step} again, from {'the start' if start is None else start.name}; see {folder}."
    parted, names, values = first_parting(before, after)
    if parted is None:
        is_same = "All steps since are the same to the bit."
    else:
        is_same = f"Step {parted} is not the same: {values}."
        if (number := session_of(run, step).get("training", 1)) > 1 and not script:
            is_same += f" It was made by training number {number} of its script, and the first one was done again: "
            is_same += "name a script after -- that does this training only."
    bad = first_not_finite(calls)
    lines = [done, is_same, *([f"The first value that is not finite: {bad}."] if bad else [])]
    problem = read_ranks(folder, "samples")[0]["problem"]
    lines += [f"No losses of samples: {problem}"] if problem else []
    facts = {"step": step, "folder": str(folder), "parted": parted, "differs": names, "first_not_finite": bad}
    return Answer(lines, facts)


def new_folder(path: str, *, what: str) -> Path:
    """Return the path of a folder, which has to be new or empty before the main process has written into it."""
    folder = Path(path).absolute()
    if not read_launch().rank and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"Cannot {what} into {folder}:", "it is not empty.", "Name another folder with -o.")
    return folder


def do_step(
    run: str, step: int, folder: str, *, script: Sequence[str] = (), changes: Mapping[str, Any] | None = None,
    has_samples: bool = False, look: Callable[[Any], Observer] | None = None,
) -> Path | None:  # fmt: skip
    """Do a step of a run again, which writes into a folder; return the checkpoint from which, None for the start.

    With `has_samples`, also compute each of its samples alone, see `SampleObserver`. `look` makes another observer, for
    a Trainer.
    """
    session, launch = session_of(run, step), read_launch()
    start = _checkpoint_before(Path(run).absolute(), step, session)
    if launch.world_size != session["world_size"]:
        number = session["world_size"]
        raise ConfigError(
            f"Cannot replay {run} with {launch.world_size} processes.",
            f"It was trained with {number}.",
            f"Run: torchrun --nproc_per_node {number} --no-python hftrain replay ...",
        )

    def observe(trainer: Any) -> Observer:
        if look is not None:
            return look(trainer)
        return SampleObserver(step, Path(folder), trainer) if has_samples else Observer(step, Path(folder))

    script = list(script) or session["command"][1:]
    start = _train(script, session, folder=Path(folder), start=start, step=step, observe=observe, changes=changes or {})
    if has_samples:
        _name_samples(Path(folder), f"rank{launch.rank}", step)
    return start


def _name_samples(folder: Path, rank: str, step: int) -> None:
    """Add to each sample of a process its index in the data; null if it is not known."""
    path = folder / f"samples-{rank}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    names = next(line["samples"] for line in lines_of(folder / FOLDER, rank) if line.get("step") == step)
    sizes = Counter(each["micro_batch"] for each in found["samples"])
    for each in found["samples"]:
        own, size, row = names[each["micro_batch"]], sizes[each["micro_batch"]], each["row"]
        each["sample"] = own[row] if own and row is not None and len(own) == size else None
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def do_step_apart(run: str, step: int, folder: Path, **options: Any) -> Path:
    """Do a step again in as many processes as the run had, so that nothing is left of one run in another."""
    number = session_of(run, step)["world_size"]
    code = "import json, sys; from hftrain.cli.replay import do_step; do_step(**json.loads(sys.argv[1]))"
    done = run_apart(code, json.dumps({"run": run, "step": step, "folder": str(folder), **options}), number)
    if done.returncode:
        raise ConfigError(f"Cannot do step {step} of {run} again.", done.stdout[-2000:], "Try hftrain replay alone.")
    return folder


def run_apart(code: str, told: str, processes: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in new processes, to which a text and variables are told, and return what they print."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone", "--no-python"]
    words = [sys.executable, *([*launcher, sys.executable] if processes > 1 else []), "-c", code, told]
    kept: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": os.environ | variables}
    return subprocess.run(words, text=True, check=False, **kept)


def read_ranks(folder: Path, name: str) -> list[Any]:
    """Return what each process has written of an observed step: ``"modules"`` or ``"samples"``."""
    paths = sorted(folder.glob(f"{name}-rank*.json"), key=lambda path: int(path.stem.removeprefix(f"{name}-rank")))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def ledger_with(run: str, step: int | None = None) -> Lines:
    """Return the flight log of a run, which has to have a step; `ConfigError` if it has not."""
    ledger = read_ledger(run)
    if not ledger or (step is not None and step not in ledger):
        known = f"Its flight log has the steps {min(ledger)} to {max(ledger)}." if ledger else "It has no flight log."
        raise ConfigError(
            f"Cannot do {'steps' if step is None else f'step {step}'} of {run} again.",
            known,
            "Train with Trainer(..., flight_log=True), and name one of its steps.",
        )
    return ledger


def session_of(run: str, step: int) -> dict[str, Any]:
    """Return the line of the session that did a step last; `ConfigError` if it cannot be done again from here."""
    if is_url(run):
        why = "Its checkpoints are in a remote store."
        raise ConfigError(f"Cannot do step {step} of {run} again.", why, "Copy the folder to this machine.")
    sessions = [line for line in read_sessions(run) if line["begin"] < step]
    if not sessions:
        raise ConfigError(
            f"Cannot do step {step} of {run} again.",
            "The line of its session is missing from flight/rank0.jsonl, which may be damaged.",
            "Name another run.",
        )
    return sessions[-1]


def _checkpoint_before(run: Path, step: int, session: Mapping[str, Any]) -> Path | None:
    """Return the last checkpoint before a step that its session has saved, or from which it was resumed."""
    found = {}
    for name, manifest in LocalCheckpoints(run).manifests().items():
        at, saved_at_s = checkpoint_step(name) or 0, manifest.facts.get("saved_at_s", 0.0) if manifest else 0.0
        if at == session["begin"] or (session["begin"] < at < step and saved_at_s >= session["at"]):
            found[at] = run / name
    return found[max(found)] if found else None


def _parsed(changes: Sequence[str]) -> dict[str, Any]:
    found = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or not name.startswith("args."):
            raise ConfigError(f"Cannot change {change!r}.", "It is not args.NAME=VALUE.", "Write args.bf16=false.")
        try:
            found[name.removeprefix("args.")] = json.loads(value)
        except ValueError:
            found[name.removeprefix("args.")] = value
    return found


def _train(
    command: Sequence[str], session: Mapping[str, Any], *, folder: Path, start: Path | None, step: int,
    observe: Callable[[Any], Observer], changes: Mapping[str, Any],
) -> Path | None:  # fmt: skip
    """Run a command up to its first training, in a folder, which an observer ends; return from which checkpoint."""
    starts: list[Path | None] = []

    def do(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> None:
        only_with(trainer, FlightLog(), observe(trainer))
        given = Path(resume_from_checkpoint if isinstance(resume_from_checkpoint, (str, Path)) else "").absolute()
        starts.append(given if start is None and checkpoint_step(given.name) == session["begin"] else start)
        if starts[0] is not None and not read_launch().rank:  # where SpikeGuard("rewind") looks for it
            folder.mkdir(parents=True, exist_ok=True)
            (folder / starts[0].name).symlink_to(starts[0])
        Trainer.train(trainer, None if starts[0] is None else str(starts[0]), *args, **kwargs)

    with _in_folder(session["folder"]), _with_arguments(folder, changes), until_training(do):
        _execute(command)
    if step not in read_ledger(folder):
        what = f"Its training ended, or stopped writing, before step {step}." if starts else ""
        raise ConfigError(
            f"Cannot run {' '.join(command)!r} again.",
            what or "It ended without a call of Trainer.train in this process.",
            "Name the script and its arguments after --.",
        )
    return starts[0]


def _with_arguments(folder: Path, changes: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Give every Trainer changed arguments, which write into a folder and report to nobody."""

    def change(given: dict[str, Any]) -> None:
        args = redirect(given, folder, changes)
        if args.save_strategy != "no":
            args.save_strategy = type(args.save_strategy)("epoch")  # saves nothing at the end of the run

    return changed_construction(change)


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Work in a folder, if it is still there."""
    before = os.getcwd()
    try:
        if Path(folder).is_dir():
            os.chdir(folder)
        yield
    finally:
        os.chdir(before)


def _execute(command: Sequence[str]) -> None:
    words = list(command)
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    if words[:1] == ["-m"]:
        sys.argv, sys.path[:0] = words[1:], [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words and Path(words[0]).is_file():
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).resolve().parent)]
        runpy.run_path(words[0], run_name="__main__")
    else:
        raise ConfigError(
            f"Cannot run {' '.join(command)!r} again.",
            "The script does not exist.",
            "Name it after --, with its arguments.",
        )


class SampleObserver(Observer):
    """Observe a step, and then compute the loss of each of its samples alone, and the norm of its gradient.

    The step itself is as without it: what it changes is put back afterwards, and `compute_loss` is called with each
    sample, weights, buffers and random numbers from before the step, and the step's item count. Batch normalization
    uses its running statistics. All processes make as many calls. Sharded weights and engines have no norms.

    ``samples-rank0.json`` has ``samples`` (by micro-batch and row; null for a batch that cannot be divided) and
    ``problem``, which says why there are none.
    """

    def __init__(self, step: int, folder: Path, trainer: TrainerHooks) -> None:
        super().__init__(step, folder)
        self._trainer, self._hooks = trainer, Hooks(trainer, dict)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the step changes."""
        super().on_step_begin(args, state, control, **kwargs)
        if self._is_on and not is_partitioned(task := self._trainer.task):
            tensors = [*task.named_parameters(), *task.named_buffers()]
            self._before = {name: own_part(each).to("cpu", copy=True) for name, each in tensors}
            self._random = capture_rng()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the step and its samples, and end the run."""
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == self.step:
            control.should_log = control.should_evaluate = control.should_save = False
            samples, problem = self._compute()
            path = self.folder / f"samples-rank{args.process_index}.json"
            path.write_text(json.dumps({"samples": samples, "problem": problem}, indent=1), encoding="utf-8")

    def _compute(self) -> tuple[list[dict[str, Any]], str | None]:
        task, strategy, found = self._trainer.task, self._trainer.strategy, []
        if is_partitioned(task) or not task.automatic_optimization:
            return [], f"{type(task).__name__} steps its optimizers itself, or ZeRO-3 has split its weights."
        rows = [(number, *row) for number, batch in enumerate(self.batches) for row in _rows_of(batch)]
        self._put_back(task.named_parameters())
        for module in task.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)):
                module.eval()
        try:
            for place in range(max(strategy.gather_object(len(rows)))):
                number, row, batch = rows[min(place, len(rows) - 1)]
                loss, norm = self._compute_one(batch, self.num_items[number])
                found.append({"micro_batch": number, "row": row, "loss": loss, "norm": norm})
        except Exception as error:
            if strategy.world_size > 1:  # the others wait for this process
                raise
            return [], f"A sample alone cannot be computed: {type(error).__name__}: {error}"
        return found[: len(rows)], None

    def _compute_one(self, batch: Any, num_items: Any) -> tuple[float, float | None]:
        trainer, model = self._trainer, self.parts.model
        self._put_back(trainer.task.named_buffers())
        restore_rng(self._random)
        with self.parts.no_sync(model):
            inputs = self._hooks.prepare_inputs(map_tensors(batch, torch.Tensor.clone))
            with trainer.compute_loss_context_manager():
                compute_loss = taking(trainer.compute_loss, 3, "num_items_in_batch")
                loss = compute_loss(model, inputs, num_items_in_batch=num_items)
            if trainer.strategy.shards_model or Owns.BACKWARD in trainer.strategy.owns:
                return float(loss.detach()), None
            scale = 1024.0 if trainer.precision.policy.loss_scaling else 1.0  # small gradients are 0 in fp16
            (loss * scale).backward()
        gradients = [each.grad.float() for each in trainer.task.parameters() if each.grad is not None]
        trainer.task.zero_grad()
        return float(loss.detach()), math.hypot(*(float(each.norm()) for each in gradients)) / scale

    @torch.no_grad()
    def _put_back(self, named: Any) -> None:
        for name, tensor in named:
            if name in self._before:
                own_part(tensor).copy_(self._before[name])


def _rows_of(batch: Any) -> list[tuple[int | None, Any]]:
    """Return the samples of a batch with their places; the whole batch if its tensors are not as long as each other."""
    size = batch_size_of(batch)
    is_even = is_samples(batch) or all(not each.dim() or len(each) == size for each in tensors_of(batch))
    return list(enumerate(split_batch(batch, 1))) if size and is_even else [(None, batch)]
