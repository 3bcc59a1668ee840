"""Evaluation and prediction over processes: the same numbers as on one, whatever the set's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Stream, Task, make_arguments, make_rows, make_trainer, share
from torch import nn

from hftrain import (
    EvalPrediction,
    EvalSet,
    PredictionWriter,
    StepOutput,
    Trainer,
    TrainerCallback,
    set_seed,
)

pytestmark = pytest.mark.distributed

SIZES = list(range(1, 18))
# What costs many exchanges is looked at for fewer sizes: one batch only, an even and an odd number of batches.
RARE_SIZES = (1, 3, 16)


class Counting(Task):
    def __init__(self) -> None:
        import torchmetrics

        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(**batch)
        self.accuracy.update(logits, batch["labels"])
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"], logs={"mean": logits.mean()})


class Found(nn.Module):
    """Return objects of different lengths beside tensors of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        assert labels is not None
        # As wide as the batch's largest label asks; what a sample has no use for is as padding would be.
        width = 1 + int(labels.max())
        wide = torch.where(torch.arange(4) <= labels[:, None], x, -100.0)[:, :width]
        objects = [{"name": f"n{label}", "boxes": torch.ones(label, 2)} for label in labels.tolist()]
        return {"loss": x.mean() * self.scale, "wide": wide, "found": objects}


