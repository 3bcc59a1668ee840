"""Count how often the host waits for the device in each framework, on the simulated accelerator of the tests.

    python benchmarks/waits.py            # the table, a minute; compiles the device once, with g++ and ninja on Linux
    python benchmarks/waits.py --where    # also the lines of Python that wait
    python benchmarks/waits.py --write    # put the figures into the pages that show them

A count is a property of a program, not a speed: during a wait the host queues no work, and a GPU that has none idles.
Each figure is what a run of `LONG` steps or batches waits for beyond one of `SHORT`, for each of those between the two,
after a first run that is not counted. So start-up and end are left out, and what hftrain checks in the first eight
batches of a task. In evaluations and predictions, waits for an event are left out, too: there, hftrain reads a batch
late, behind an event of the batch before, which has passed by then.

All train the smallest model of `overhead.py` (6 parameters, so 24 tensors are saved with the optimizer's), on the same
batches of two tensors, in one process, with fused AdamW (which hftrain and transformers choose by themselves):

- plain: the loop by hand that reads nothing back before its end. It keeps losses and predictions on the device.
- accelerate: the loop of its quick tour, with the `gather_for_metrics` of its examples.
- hftrain, transformers: the same arguments for both, with the defaults for the rest.
- lightning: a module that calls `self.log` in its steps, as documented, and a CSVLogger.

All loaders pin their memory: hftrain's and transformers' do by default, accelerate and Lightning recommend it.
A *step* neither logs nor saves, and clips gradients only where that is the default (hftrain, transformers); with
*non-blocking copies* it has the option of accelerate and transformers for that. A *save* is a checkpoint of model,
optimizer and schedule that is complete before training goes on, as by default, in a step that logs; what such a step
waits for is taken off.

What the peers need for a device that they do not know: accelerate and transformers read ACCELERATE_TORCH_DEVICE. For
bf16 and fp16, `as_on_cuda` answers their lists of devices as CUDA does, and the GradScaler is one for the device.
Lightning takes an Accelerator of one's own, as documented.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _contenders import SIZES, Job, collate, is_installed, make_job, write_between
from torch import nn

from hftrain import StepOutput, TaskModule, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.torch_sim import load
from support.torch_sim.build import why_not

ROOT = Path(__file__).resolve().parents[1]
SHORT, LONG = 12, 20
DEVICE = "sim"
# What README.md shows.
SHOWN = {"hftrain": "hftrain", "accelerate": "accelerate", "transformers": "transformers", "lightning": "Lightning"}
SHOWN_ROWS = ("step", "step, fp16", "step that logs", "batch of an evaluation")
Places = Counter[str]


@dataclass(frozen=True)
class Row:
    """What a run does: train by default, with what is named."""

    does: str = "train"
    precision: str | None = None
    clip: float | None = None
    accumulation: int = 1
    logs: bool = False
    saves: bool = False
    non_blocking: bool = False


ROWS = {
    "step": Row(),
    "step, non-blocking copies": Row(non_blocking=True),
    "step, bf16": Row(precision="bf16"),
    "step, fp16": Row(precision="fp16"),
    "step, clipping": Row(clip=0.1),
    "step, two micro-batches": Row(accumulation=2),
    "step that logs": Row(logs=True),
    "batch of an evaluation": Row(does="evaluate"),
    "batch of a prediction": Row(does="predict"),
    "save": Row(logs=True, saves=True),
}


class Task(TaskModule):
    """The model as a task."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        answer = self.model(**batch)
        return StepOutput(loss=answer["loss"], outputs=answer["logits"], labels=batch["labels"])


# -- contenders ------------------------------------------------------------------------------------------------------


def run_plain(job: Job, row: Row, folder: str) -> None:
    model, loader = job.net.to(DEVICE), job.loader(pin_memory=True)
    optimizer = job.optimizer(fused=True)
    schedule = job.schedule(optimizer)
    scaler = torch.amp.GradScaler(DEVICE, enabled=row.precision == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(row.precision or "")
    kept: list[torch.Tensor] = []
    for number, batch in enumerate(loader, 1):
        batch = {name: value.to(DEVICE, non_blocking=True) for name, value in batch.items()}
        if row.does != "train":
            with torch.no_grad():
                answer = model.eval()(**batch)
            kept.append(answer["logits"] if row.does == "predict" else answer["loss"][None])
            continue
        with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
            loss = model(**batch)["loss"]
        scaler.scale(loss / row.accumulation).backward()
        if number % row.accumulation:
            continue
        if row.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), row.clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if row.logs:
            loss.item()
        if row.saves:
            torch.save([part.state_dict() for part in (model, optimizer, schedule)], f"{folder}/{number}.pt")
    if kept:
        torch.cat(kept).cpu()


