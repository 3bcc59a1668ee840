"""What processes exchange in a step of DDP that does not log: what torch's own DDP does, and the number of items."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.tiny import Net, make_rows, train
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from hftrain import TrainerCallback

pytestmark = pytest.mark.distributed

# Between the looks at what the loss is a mean over, which come after 1, 2, 4, 8, ... steps.
FIRST, LAST = 5, 7


class Watch(TrainerCallback):
    """Record the exchanges from the beginning of one step to the end of another."""

    def __init__(self) -> None:
        self.recorder = profile()
        self.counts: Counter[str] = Counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == FIRST:
            self.recorder.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LAST:
            self.recorder.stop()
            self.counts = exchanges(self.recorder)


def exchanges(recorder: Any) -> Counter[str]:
    return Counter(event.name for event in recorder.events() if event.name.startswith("c10d::"))


def by_hand(accumulation: int) -> Counter[str]:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"x": torch.randn(4, 4), "labels": torch.zeros(4, dtype=torch.long)}
    recorder = profile()
    for step in range(1, LAST + 1):
        if step == FIRST:
            recorder.start()
        for _ in range(accumulation - 1):
            with model.no_sync():
                model(**batch)[0].backward()
        model(**batch)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    recorder.stop()
    return exchanges(recorder)


def count(folder: str) -> list[tuple[bool, Counter[str], Counter[str]]]:
    """Return average_tokens_across_devices, what the Trainer exchanges with it, and what a loop by hand does."""
    answers = []
    for accumulation, averages in ((1, True), (3, True), (1, False), (3, False)):
        watch = Watch()
        train(
            Path(folder), train_dataset=make_rows(96), callbacks=[watch], strategy="ddp", max_steps=LAST + 2,
            logging_steps=LAST + 1, gradient_accumulation_steps=accumulation, per_device_train_batch_size=2,
            average_tokens_across_devices=averages,
        )  # fmt: skip
        assert dist.is_initialized()
        answers.append((averages, watch.counts, by_hand(accumulation)))
    return answers


def test_step_that_does_not_log_exchanges_what_ddp_does_and_the_number_of_items(
    tmp_path: Path, run_distributed: Any
) -> None:
    num_steps = LAST - FIRST + 1
    for answer in run_distributed(count, folder=str(tmp_path)):
        for averages, found, plain in answer:
            assert plain["c10d::allreduce_"] == num_steps
            # The items of a step are counted before it begins, so those of the first are not seen here.
            assert found["c10d::allreduce_"] == num_steps + (num_steps - 1) * averages
            assert found.keys() == plain.keys()