class PerBatch:
    def __init__(self) -> None:
        self.hits = self.count = 0.0

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float] | None:
        self.hits += float((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        self.count += len(prediction.label_ids)
        return {"share": self.hits / self.count, "count": self.count} if compute_result else None


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.endswith(("second", "time"))}


def plain(objects: list[Any]) -> list[Any]:
    return [[entry["name"], entry["boxes"].tolist()] for entry in objects]


def evaluate(folder: str, *, sizes: list[int]) -> list[Any]:
    """Evaluate and predict on sets of all these sizes, sized and streamed, in every way there is."""
    set_seed(3)
    root = Path(folder)
    options: dict[str, Any] = {"per_device_eval_batch_size": 2}
    documented = Trainer(Net(), make_arguments(root, **options), compute_metrics=share)
    task = Trainer(Counting(), make_arguments(root, **options))
    unjoined = Trainer(documented.model, make_arguments(root, eval_do_concat_batches=False, **options))
    objects = Trainer(Found(), make_arguments(root, eval_use_gather_object=True, **options))
    writing = Trainer(
        documented.model, make_arguments(root, **options),
        callbacks=[PredictionWriter(root / "written", batches_per_file=2)],
    )  # fmt: skip
    answers = []
    for number in sizes:
        rows = make_rows(number, seed=number)
        for data in (rows, Stream(rows)):
            prediction = documented.predict(data)
            answer = {
                "metrics": numbers(documented.evaluate(data)),
                "task": numbers(task.evaluate(data)),
                "predictions": prediction.predictions.tolist(),
                "labels": prediction.label_ids.tolist(),
            }
            if number in RARE_SIZES:
                per_batch = Trainer(
                    documented.model, make_arguments(root, batch_eval_metrics=True, **options),
                    compute_metrics=PerBatch(),
                )  # fmt: skip
                wide, found = objects.predict(data).predictions
                answer["per_batch"] = numbers(per_batch.evaluate(data))
                answer["unjoined"] = [row for batch in unjoined.predict(data).label_ids for row in batch.tolist()]
                answer["wide"], answer["found"] = wide.tolist(), plain(found)
                writing.predict(data)
                writing.strategy.barrier()
                batches = PredictionWriter.read(root / "written")
                answer["written"] = [row for batch in batches for row in batch["outputs"].tolist()]
                writing.strategy.barrier()
            answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return evaluate(str(tmp_path_factory.mktemp("alone")), sizes=SIZES)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_numbers_and_order_are_those_of_one_process(
    tmp_path: Path, run_distributed: Any, alone: list[Any], num_processes: int
) -> None:
    ranks = run_distributed(evaluate, num_processes=num_processes, folder=str(tmp_path), sizes=SIZES)
    for answers in ranks:
        for ours, theirs in zip(answers, alone, strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                if name in ("metrics", "task", "per_batch"):
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
                elif name in ("predictions", "written"):
                    torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(theirs[name]))
                else:
                    assert ours[name] == theirs[name], name


def train(folder: str) -> list[Any]:
    """Train with sets of different cadence, a memory-free full evaluation in bfloat16, and a legacy loop."""
    set_seed(0)
    seen: list[int] = []

    class Note(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            if "eval_seldom_loss" in metrics:
                seen.append(state.global_step)

    trainer = make_trainer(
        Path(folder), train_dataset=make_rows(24),
        eval_dataset={"often": make_rows(5), "seldom": EvalSet(make_rows(7), every=2, metrics=share)},
        callbacks=[Note()], max_steps=4, eval_strategy="steps", eval_steps=1, bf16_full_eval=True,
        metric_for_best_model="eval_seldom_loss",
    )  # fmt: skip
    trainer.train()
    return [seen, trainer.state.best_metric, [p.tolist() for p in trainer.model.parameters()]]


def test_cadences_and_full_evaluations_agree_over_processes(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(train, folder=str(tmp_path))
    assert both[0] == both[1]
    assert both[0][0] == [2, 4]


def write(folder: str) -> Any:
    """Predict one sample, of which only one process gets a batch, and write it."""
    trainer = Trainer(Net(), make_arguments(Path(folder)), callbacks=[PredictionWriter(Path(folder) / "written")])
    result = trainer.predict(make_rows(1))
    trainer.strategy.barrier()
    files = sorted(path.name for path in (Path(folder) / "written").iterdir())
    return [result.predictions, files, len(list(PredictionWriter.read(Path(folder) / "written")))]


def test_each_process_writes_files_of_its_own(tmp_path: Path, run_distributed: Any) -> None:
    for predictions, files, num_batches in run_distributed(write, folder=str(tmp_path)):
        assert predictions is None
        assert "rank0.json" in files
        assert "rank1.json" in files
        assert len(files) == 3
        assert num_batches == 1


def write_what_one_process_reads(folder: str) -> Any:
    """Predict batches that the main process hands out in turn, and write them."""
    arguments = make_arguments(
        Path(folder), per_device_eval_batch_size=2, accelerator_config={"dispatch_batches": True}
    )
    trainer = Trainer(Net(), arguments, callbacks=[PredictionWriter(Path(folder) / "written")])
    trainer.predict(make_rows(7))
    trainer.strategy.barrier()
    return [row for batch in PredictionWriter.read(Path(folder) / "written") for row in batch["labels"].tolist()]


def test_dispatched_predictions_are_read_in_the_datas_order(tmp_path: Path, run_distributed: Any) -> None:
    expected = [int(row["labels"]) for row in make_rows(7)]
    assert run_distributed(write_what_one_process_reads, folder=str(tmp_path)) == [expected] * 2


def evaluate_by_batch_with_an_accelerator(folder: str) -> Any:
    class Gathering(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            gathered.append(len(self.accelerator.gather_for_metrics(inputs["labels"])))
            return super().prediction_step(model, inputs, *args, **kwargs)

    found: list[int] = []
    gathered: list[int] = []

    def count(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        found.append(len(prediction.label_ids))
        return {"count": sum(found)} if compute_result else {}

    answers: list[Any] = []
    for kind in (Trainer, Gathering):
        found.clear()
        args = make_arguments(Path(folder), batch_eval_metrics=True, per_device_eval_batch_size=2)
        trainer = kind(Net(), args, eval_dataset=make_rows(6), compute_metrics=count, strategy="ddp")
        _ = trainer.accelerator
        answers.append(trainer.evaluate()["eval_count"])
    return [*answers, gathered]


def test_metrics_by_batch_do_not_wait_for_an_accelerator_with_uneven_batches(
    tmp_path: Path, run_distributed: Any
) -> None:
    for found in run_distributed(evaluate_by_batch_with_an_accelerator, folder=str(tmp_path)):
        # The second process repeats its only batch while the first runs its second one.
        assert found[:2] == [6, 6]
        assert len(found[2]) == 2
