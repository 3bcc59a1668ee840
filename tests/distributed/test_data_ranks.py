"""Counts on processes of which pairs read the same samples: those of as many processes as there are pairs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paired import PairedStrategy
from support.tiny import Stream, Task, make_arguments, make_rows
from torch import nn

from hftrain import FlightLog, PredictionWriter, StepOutput, Throughput, Trainer, TrainerCallback, set_seed

pytestmark = pytest.mark.distributed


def exchange() -> list[Any]:
    strategy = PairedStrategy(use_cpu=True)
    strategy.launch()
    data, own = strategy.data, torch.tensor([10.0 * strategy.rank])
    later, wait = data.reduce_later(own)
    wait()
    data.barrier()
    found = [
        *(data.rank, data.world_size, data.is_main, data.device == strategy.device),
        *(data.reduce(own, op).item() for op in ("sum", "mean", "max")),
        *(later.item(), data.gather(own).tolist(), data.gather_object(strategy.rank)),
        *(data.broadcast_object(strategy.rank, src) for src in (0, 1)),
        *(data.all_true(strategy.rank < 3), strategy.reduce(own).item()),
    ]
    strategy.close()
    return found


def test_exchanges_stay_among_the_processes_that_differ_in_data(run_distributed: Any) -> None:
    assert run_distributed(exchange, 4) == [
        [0, 2, True, True, 20.0, 10.0, 20.0, 20.0, [0.0, 20.0], [0, 2], 0, 2, True, 60.0],
        [0, 2, True, True, 40.0, 20.0, 30.0, 40.0, [10.0, 30.0], [1, 3], 1, 3, False, 60.0],
        [1, 2, False, True, 20.0, 10.0, 20.0, 20.0, [0.0, 20.0], [0, 2], 0, 2, True, 60.0],
        [1, 2, False, True, 40.0, 20.0, 30.0, 40.0, [10.0, 30.0], [1, 3], 1, 3, False, 60.0],
    ]


# -- whole runs ------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A model whose loss is the mean over its labels, ignoring -100, as language models have it."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> dict[str, Any]:
        logits = self.head(self.embedding(input_ids))
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=how)
        return {"loss": loss / (1 if num_items_in_batch is None else num_items_in_batch), "logits": logits}

    def floating_point_ops(self, inputs: Any) -> int:
        return int(inputs["input_ids"].numel())


def make_words(num: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return rows of 6 words, of which 1 to 6 have labels."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num):
        labels = torch.randint(0, 5, (6,), generator=draw)
        labels[int(torch.randint(1, 7, (), generator=draw)) :] = -100
        rows.append({"input_ids": torch.randint(0, 11, (6,), generator=draw), "labels": labels})
    return rows


class Items(TrainerCallback):
    def __init__(self) -> None:
        self.items: list[float] = []

    def wrap_parts(self, parts: Any) -> Any:
        def train(model: Any, batch: Any, num_items: Any) -> Any:
            self.items.append(float(num_items))
            return parts.hooks.training_step(model, batch, num_items)

        return replace(parts, hooks=replace(parts.hooks, training_step=train))


def counted(prediction: Any) -> dict[str, float]:
    known = prediction.label_ids != -100
    right = (prediction.predictions.argmax(-1) == prediction.label_ids)[known]
    return {"share": float(right.mean()), "labels": float(known.sum())}


def run(folder: str, strategy: str, kind: str = "map", resume: bool = False) -> dict[str, Any]:
    set_seed(3)
    rows: Any = make_words(38, seed=1)
    options: dict[str, Any] = {"num_train_epochs": 2}
    if kind != "map":
        rows, options = Stream(rows), {"max_steps": 8}
        options["accelerator_config"] = {"dispatch_batches": kind == "dispatch"}
    options |= {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    args = make_arguments(
        Path(folder) / "out", per_device_train_batch_size=2, gradient_accumulation_steps=3,
        include_num_input_tokens_seen=True, include_tokens_per_second=True, logging_steps=2, **options,
    )  # fmt: skip
    items, made = Items(), PairedStrategy(use_cpu=True) if strategy == "paired" else strategy
    writer = PredictionWriter(Path(folder) / "predictions")
    trainer: Any = Trainer(
        Words(), args, train_dataset=rows, eval_dataset=make_words(7, seed=2), strategy=made, compute_metrics=counted,
        callbacks=[items, Throughput(), FlightLog(flush_every=1, on_broken="stop"), writer],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=f"{folder}/out/checkpoint-2" if resume else None)
    writer.replaces_predictions = False
    predicted = trainer.predict(make_words(9, seed=5))
    trainer.strategy.barrier()
    written = torch.cat([batch["outputs"] for batch in PredictionWriter.read(Path(folder) / "predictions")])
    state, hidden = trainer.state, ("_per_second", "_runtime", "mfu")
    found = {
        "logs": [{k: v for k, v in each.items() if not k.endswith(hidden)} for each in state.log_history],
        "rates": [sum(entry.get(name, 0.0) > 0 for entry in state.log_history) for name in ("samples_per_second",)],
        "items": items.items,
        "tokens": state.num_input_tokens_seen,
        "flops": state.total_flos,
        "batch": trainer.get_total_train_batch_size(args),
        "predicted": predicted.predictions.tolist(),
        "metrics": [predicted.metrics[name] for name in ("test_loss", "test_share", "test_labels")],
        "written": written.tolist(),
        "weights": [parameter.tolist() for parameter in trainer.model.parameters()],
    }
    trainer.strategy.close()
    return found


def assert_alike(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for name in one:
            assert_alike(one[name], other[name], f"{where}/{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_alike(mine, theirs, f"{where}/{number}")
    else:
        assert one == pytest.approx(other, rel=2e-5, abs=1e-6), where


@pytest.mark.parametrize("kind", ["map", "dispatch"])
def test_runs_count_what_half_as_many_processes_count(tmp_path: Path, run_distributed: Any, kind: str) -> None:
    """Four processes of which pairs read the same samples, and two processes."""
    for resume in (False, True):
        paired = run_distributed(run, 4, folder=str(tmp_path / "paired"), strategy="paired", kind=kind, resume=resume)
        plain = run_distributed(run, 2, folder=str(tmp_path / "ddp"), strategy="ddp", kind=kind, resume=resume)
        assert plain[0]["batch"] == 12
        assert plain[0]["tokens"] > 0
        for number, found in enumerate(paired):
            assert_alike(found, plain[number // 2], f"process {number}")


class Summing(Task):
    """Logs a number of each micro-batch, and adds up all samples in a metric."""

    def __init__(self) -> None:
        super().__init__()
        torchmetrics = pytest.importorskip("torchmetrics")
        self.seen = torchmetrics.SumMetric()

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        output = super().training_step(batch)
        output.logs = {"x": batch["x"].sum()}
        return output

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        self.seen.update(len(batch["x"]))
        return super().evaluation_step(batch)


def measure(folder: str, strategy: str) -> list[float]:
    """Return what is summed over ranks and divided by a time, times that time; logs; a metric's sum."""
    set_seed(3)
    args = make_arguments(Path(folder), per_device_train_batch_size=2, max_steps=4, logging_steps=4)
    made, throughput = PairedStrategy(use_cpu=True) if strategy == "paired" else strategy, Throughput()
    trainer: Any = Trainer(
        Summing(), args, train_dataset=make_rows(22), eval_dataset=make_rows(7, seed=2), strategy=made,
        callbacks=[throughput],
    )  # fmt: skip
    metrics = trainer.train().metrics
    logged = next(entry for entry in trainer.state.log_history if "x" in entry)
    throughput._counts, throughput._since_s = [10, 0, 0], time.perf_counter() - 1000
    rate = throughput._speed(trainer.strategy.device)["samples_per_second"]
    found = [metrics["train_samples_per_second"] * metrics["train_runtime"], rate * 1000, logged["x"]]
    found.append(float(trainer.evaluate()["eval_seen"]))
    trainer.strategy.close()
    return found


def test_speeds_logs_and_metrics_count_each_sample_once(tmp_path: Path, run_distributed: Any) -> None:
    paired = run_distributed(measure, 4, folder=str(tmp_path / "paired"), strategy="paired")
    plain = run_distributed(measure, 2, folder=str(tmp_path / "ddp"), strategy="ddp")
    assert plain[0] == pytest.approx([16, 20, plain[0][2], 7], rel=0.02)
    for found in paired:
        assert found == pytest.approx(plain[0], rel=0.02)
