"""Measure what each of several processes holds while predictions of a large set are kept, on gloo and CPUs.

    python benchmarks/evaluation_ranks.py                                    # 200,000 samples x 100 classes
    python benchmarks/evaluation_ranks.py --samples 1000000 --classes 1000   # 4 GB on disk: a quiet machine

A linear layer's logits are predicted by 1, 2 and 4 processes, with and without `spill_dir`, and `compute_metrics` reads
all of them once, piece by piece. Each process tells the growth of its own memory (anonymous pages, its peak while it
predicts less what it had before; Linux only) and of the pages of files that it maps, which the system takes back when
others need them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from hftrain import Trainer, TrainingArguments

NUM_FEATURES = 8
_EVERY_S = 0.01


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that take no memory however many there are."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.table = torch.randn(1009, NUM_FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.table[index % 1009], "labels": torch.tensor(index % 7)}


class Net(nn.Module):
    """One linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(NUM_FEATURES, num_classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Sampler(threading.Thread):
    """Note the largest anonymous and mapped memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()
        self.first, self.peak = self.look(), self.look()

    def look(self) -> list[int]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return [int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")]

    def run(self) -> None:
        while not self.is_over.wait(_EVERY_S):
            self.peak = list(map(max, self.peak, self.look()))

    def grown(self) -> list[float]:
        self.is_over.set()
        self.join()
        return [(peak - first) / 1e6 for peak, first in zip(self.peak, self.first, strict=True)]


def top_class(prediction: Any) -> dict[str, float]:
    """Return the share of right classes and a checksum, reading a thousand rows at a time."""
    logits, labels = prediction.predictions, prediction.label_ids
    right = total = 0.0
    for start in range(0, len(logits), 1000):
        rows = numpy.asarray(logits[start : start + 1000])
        right += float((rows.argmax(-1) == labels[start : start + 1000]).sum())
        total += float(rows.sum(dtype=numpy.float64))
    return {"accuracy": right / len(logits), "checksum": total}


def measure(options: argparse.Namespace) -> None:
    """Predict as one of several processes, and print what it took."""
    folder = Path(options.folder)
    args = TrainingArguments(
        str(folder / "out"), per_device_eval_batch_size=256, use_cpu=True, disable_tqdm=True, report_to="none"
    )
    spill_dir = folder / "spilled" if options.spill else None
    trainer = Trainer(Net(options.classes), args, compute_metrics=top_class, spill_dir=spill_dir)
    trainer.predict(Samples(2000))
    sampler, start_s = Sampler(), time.perf_counter()
    sampler.start()
    output = trainer.predict(Samples(options.samples))
    seconds = time.perf_counter() - start_s
    found = {"rank": args.process_index, "seconds": seconds, "metrics": output.metrics, "grown": sampler.grown()}
    (folder / f"rank{args.process_index}.json").write_text(json.dumps(found))


def run(options: argparse.Namespace, num_processes: int, *, spills: bool) -> None:
    """Start the processes, and print one row of the table."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable]
        if num_processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes), "--standalone"]
        command += [__file__, "--samples", str(options.samples), "--classes", str(options.classes), "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*command, "--measure", *(["--spill"] if spills else [])], check=True, env=environment, capture_output=True
        )
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    checks = {(each["metrics"]["test_accuracy"], each["metrics"]["test_checksum"]) for each in found}
    assert len(checks) == 1, checks
    anon, mapped = ([round(each["grown"][kind]) for each in found] for kind in (0, 1))
    seconds = max(each["seconds"] for each in found)
    print(
        f"| {num_processes} | {'yes' if spills else 'no'} | {max(anon)} | {max(mapped)} | {seconds:.0f} |",
        *checks,
        flush=True,
    )


def main() -> None:
    """Print the table, or take part in one of its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", default=None, help="where predictions are spilled to; a disk, not memory")
    parser.add_argument("--spill", action="store_true", help="with spill_dir alone")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    print("| processes | `spill_dir` | own MB | mapped MB | s |\n|---:|---|---:|---:|---:|")
    for spills in (True,) if options.spill else (False, True):
        for number in options.processes:
            run(options, number, spills=spills)


if __name__ == "__main__":
    main()
