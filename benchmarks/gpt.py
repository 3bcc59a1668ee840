"""Measure a language model's tokens per second and peak memory in the Trainer, against a hand-written loop.

    python benchmarks/gpt.py                                   # on a GPU: 125 million parameters, bf16, compiled
    python benchmarks/gpt.py --precision fp16 --no-compile     # or tf32 (on a GPU alone), fp32
    python benchmarks/gpt.py --size tiny --steps 10            # on a CPU; memory is measured on a GPU alone

A decoder-only transformer in plain torch trains on random tokens, which are made before the first step. Everybody does
the same work on the same batches: torch's fused AdamW (decay on matrices only), gradients clipped to norm 1, linear
schedule, the same precision and `torch.compile`, batches from page-locked memory where there is a GPU. Nobody logs,
evaluates, saves or shows a progress bar:

- plain: the loop of `run_plain`, with `torch.autocast` and torch's `GradScaler`; "plain-again" is the same loop once
  more, so its ratio shows the noise.
- hftrain-module, hftrain-task: the Trainer, given the model itself or a TaskModule around it.

Each runs in a process of its own, in alternating rounds. Every contender tells its losses to one probe, right after
the backward pass; the clock runs from the end of the warm-up to the last step and waits for the device at those two
places only. The losses of the first steps must agree with the plain loop's, or the script fails. Peak memory is what
torch's allocator held at most: over the whole run, and after the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _contenders import ARGUMENTS, InOrderTrainer, Job, Task
from torch import nn

from hftrain import TrainingArguments

NUM_WARMUP = 10
NUM_COMPARED = 10
# How far losses of the first steps may be apart. Some kernels of a GPU add in no fixed order.
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-3}

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = (*HALVES, "tf32", "fp32")


@dataclass(frozen=True, kw_only=True)
class Size:
    """A transformer, and how much of it is trained by default."""

    num_layers: int
    width: int
    num_heads: int
    vocabulary: int
    context: int
    batch_size: int
    num_steps: int


SIZES = {
    # GPT-2's smallest, its vocabulary rounded up to a multiple of 64.
    "125m": Size(
        num_layers=12, width=768, num_heads=12, vocabulary=50304, context=1024, batch_size=16, num_steps=200
    ),
    "tiny": Size(num_layers=2, width=128, num_heads=4, vocabulary=1024, context=64, batch_size=2, num_steps=40),
}  # fmt: skip


class Block(nn.Module):
    """Attention to what came before, then a multilayer perceptron; each is added to its own normalised input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.num_heads = size.width, size.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.to_heads(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions, whose output layer is its token embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.num_layers)))
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.norm(self.blocks(self.tokens(input_ids) + self.positions(positions)))
        logits = nn.functional.linear(hidden, self.tokens.weight)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Probe:
    """Keep every loss, and the time and memory of the steps after the warm-up."""

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self.device = device
        self.num_steps = NUM_WARMUP + num_steps
        self.losses: list[torch.Tensor] = []
        self.peaks: list[int] = []
        self._start_s = self.seconds = math.nan

    def note(self, loss: torch.Tensor) -> None:
        """Take a step's loss, which is not read before the end."""
        self.losses.append(loss)
        if len(self.losses) == NUM_WARMUP:
            self._start_s = self._read()
        elif len(self.losses) == self.num_steps:
            self.seconds = self._read() - self._start_s

    def _read(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a contender is given."""

    job: Job
    device: torch.device
    precision: str
    compiles: bool
    note: Callable[[torch.Tensor], None]


def run_plain(run: Run) -> None:
    job, device, is_cuda = run.job, run.device, run.device.type == "cuda"
    if run.precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    net = job.net.to(device).train()
    model: Any = torch.compile(net) if run.compiles else net
    optimizer = job.optimizer(fused=True)
    # In the optimizer's order: another one rounds the norm of the gradients otherwise.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    schedule = job.schedule(optimizer)
    scales = run.precision == "fp16"
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    scale = scaler.get_scale()
    for batch in job.loader(pin_memory=is_cuda):
        batch = {name: value.to(device, non_blocking=is_cuda) for name, value in batch.items()}
        with torch.autocast(device.type, HALVES.get(run.precision), enabled=run.precision in HALVES):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        run.note(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        before, scale = scale, scaler.get_scale()
        # A step that overflowed has changed nothing, so the rate stays as well.
        if scale >= before:
            schedule.step()
        optimizer.zero_grad()


def run_hftrain_module(run: Run) -> None:
    _run_hftrain(run, run.job.net)


def run_hftrain_task(run: Run) -> None:
    _run_hftrain(run, Task(run.job.net))


def _run_hftrain(run: Run, model: nn.Module) -> None:
    class NotingTrainer(InOrderTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            run.note(loss)
            return loss

    is_cuda = run.device.type == "cuda"
    own = {
        "optim": "adamw_torch_fused", "use_cpu": not is_cuda, "dataloader_pin_memory": is_cuda,
        "torch_compile": run.compiles,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=run.job.max_steps, per_device_train_batch_size=run.job.batch_size, **{**ARGUMENTS, **own}
        )
        NotingTrainer(
            model, arguments, train_dataset=run.job.samples, precision=run.precision, strategy="single"
        ).train()


CONTENDERS: dict[str, Callable[[Run], None]] = {
    "plain": run_plain,
    "plain-again": run_plain,
    "hftrain-module": run_hftrain_module,
    "hftrain-task": run_hftrain_task,
}


def make_job(size: Size, *, batch_size: int, num_steps: int) -> Job:
    """Make the model, and a batch of random tokens for each step."""
    torch.manual_seed(0)
    max_steps = NUM_WARMUP + num_steps
    tokens = torch.randint(size.vocabulary, (max_steps * batch_size, size.context + 1))
    samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
    return Job(net=GPT(size), samples=samples, batch_size=batch_size, max_steps=max_steps)


def train(contender: str, *, size: str, precision: str, compiles: bool, steps: int, batch_size: int) -> dict[str, Any]:
    """Train once in this process, and return speed, memory and every loss."""
    device = torch.device(device_type())
    if device.type == "cpu":
        torch.set_num_threads(1)
    job = make_job(SIZES[size], batch_size=batch_size, num_steps=steps)
    num_parameters = sum(parameter.numel() for parameter in job.net.parameters())
    probe = Probe(device, steps)
    CONTENDERS[contender](Run(job=job, device=device, precision=precision, compiles=compiles, note=probe.note))
    assert len(probe.losses) == job.max_steps, f"{len(probe.losses)} steps instead of {job.max_steps}"
    peaks = [*probe.peaks, torch.cuda.max_memory_allocated()] if probe.peaks else []
    return {
        "parameters": num_parameters,
        "tokens_per_s": steps * batch_size * SIZES[size].context / probe.seconds,
        "peak_bytes": max(peaks, default=None),
        "steady_peak_bytes": max(peaks[1:], default=None),
        "losses": [float(loss) for loss in probe.losses],
    }


def device_type() -> str:
    """Return the device that everybody trains on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def in_process(contender: str, **options: Any) -> dict[str, Any]:
    """Call `train` in a new process."""
    request = json.dumps({"contender": contender, **options})
    done = subprocess.run(
        [sys.executable, __file__, "--request", request], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_same_work(contender: str, found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Compare the losses of the first steps with the plain loop's.

    Raises:
        AssertionError: The contender does other work.
    """
    mine, theirs = (torch.tensor(each["losses"][:NUM_COMPARED], dtype=torch.float64) for each in (found, plain))
    torch.testing.assert_close(
        mine, theirs, rtol=TOLERANCE[device_type()], atol=0, equal_nan=True,
        msg=lambda text: f"{contender} does other work than the plain loop. {text}",
    )  # fmt: skip


def summarize(results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Return medians over rounds, None for what is not measured; ratios are to the plain loop of the same round."""
    summary: dict[str, dict[str, float | None]] = {}
    for name, runs in results.items():
        summary[name] = {}
        for field in ("tokens_per_s", "peak_bytes", "steady_peak_bytes"):
            is_measured = runs[0][field] is not None
            ratios = [
                mine[field] / plain[field] for mine, plain in zip(runs, results["plain"], strict=True) if is_measured
            ]
            summary[name][field] = statistics.median(run[field] for run in runs) if is_measured else None
            summary[name][f"{field}_ratio"] = statistics.median(ratios) if ratios else None
    return summary


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as Markdown: speed and memory, then the first losses."""
    lines = [
        "| contender | tokens per second | ratio to plain (least to most) | peak GB | ratio | after warm-up | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, found in summarize(results).items():
        pairs = zip(results[name], results["plain"], strict=True)
        ratios = [mine["tokens_per_s"] / plain["tokens_per_s"] for mine, plain in pairs]
        cells = [name, f"{found['tokens_per_s']:,.0f}"]
        cells.append(f"{found['tokens_per_s_ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        for field in ("peak_bytes", "steady_peak_bytes"):
            value, ratio = found[field], found[f"{field}_ratio"]
            cells += ["", ""] if value is None or ratio is None else [f"{value * 1e-9:.3f}", f"{ratio:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Losses of the first steps, and of the last:", ""]
    for name, runs in results.items():
        losses = runs[0]["losses"]
        lines.append(f"- {name}: {', '.join(f'{loss:.6f}' for loss in losses[:5])} ... {losses[-1]:.6f}")
    return "\n".join(lines)


def measure(names: list[str], *, num_rounds: int, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Let all take turns, the plain loop among them, each in a process of its own.

    Raises:
        AssertionError: A contender does other work than the plain loop.
    """
    names = ["plain", *(name for name in names if name != "plain")]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else reversed(names):
            found = in_process(name, **options)
            results[name].append(found)
            print(f"round {number + 1}, {name}: {found['tokens_per_s']:,.0f} tokens/s", file=sys.stderr, flush=True)
    for name, runs in results.items():
        for found in runs:
            check_same_work(name, found, results["plain"][0])
    return results


def main() -> None:
    """Measure and print."""
    is_cuda = device_type() == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="125m" if is_cuda else "tiny", help="tiny without a GPU")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=is_cuda, help="by default on a GPU")
    parser.add_argument("--steps", type=int, help=f"measured, after {NUM_WARMUP} others; by default the size's")
    parser.add_argument("--batch-size", type=int, help="sequences per step; by default the size's")
    parser.add_argument("--rounds", type=int, default=3, help="how often all take their turn")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--request", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.precision == "tf32" and not is_cuda:
        parser.error("--precision tf32 is for a GPU, and torch sees none.")
    if options.request:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = train(**json.loads(options.request))
        print(json.dumps(found))
        return
    size = SIZES[options.size]
    settings = {
        "size": options.size, "precision": options.precision, "compiles": options.compile,
        "steps": options.steps or size.num_steps, "batch_size": options.batch_size or size.batch_size,
    }  # fmt: skip
    results = measure(options.contenders, num_rounds=options.rounds, **settings)
    device = torch.cuda.get_device_name() if is_cuda else "CPU, one thread"
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {device}; "
        f"{results['plain'][0]['parameters']:,} parameters, {options.precision}, "
        f"{'compiled' if options.compile else 'not compiled'}, "
        f"{settings['batch_size']} x {size.context} tokens per step\n"
    )
    print(table(results))
    if options.json:
        content = {**settings, "device": device, "summary": summarize(results), "runs": results}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
