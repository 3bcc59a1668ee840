"""Measure time and peak memory of an evaluation, against transformers' Trainer on the same work, on one CPU core.

    python benchmarks/evaluation.py                          # the table, a few minutes
    python benchmarks/evaluation.py --samples 20000          # a smaller set

A linear layer classifies samples into 1,000 classes, in batches of 256, and the accuracy over the whole set is asked
for, which must come out the same for everybody:

- hftrain-streaming: a TaskModule with a torchmetrics accuracy. Nothing is kept.
- hftrain-argmax, transformers-argmax: `compute_metrics` on what `preprocess_logits_for_metrics` leaves: class numbers.
- hftrain-logits, transformers-logits: `compute_metrics` on all logits, which is what a plain script does.
- hftrain-batches, transformers-batches: `batch_eval_metrics=True`.
- hftrain-tokens: like argmax, with 128 class numbers per sample, so that what is kept can be told from noise.

Each runs in a process of its own, which first evaluates a small set, so that what is loaded and cached once does not
count. Memory is the highest resident size during the evaluation less the size right before it (Linux only).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_FEATURES = 8
NUM_CLASSES = 1000
NUM_TOKENS = 128
BATCH_SIZE = 256
WARM_UP_SAMPLES = 2000

CONTENDERS = (
    "hftrain-streaming", "hftrain-argmax", "transformers-argmax", "hftrain-batches", "transformers-batches",
    "hftrain-logits", "transformers-logits", "hftrain-tokens",
)  # fmt: skip


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples that take no memory however many there are."""

    def __init__(self, number: int, *, num_tokens: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.number, self.num_tokens = number, num_tokens
        self.table = torch.randn(1009, NUM_FEATURES, generator=generator)
        if num_tokens is None:
            # Every other answer is right.
            classes = Net(num_tokens=None).layer(self.table).argmax(-1)
            self.labels = (classes + torch.arange(1009) % 2) % NUM_CLASSES
        else:
            self.labels = torch.randint(4, (1009, num_tokens), generator=generator)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.table[index % 1009], "labels": self.labels[index % 1009]}


class Net(nn.Module):
    """One linear layer; with tokens, one class number for each."""

    def __init__(self, *, num_tokens: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_tokens = num_tokens
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES if num_tokens is None else 4 * num_tokens)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        if self.num_tokens is not None:
            return {"loss": logits.mean(), "logits": logits.unflatten(-1, (self.num_tokens, 4))}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class BatchAccuracy:
    """Accuracy, batch by batch."""

    def __init__(self) -> None:
        self.hits = self.count = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        labels = torch.as_tensor(prediction.label_ids)
        self.hits += int((torch.as_tensor(prediction.predictions).argmax(-1) == labels).sum())
        self.count += labels.numel()
        accuracy = self.hits / self.count
        if compute_result:
            self.hits = self.count = 0
        return {"accuracy": accuracy}


def accuracy_of_logits(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def accuracy_of_classes(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


def to_classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def make_trainer(name: str, folder: str) -> Any:
    """Return the contender's Trainer."""
    library, _, kind = name.partition("-")
    options: dict[str, Any] = {
        "per_device_eval_batch_size": BATCH_SIZE, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "dataloader_pin_memory": False, "batch_eval_metrics": kind == "batches",
    }  # fmt: skip
    parts: dict[str, Any] = {
        "streaming": {},
        "argmax": {"compute_metrics": accuracy_of_classes, "preprocess_logits_for_metrics": to_classes},
        "tokens": {"compute_metrics": accuracy_of_classes, "preprocess_logits_for_metrics": to_classes},
        "logits": {"compute_metrics": accuracy_of_logits},
        "batches": {"compute_metrics": BatchAccuracy()},
    }[kind]
    model: Any = Net(num_tokens=NUM_TOKENS if kind == "tokens" else None)
    if library == "transformers":
        import transformers

        return transformers.Trainer(model, transformers.TrainingArguments(folder, **options), **parts)
    import hftrain

    if kind == "streaming":
        model = make_task(model)
    return hftrain.Trainer(model, hftrain.TrainingArguments(folder, **options), **parts)


def make_task(model: nn.Module) -> Any:
    import torchmetrics

    from hftrain import StepOutput, TaskModule

    class Task(TaskModule):
        def __init__(self) -> None:
            super().__init__(model)
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(
                NUM_CLASSES, average="micro", validate_args=False
            )

        def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
            outputs = self.model(**batch)
            self.accuracy.update(outputs["logits"], batch["labels"])
            return StepOutput(loss=outputs["loss"])

    return Task()


def memory(field: str) -> int:
    """Return a size from Linux's account of this process, in bytes: VmRSS (now) or VmHWM (the highest so far)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(name: str, num_samples: int) -> dict[str, float]:
    """Evaluate once and return seconds, bytes and the accuracy."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    num_tokens = NUM_TOKENS if name.endswith("tokens") else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, folder)
        trainer.evaluate(Samples(WARM_UP_SAMPLES, num_tokens=num_tokens))
        samples = Samples(num_samples, num_tokens=num_tokens)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the highest size so far
        before, start_s = memory("VmRSS"), time.perf_counter()
        metrics = trainer.evaluate(samples)
        seconds, peak = time.perf_counter() - start_s, memory("VmHWM") - before
    per_sample = {"logits": 4 * NUM_CLASSES + 8, "argmax": 16, "tokens": 16 * NUM_TOKENS}.get(name.partition("-")[2], 0)
    return {
        "seconds": seconds, "peak_bytes": peak, "kept_bytes": per_sample * num_samples,
        "accuracy": metrics["eval_accuracy"],
    }  # fmt: skip


def run(name: str, num_samples: int) -> dict[str, float]:
    """Measure a contender in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--samples", str(num_samples)]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    result: dict[str, float] = json.loads(shown.splitlines()[-1])
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3, help="how often all are measured, in turn")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--child", choices=CONTENDERS, help="measure one in this process and print JSON")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.samples)))
        return
    names = [name for name in options.contenders if find_spec(name.partition("-")[0]) is not None]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            results[name].append(run(name, options.samples))
    accuracies = {round(found[0]["accuracy"], 6) for name, found in results.items() if not name.endswith("tokens")}
    assert len(accuracies) == 1, f"They do different work: {accuracies}"
    print(f"{options.samples} samples, {NUM_CLASSES} classes, torch {torch.__version__}\n")
    print(
        "| contender | seconds | to transformers' | peak MB | to transformers' | kept MB |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for name in names:
        peer = {"hftrain-streaming": "transformers-argmax"}.get(name, name.replace("hftrain", "transformers"))
        cells = [name]
        for field, scale in (("seconds", 1.0), ("peak_bytes", 1e-6)):
            cells.append(f"{statistics.median(found[field] for found in results[name]) * scale:.1f}")
            pairs = zip(results[name], results.get(peer, []), strict=False)
            ratios = [mine[field] / theirs[field] for mine, theirs in pairs if theirs[field]]
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        print(f"| {' | '.join(cells)} | {results[name][0]['kept_bytes'] * 1e-6:.1f} |")


if __name__ == "__main__":
    main()
