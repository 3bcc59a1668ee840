"""Measure what the order of a large map-style dataset costs: memory, and time to the first step.

    python benchmarks/order.py                               # 10^7 and 10^8 samples, a minute
    python benchmarks/order.py --samples 1e9                 # 8 GB of memory are enough

A dataset of that many samples, made up as they are read, is trained on for one step of 32 samples. Each figure is of
a process of its own:

- randperm: `torch.randperm` alone, which is the documented order, so nothing can be faster.
- shuffled: the default order.
- by-length: `group_by_length=True`, with lengths that are known (an array of int32 takes 4 more bytes a sample).
- sequential: `train_sampling_strategy="sequential"`.

MB are the highest resident size of a training less that of one with 1,000 samples (Linux only). Seconds are from the
making of the loader to the first batch, fresh and in the middle of the epoch, in CPU time of one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy
import torch
from torch import nn

BATCH_SIZE = 32
ORDERS = ("randperm", "shuffled", "by-length", "sequential")


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples that take no memory however many there are."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.sample = {"x": torch.ones(4), "labels": 1}

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.sample


class Net(nn.Module):
    """The smallest model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the loss."""
        return (nn.functional.cross_entropy(self.layer(x), labels),)


def measure(order: str, num: int, where: str, folder: str) -> dict[str, float]:
    """Return seconds to the first batch and the highest resident size, in MB."""
    if order == "randperm":
        start_s = time.process_time()
        torch.randperm(num, generator=torch.Generator().manual_seed(42), dtype=torch.int32)
        return {"seconds": time.process_time() - start_s, "mb": peak_mb()}

    from hftrain import Trainer, TrainingArguments
    from hftrain.data.feed import TrainFeed
    from hftrain.extras.grouping import LengthShuffledSampler

    class ByLength(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            lengths = numpy.tile(numpy.arange(1, 1001, dtype=numpy.int32), num // 1000)
            return LengthShuffledSampler(lengths, batch_size=BATCH_SIZE, seed=42)

    options = {"train_sampling_strategy": "sequential"} if order == "sequential" else {}
    args = TrainingArguments(
        folder, max_steps=1, per_device_train_batch_size=BATCH_SIZE, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, **options,
    )  # fmt: skip
    kind = ByLength if order == "by-length" else Trainer
    trainer = kind(Net(), args, train_dataset=Samples(num))
    if where == "train":
        trainer.train()
        return {"seconds": 0.0, "mb": peak_mb()}
    start_s = time.process_time()
    loader = trainer.get_train_dataloader()
    next(TrainFeed(loader, seed=42).open(0, skip=len(loader) // 2 if where == "middle" else 0))
    return {"seconds": time.process_time() - start_s, "mb": peak_mb()}


def peak_mb() -> float:
    """Return the highest resident size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def in_new_process(order: str, num: int, where: str) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", order, str(num), where]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print the table, or measure one row of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=float, nargs="*", default=[1e7, 1e8])
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        order, num, where = options.child
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(order, int(num), where, folder)))
        return
    print("| samples | order | MB | bytes a sample | s to the first batch | s to one in the middle |")
    print("|---|---|---:|---:|---:|---:|")
    for order in options.orders:
        small_mb = in_new_process(order, 1000, "train")["mb"]
        for num in map(int, options.samples):
            trained, fresh, middle = (in_new_process(order, num, where) for where in ("train", "fresh", "middle"))
            mb = trained["mb"] - small_mb
            seconds = "" if order == "randperm" else f"{middle['seconds']:.2f}"
            print(f"| {num:.0e} | {order} | {mb:.0f} | {mb * 1e6 / num:.1f} | {fresh['seconds']:.2f} | {seconds} |")


if __name__ == "__main__":
    main()