@contextmanager
def as_on_cuda(row: Row) -> Iterator[None]:
    """Let accelerate and transformers be built for bf16 or fp16 on a device that is not in their lists."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the run before
    with ExitStack() as patches:
        if row.precision:
            patches.enter_context(mock.patch.object(accelerate.Accelerator, "device", torch.device("cuda")))
            scaler = torch.amp.GradScaler(DEVICE)
            patches.enter_context(mock.patch("accelerate.accelerator.get_grad_scaler", return_value=scaler))
            if is_installed("transformers"):
                name = "transformers.training_args.is_torch_bf16_gpu_available"
                patches.enter_context(mock.patch(name, return_value=True))
        yield


def run_accelerate(job: Job, row: Row, folder: str) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    with as_on_cuda(row):
        accelerator = Accelerator(
            mixed_precision=row.precision,
            gradient_accumulation_steps=row.accumulation,
            dataloader_config=DataLoaderConfiguration(non_blocking=row.non_blocking),
        )
    optimizer = job.optimizer(fused=True)
    model, optimizer, loader, schedule = accelerator.prepare(
        job.net, optimizer, job.loader(pin_memory=True), job.schedule(optimizer)
    )
    kept: list[torch.Tensor] = []
    for number, batch in enumerate(loader, 1):
        if row.does != "train":
            with torch.no_grad():
                answer = model.eval()(**batch)
            one = answer["logits"] if row.does == "predict" else answer["loss"][None]
            kept.append(accelerator.gather_for_metrics(one))
            continue
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if row.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), row.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if row.logs:
            accelerator.log({"loss": loss.item()}, step=number)
        if row.saves:
            accelerator.save_state(f"{folder}/{number}")
    if kept:
        torch.cat(kept).cpu()


def settings_of(job: Job, row: Row) -> dict[str, Any]:
    """Return the arguments of hftrain and transformers."""
    return {
        "num_train_epochs": 1,
        "per_device_train_batch_size": job.batch_size,
        "per_device_eval_batch_size": job.batch_size,
        "gradient_accumulation_steps": row.accumulation,
        "logging_strategy": "steps" if row.logs else "no",
        "logging_steps": 1,
        "save_strategy": "steps" if row.saves else "no",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **({row.precision: True} if row.precision else {}),
        **({"max_grad_norm": row.clip} if row.clip else {}),
    }


def start(trainer: Any, row: Row) -> None:
    if row.does == "predict":
        trainer.predict(trainer.eval_dataset)
    else:
        getattr(trainer, row.does)()


def run_hftrain(job: Job, row: Row, folder: str, make: Callable[[nn.Module], nn.Module] = nn.Module.train) -> None:
    arguments = TrainingArguments(folder, **settings_of(job, row))
    data = {"data_collator": collate, "train_dataset": job.samples, "eval_dataset": job.samples}
    start(Trainer(make(job.net), arguments, **data), row)


def run_transformers(job: Job, row: Row, folder: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    with as_on_cuda(row):
        arguments = transformers.TrainingArguments(
            folder, accelerator_config={"non_blocking": row.non_blocking}, **settings_of(job, row)
        )
        data = {"data_collator": collate, "train_dataset": job.samples, "eval_dataset": job.samples}
        trainer = transformers.Trainer(job.net, arguments, **data)
    start(trainer, row)


def run_lightning(job: Job, row: Row, folder: str) -> None:
    import lightning
    from lightning.pytorch import accelerators, callbacks, loggers, plugins, strategies

    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Simulated(accelerators.CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device.index)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.net

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch)["loss"])

        def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["logits"]

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer(fused=True)
            schedule = job.schedule(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    mixed: dict[str | None, Any] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
    precision = plugins.MixedPrecision(mixed[row.precision], DEVICE) if row.precision else None
    trainer = lightning.Trainer(
        strategy=strategies.SingleDeviceStrategy(torch.device(DEVICE, 0), Simulated(), precision_plugin=precision),
        max_epochs=1,
        logger=loggers.CSVLogger(folder),
        log_every_n_steps=1 if row.logs else 1000,
        callbacks=[callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)] if row.saves else None,
        enable_checkpointing=row.saves,
        gradient_clip_val=row.clip,
        accumulate_grad_batches=row.accumulation,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    runs = {"train": trainer.fit, "evaluate": trainer.validate, "predict": trainer.predict}
    runs[row.does](Module(), job.loader(pin_memory=True))


CONTENDERS: dict[str, Callable[[Job, Row, str], None]] = {
    "plain": run_plain,
    "hftrain": run_hftrain,
    "hftrain, task": partial(run_hftrain, make=Task),
    "accelerate": run_accelerate,
    "transformers": run_transformers,
    "lightning": run_lightning,
}


# -- counting --------------------------------------------------------------------------------------------------------


def place(wait: Any) -> str:
    """Say what waited, and the innermost line outside torch."""
    outside = [frame for frame in wait.stack if "/torch/" not in frame.filename and "torch_sim" not in frame.filename]
    frame = outside[-1]
    return f"{wait.kind} at {'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}: {frame.line}"


def count_run(sim: Any, name: str, row: Row, num: int) -> Places:
    job = make_job(SIZES["0.5ms"], lambda: None, num_steps=num * row.accumulation - 1)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), sim.record_syncs() as waits:
        CONTENDERS[name](job, row, folder)
    return Counter(place(wait) for wait in waits if row.does == "train" or wait.kind != "event")


def count(sim: Any, name: str, row: Row) -> Places:
    """Return the waits of the additional steps of a longer run, by place."""
    _, short, long = (count_run(sim, name, row, num) for num in (SHORT, SHORT, LONG))
    long.subtract(short)
    return long


def table(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> str:
    lines = [f"| waits of | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(found)} |" for title, found in cells.items())])


def write_pages(head: str, cells: Mapping[str, Sequence[str]]) -> None:
    """Put the table into docs/performance.md, and a part of it into README.md; `tests/docs` compares the two."""
    whole = table(list(CONTENDERS), cells)
    write_between(ROOT / "docs/performance.md", "printed by: python benchmarks/waits.py", f"{head}\n\n{whole}\n")
    places = [list(CONTENDERS).index(name) for name in SHOWN]
    part = table(list(SHOWN.values()), {title: [cells[title][place] for place in places] for title in SHOWN_ROWS})
    write_between(ROOT / "README.md", "written by: python benchmarks/waits.py --write", f"{head}\n\n{part}\n")


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--where", action="store_true", help="also list the lines of Python that wait")
    parser.add_argument("--write", action="store_true", help="put what is counted into README.md and docs/")
    options = parser.parse_args()
    names = [name for name in options.contenders if is_installed(name)]
    if options.write and (names != list(CONTENDERS) or options.rows != list(ROWS)):
        parser.error("--write needs every row, accelerate, transformers and lightning")
    if reason := why_not():
        print(f"Nothing is counted: {reason}.", file=sys.stderr)
        return
    warnings.simplefilter("ignore")
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    sim = load()
    cells: dict[str, list[str]] = {title: [] for title in options.rows}
    notes = []
    for title, name in product(options.rows, names):
        try:
            places = count(sim, name, ROWS[title])
            if ROWS[title].saves:
                places.subtract(count(sim, name, ROWS["step that logs"]))
        except Exception as error:
            cells[title].append("n/a")
            notes.append(f"{title}, {name}: n/a, {type(error).__name__}: {error}")
            continue
        cells[title].append(f"{places.total() / (LONG - SHORT):.3g}")
        for where, num in places.most_common() if options.where else ():
            notes += [f"{title}, {name}: {num / (LONG - SHORT):.3g} x {where}"] if num else []
    packages = [name for name in ("torch", "accelerate", "transformers", "lightning") if is_installed(name)]
    head = f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in packages)}:"
    print("\n".join([head, "", table(names, cells), "", *notes]))
    if options.write:
        write_pages(head, cells)


if __name__ == "__main__":
    main()
