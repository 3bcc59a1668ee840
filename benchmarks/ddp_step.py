"""Measure what the Trainer adds to a step of a hand-written DDP loop, on two processes of one machine.

    OMP_NUM_THREADS=1 python benchmarks/ddp_step.py    # starts the processes itself

The work and the way of measuring are those of `overhead.py`: float32, AdamW, clipping, a linear schedule, the same
batches in the same order, alternating turns of a few steps in threads of one process, the median of the ratios to the
plain loop's turn of the same round. Here there are two processes, each with such a ring of threads, in the same order;
the gradients are averaged by torch's `DistributedDataParallel` over gloo, and the clock is the one on the wall, because
a step waits for the other process. The plain loop computes what the Trainer computes: the mean over the items of all
processes, whose number they tell each other while the forward pass runs. The two "local" ones do without that exchange.
"plain-again" is the plain loop once more, so its ratio shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _contenders import ARGUMENTS, SIZES, InOrderTrainer, Job, Task, collate
from overhead import CLOCKS, Contenders, keep_memory, measure, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hftrain import TrainingArguments

NUM_PROCESSES = 2
BUDGET = 1.05


def everybodys(job: Job) -> list[dict[str, torch.Tensor]]:
    """Return the samples of all processes."""
    return job.samples * dist.get_world_size()


def run_plain(job: Job) -> None:
    _run_plain(job, over_all=True)


def run_plain_local(job: Job) -> None:
    _run_plain(job, over_all=False)


def _run_plain(job: Job, *, over_all: bool) -> None:
    device = torch.device("cpu")
    model = DistributedDataParallel(job.net.to(device).train())
    parameters = list(job.net.parameters())
    optimizer = job.optimizer(fused=True)
    schedule = job.schedule(optimizer)
    samples = everybodys(job)
    num_ranks = dist.get_world_size()
    batches = torch.utils.data.BatchSampler(range(len(samples)), job.batch_size, drop_last=True)
    own: Any = list(batches)[dist.get_rank() :: num_ranks]
    loader: Any = torch.utils.data.DataLoader(samples, batch_sampler=own, collate_fn=collate)  # type: ignore[arg-type]
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        share = len(batch["labels"])
        total = torch.tensor(share)
        exchange = dist.all_reduce(total, async_op=True) if over_all else None
        loss = model(**batch)["loss"]
        if exchange is not None:
            exchange.wait()
            loss = loss * (share * num_ranks) / total
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def run_hftrain_task(job: Job) -> None:
    _run_hftrain(job, Task(job.net), over_all=True)


def run_hftrain_module(job: Job) -> None:
    _run_hftrain(job, job.net, over_all=True)


def run_hftrain_local(job: Job) -> None:
    _run_hftrain(job, job.net, over_all=False)


def _run_hftrain(job: Job, model: nn.Module, *, over_all: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=job.max_steps,
            per_device_train_batch_size=job.batch_size,
            average_tokens_across_devices=over_all,
            **ARGUMENTS,
        )
        InOrderTrainer(model, arguments, data_collator=collate, train_dataset=everybodys(job), strategy="ddp").train()


CONTENDERS: Contenders = {
    "plain": run_plain,
    "plain-again": run_plain,
    "plain-local": run_plain_local,
    "hftrain-task": run_hftrain_task,
    "hftrain-module": run_hftrain_module,
    "hftrain-local": run_hftrain_local,
}


def run_rank(options: argparse.Namespace) -> None:
    """Measure in one of the processes; the first one prints."""
    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results = measure(
        SIZES[options.size],
        list(CONTENDERS),
        num_repeats=options.repeats,
        clock=CLOCKS[options.clock],
        contenders=CONTENDERS,
    )
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} processes\n\n{table(results)}\n")
        ratios = {result.contender: result.ratio for result in results}
        for name in CONTENDERS:
            if name.startswith("hftrain"):
                ratio = ratios[name] / (ratios["plain-local"] if name.endswith("local") else 1.0)
                verdict = "within" if ratio <= BUDGET else "over"
                print(f"{name}: {ratio:.3f}, {verdict} the budget of {BUDGET:.2f}")
        if options.json:
            text = json.dumps([asdict(result) for result in results], indent=2)
            options.json.write_text(text + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="5ms")
    parser.add_argument("--repeats", type=int, default=3, help="how often all start anew")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: without the waiting, for a busy machine")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    ended = subprocess.run([sys.executable, *launcher, *sys.argv], check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
