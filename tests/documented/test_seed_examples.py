"""The documentation's examples, as written there: only the import lines name hftrain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows, make_trainer, train
from torch import nn

from hftrain import Trainer, TrainerCallback, TrainingArguments

MEMORY = """\
***** train metrics *****
  init_mem_cpu_alloc_delta   =     1301MB
  init_mem_cpu_peaked_delta  =      154MB
  init_mem_gpu_alloc_delta   =      230MB
  init_mem_gpu_peaked_delta  =        0MB
  train_mem_cpu_alloc_delta  =     1345MB
  train_mem_cpu_peaked_delta =        0MB
  train_mem_gpu_alloc_delta  =      693MB
  train_mem_gpu_peaked_delta =        7MB
"""


class Model(nn.Module):
    """A model as the examples expect it: outputs by name, with a config and a device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.config = SimpleNamespace(num_labels=3)
        self.device = torch.device("cpu")

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        *loss, logits = self.net(x, labels)
        return {"loss": loss[0], "logits": logits} if loss else {"logits": logits}


class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):  # type: ignore[no-untyped-def, override]
        labels = inputs.pop("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss for 3 labels with different weights
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class OlderCustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):  # type: ignore[no-untyped-def, override]
        labels = inputs.get("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss (suppose one has 3 labels with different weights)
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class EarlyStoppingCallback(TrainerCallback):
    def __init__(self, num_steps=10):  # type: ignore[no-untyped-def]
        self.num_steps = num_steps

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if state.global_step >= self.num_steps:
            return {"should_training_stop": True}
        else:  # noqa: RET505
            return {}


def test_resume_from_the_newest_checkpoint_and_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(Path("your-model"), Model(), max_steps=4, **saving)
    trainer = make_trainer(Path("your-model"), Model(), max_steps=6, **saving)
    # resume from latest checkpoint
    trainer.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    # resume from specific checkpoint saved in output directory
    output = trainer.train(resume_from_checkpoint="your-model/checkpoint-2")
    assert output.global_step == 6


@pytest.mark.parametrize("kind", [CustomTrainer, OlderCustomTrainer])
def test_weighted_loss_trains_evaluates_and_predicts(kind: type[Trainer], tmp_path: Path) -> None:
    args = make_arguments(tmp_path, num_train_epochs=10, eval_strategy="epoch", gradient_accumulation_steps=2)
    trainer = kind(Model(), args, train_dataset=make_rows(), eval_dataset=make_rows(5))
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    assert trainer.predict(make_rows(3)).predictions.shape == (3, 3)


def test_early_stopping_after_ten_steps(tmp_path: Path) -> None:
    dataset, model, training_args = {"train": make_rows(), "test": make_rows(5)}, Model(), make_arguments(tmp_path)
    tokenizer = data_collator = compute_metrics = None
    training_args.num_train_epochs = 9
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        tokenizer=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
        callback=[EarlyStoppingCallback()],
    )
    assert trainer.train().global_step == 10


LOGGING = """
import logging
import sys

import datasets
import transformers
from hftrain import Trainer, TrainingArguments
from torch import nn

training_args = TrainingArguments("out", log_level="error", use_cpu=True)
logger = logging.getLogger(__name__)

logging.basicConfig(
    format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
    datefmt="%m/%d/%Y %H:%M:%S",
    handlers=[logging.StreamHandler(sys.stdout)],
)

log_level = training_args.get_process_log_level()
logger.setLevel(log_level)
datasets.utils.logging.set_verbosity(log_level)
transformers.utils.logging.set_verbosity(log_level)

trainer = Trainer(nn.Linear(2, 2), training_args)
names = "datasets", "transformers", "hftrain", __name__
print([logging.getLogger(name).getEffectiveLevel() for name in names])
"""


@pytest.mark.interop
def test_logging_set_up(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LOGGING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[40, 40, 40, 40]"


@pytest.mark.parametrize(
    ("chain", "shown"),
    [
        ("args.set_dataloader(train_batch_size=16, eval_batch_size=64)", {"per_device_train_batch_size": 16}),
        ('args.set_evaluate(strategy="steps", steps=100)', {"eval_steps": 100}),
        ('args.set_logging(strategy="steps", steps=100)', {"logging_steps": 100}),
        ('args.set_lr_scheduler(name="cosine", warmup_ratio=0.05)', {"warmup_ratio": 0.05}),
        ('args.set_optimizer(name="adamw_torch", beta1=0.8)', {"optim": "adamw_torch"}),
        ('args.set_push_to_hub("me/awesome-model")', {"hub_model_id": "me/awesome-model"}),
        ('args.set_save(strategy="steps", steps=100)', {"save_steps": 100}),
        ("args.set_testing(batch_size=32)", {"per_device_eval_batch_size": 32}),
        ("args.set_training(learning_rate=1e-4, batch_size=32)", {"learning_rate": 1e-4}),
    ],
)
def test_setters(chain: str, shown: dict[str, Any]) -> None:
    args = TrainingArguments("working_dir")
    args = eval(chain)
    assert {name: getattr(args, name) for name in shown} == shown


def test_memory_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split("=") for line in MEMORY.splitlines()[1:]]
    metrics = {name.strip(): int(value.strip().removesuffix("MB")) << 20 for name, value in lines}
    Trainer(Net(), make_arguments(tmp_path)).log_metrics("train", metrics)
    # The documented report has wider values besides, which widen the column.
    assert capsys.readouterr().out.split() == MEMORY.split()


def test_best_model_by_the_loss_of_one_of_two_sets(tmp_path: Path) -> None:
    data1, data2 = make_rows(6, seed=2), make_rows(6, seed=3)
    trainer = train(
        tmp_path, Model(), eval_dataset={"data1": data1, "data2": data2}, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="eval_data1_loss",
    )  # fmt: skip
    losses = [entry["eval_data1_loss"] for entry in trainer.state.log_history if "eval_data1_loss" in entry]
    assert trainer.state.best_metric == min(losses)
    assert trainer.evaluate(data1)["eval_loss"] == pytest.approx(min(losses))
