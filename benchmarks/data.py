"""Measure how fast batches are read, against torch's DataLoader and transformers' Trainer in the same run.

    python benchmarks/data.py                       # the table, a minute or two
    python benchmarks/data.py --data text --rounds 9

Three kinds of data are read in shuffled batches of 64, in the process that trains:

- text: rows of 128 token ids, a mask and a label in a `datasets.Dataset`, with the default collator.
- tensors: rows of 128 numbers and a label in a `TensorDataset`, with the default collator.
- ragged: rows of 16 to 128 token ids in a `datasets.Dataset`, padded by `DataCollatorWithPadding`.

Read by:

- hftrain, transformers: the loader that the Trainer makes of the data.
- torch: `DataLoader(dataset, batch_size=64, shuffle=True)`, with the same collator.
- torch-best: the fastest that torch's loader offers: a `BatchSampler` as the sampler and `batch_size=None`, so that
  the dataset is asked for whole batches, of `datasets` in its "torch" format. What is padded has to be read by rows.

All must give the same tensors for the same samples, or the script fails. Samples per second of CPU time on one core,
medians of alternating rounds; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, default_collate

BATCH_SIZE = 64
WIDTH = 128
NUM_SAMPLES = 20_000
CONTENDERS = ("hftrain", "torch-best", "torch", "transformers")


class Net(nn.Module):
    """Takes all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> None:
        """Do nothing: only the loader is measured."""


def tokenizer() -> Any:
    """Return a tokenizer that needs no download."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def make_dataset(kind: str) -> Any:
    """Return the samples."""
    rng = numpy.random.default_rng(0)
    if kind == "tensors":
        return TensorDataset(torch.randn(NUM_SAMPLES, WIDTH), torch.randint(2, (NUM_SAMPLES,)))
    from datasets import Dataset

    lengths = rng.integers(16, WIDTH + 1, NUM_SAMPLES) if kind == "ragged" else [WIDTH] * NUM_SAMPLES
    ids = [rng.integers(2, 30_000, length).tolist() for length in lengths]
    masks = [[1] * len(each) for each in ids]
    labels = rng.integers(0, 2, NUM_SAMPLES).tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": masks, "labels": labels})


def make_loader(name: str, kind: str, dataset: Any, folder: str) -> Callable[[], Iterator[Any]]:
    """Return what begins an epoch."""
    import transformers

    import hftrain
    from hftrain.data.feed import TrainFeed

    pads = {"tokenizer": tokenizer()} if kind == "ragged" else {}
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SIZE, "report_to": "none", "use_cpu": True, "remove_unused_columns": True,
    }  # fmt: skip
    if name == "hftrain":
        collator = hftrain.DataCollatorWithPadding(**pads) if pads else None
        args = hftrain.TrainingArguments(folder, **options)
        ours = hftrain.Trainer(Net(), args, train_dataset=dataset, data_collator=collator)
        feed = TrainFeed(ours.get_train_dataloader(), seed=42)
        return lambda: feed.open(0)
    # transformers' default collator takes no tuples.
    collate: Any = default_collate if kind == "tensors" else transformers.default_data_collator
    collate = transformers.DataCollatorWithPadding(**pads) if pads else collate
    if name == "transformers":
        theirs = transformers.Trainer(
            Net(), transformers.TrainingArguments(folder, **options), train_dataset=dataset, data_collator=collate
        )
        loader = theirs.get_train_dataloader()
    elif name == "torch-best" and not pads:
        whole = dataset if kind == "tensors" else dataset.with_format("torch")
        batches = BatchSampler(RandomSampler(dataset), BATCH_SIZE, False)
        loader = DataLoader(whole, sampler=batches, batch_size=None)
    else:
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    return lambda: iter(loader)


def values(batch: Any) -> list[torch.Tensor]:
    """Return a batch's tensors in one order."""
    return [batch[name] for name in sorted(batch)] if hasattr(batch, "keys") else list(batch)


def fingerprint(open_epoch: Callable[[], Iterator[Any]]) -> list[float]:
    """Return sums over an epoch, which do not depend on its order."""
    sums: list[float] = []
    for batch in open_epoch():
        parts = values(batch)
        sums = [
            total + float(part.double().sum()) for total, part in zip(sums or [0.0] * len(parts), parts, strict=True)
        ]
    return [round(each, 3) for each in sums]


def rate(open_epoch: Callable[[], Iterator[Any]], num_batches: int) -> float:
    """Return samples per second of CPU time."""
    start_s = time.process_time()
    num = sum(1 for _ in islice(open_epoch(), num_batches))
    return num * BATCH_SIZE / (time.process_time() - start_s)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["text", "tensors", "ragged"])
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| data | contender | samples/s | to torch's best | to transformers |")
    print("|---|---|---:|---:|---:|")
    for kind in options.data:
        dataset = make_dataset(kind)
        num_batches = 300 if kind == "tensors" else 40
        rates: dict[str, list[float]] = {name: [] for name in options.contenders}
        with tempfile.TemporaryDirectory() as folder:
            loaders = {name: make_loader(name, kind, dataset, folder) for name in rates}
            found = {name: fingerprint(loader) for name, loader in loaders.items()}
            if any(each != found["hftrain"] for each in found.values()):
                raise SystemExit(f"The batches differ: {found}")
            for _ in range(options.rounds):
                for name, loader in loaders.items():
                    rates[name].append(rate(loader, num_batches))
        for name, own in rates.items():
            ratios = [
                statistics.median(mine / other for mine, other in zip(own, rates[peer], strict=True))
                if peer in rates
                else float("nan")
                for peer in ("torch-best", "transformers")
            ]
            print(
                f"| {kind} | {name} | {statistics.median(own):,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
