"""Generation over processes: lengths differ by process, and a split model generates in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from hftrain import ConfigError, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments
from hftrain.strategies.ddp import DDPStrategy

pytestmark = pytest.mark.distributed

PAD = 9


class Counter(nn.Module):
    """Generate from each sample's number that number of tokens: 1 to 8; the batch is as wide as its largest."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10)
        self.num_calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.table(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def generate(self, input_ids: torch.Tensor, synced_gpus: bool = False) -> torch.Tensor:
        self.num_calls += 1
        width = input_ids.max()
        if synced_gpus:
            # As a split model does: every process runs as many passes as the one with the longest text.
            dist.all_reduce(width.clone(), op=dist.ReduceOp.MAX)
        steps = torch.arange(int(width))
        return torch.where(steps < input_ids, input_ids, PAD)


class Tool:
    pad_token_id = PAD


class Split(DDPStrategy):
    """Stands in for an engine that splits the model and can generate: here every process holds all of it."""

    shards_model = True


def samples(num: int) -> list[dict[str, torch.Tensor]]:
    # The first process gets short texts, the second long ones.
    return [{"input_ids": torch.tensor([1 + index % 8]), "labels": torch.tensor([index % 10])} for index in range(num)]


def expected(num: int) -> list[list[int]]:
    numbers = [1 + index % 8 for index in range(num)]
    return [[number] * number + [PAD] * (max(numbers) - number) for number in numbers]


def generate(folder: str, num: int, is_split: bool = False, **options: Any) -> dict[str, Any]:
    seen: list[Any] = []

    def compute_metrics(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"padding": float(min(part.min() for part in seen))}

    arguments = Seq2SeqTrainingArguments(
        folder, per_device_eval_batch_size=1, predict_with_generate=True, disable_tqdm=True, report_to="none",
        use_cpu=True, save_strategy="no", **options,
    )  # fmt: skip
    model = Counter()
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        processing_class=Tool(),
        compute_metrics=compute_metrics,
        strategy=Split(use_cpu=True) if is_split else None,
    )
    try:
        predictions, labels, metrics = trainer.predict(samples(num))
    except ConfigError as error:
        return {"error": str(error)}
    assert labels is not None
    return {
        "predictions": predictions.tolist(),
        "labels": labels[:, 0].tolist() if labels.ndim > 1 else labels.tolist(),
        "padding": metrics["test_padding"],
        "calls": model.num_calls,
        "whole": len(seen) == 1 and numpy.array_equal(seen[0], predictions),
    }


def generate_all(folder: str) -> dict[str, Any]:
    # One start of two processes for all of it, because that is what takes the time.
    answers: dict[str, Any] = {f"plain {num}": generate(folder, num) for num in (1, 2, 7, 8)}
    answers["per batch"] = generate(folder, 7, batch_eval_metrics=True)
    answers["split 7"] = generate(folder, 7, is_split=True)
    answers["split 1"] = generate(folder, 1, is_split=True)
    return answers


def test_lengths_that_differ_by_process_are_padded_in_order(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(generate_all, folder=str(tmp_path))
    for each in both:
        for num in (1, 2, 7, 8):
            answer = each[f"plain {num}"]
            assert answer["predictions"] == expected(num)
            assert answer["labels"] == list(range(num))
            assert answer["whole"]
            assert answer["padding"] >= 1
        assert each["per batch"]["predictions"] == each["split 7"]["predictions"] == expected(7)
        assert each["per batch"]["padding"] == 1
        assert "a split model that generates" in each["split 1"]["error"]
    # The process with fewer batches repeats its last one.
    assert [each["split 7"]["calls"] for each in both] == [4, 4]
