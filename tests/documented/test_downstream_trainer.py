"""A trainer as other libraries write them: preference optimisation against a frozen reference model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments
from torch import nn
from torch.nn.functional import log_softmax, logsigmoid
from torch.utils.data import DataLoader

from hftrain import Trainer, TrainingArguments

VOCABULARY = 12


class TinyLM(nn.Module):
    """Predict the next token from the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.head(torch.tanh(self.embed(input_ids))),)


@dataclass
class PreferenceConfig(TrainingArguments):
    """Arguments with fields of a library's own."""

    beta: float = field(default=0.5, metadata={"help": "How strongly the reference holds the policy."})
    precompute_reference: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise ValueError("beta must be positive.")


class PadPairs:
    """Pad prompts with answers to one length, with a mask over the answers."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = {}
        for side in ("chosen", "rejected"):
            rows = [feature["prompt_ids"] + feature[f"{side}_ids"] for feature in features]
            length = max(map(len, rows))
            batch[f"{side}_input_ids"] = torch.tensor([row + [0] * (length - len(row)) for row in rows])
            batch[f"{side}_mask"] = torch.tensor(
                [
                    [0] * len(f["prompt_ids"]) + [1] * len(f[f"{side}_ids"]) + [0] * (length - len(row))
                    for f, row in zip(features, rows, strict=True)
                ]
            )
        if "reference_margin" in features[0]:
            batch["reference_margin"] = torch.tensor([feature["reference_margin"] for feature in features])
        return batch


class PreferenceTrainer(Trainer):
    """Raise the odds of the chosen answer over the rejected one, relative to a reference."""

    def __init__(
        self,
        model: nn.Module,
        args: PreferenceConfig,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        self.beta = args.beta
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self._stored: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.calls: list[str] = []
        super().__init__(
            model=model,
            args=args,
            data_collator=PadPairs(),
            train_dataset=self._prepare_dataset(train_dataset),
            eval_dataset=self._prepare_dataset(eval_dataset),
            **kwargs,
        )
        self.model_accepts_loss_kwargs = False
        self.reference = self.accelerator.prepare_model(self.reference, evaluation_mode=True)
        self._is_precomputed = False

    @staticmethod
    def _prepare_dataset(dataset: Any) -> Any:
        return dataset and [{f"{k}_ids": [ord(c) - 96 for c in v] for k, v in row.items()} for row in dataset]

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["prompt_ids", "chosen_ids", "rejected_ids", "reference_margin"]

    def get_train_dataloader(self) -> Any:
        if self.args.precompute_reference and not self._is_precomputed:
            loader = self.accelerator.prepare(
                DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)
            )
            margins = [self.accelerator.gather_for_metrics(self.margin(self.reference, batch)) for batch in loader]
            for row, margin in zip(self.train_dataset, torch.cat(margins).tolist(), strict=True):
                row["reference_margin"] = margin
            self._is_precomputed = True
        return super().get_train_dataloader()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any = None) -> Any:
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.calls.append("get_batch_samples")
        return batches, num_items

    @staticmethod
    def margin(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Two forward passes: the log odds of the chosen answer over the rejected one."""
        sums = []
        for side in ("chosen", "rejected"):
            ids, mask = inputs[f"{side}_input_ids"], inputs[f"{side}_mask"]
            steps = log_softmax(model(input_ids=ids)[0][:, :-1].float(), dim=-1)
            sums.append((steps.gather(2, ids[:, 1:, None]).squeeze(2) * mask[:, 1:]).sum(1))
        return sums[0] - sums[1]

    def get_batch_loss_metrics(
        self, model: nn.Module, inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        if "reference_margin" in inputs:
            reference = inputs["reference_margin"]
        else:
            with torch.no_grad():
                reference = self.margin(self.reference, inputs)
        gain = self.margin(model, inputs) - reference
        accuracy = self.accelerator.gather_for_metrics((gain > 0).float().detach()).mean()
        return -logsigmoid(self.beta * gain).mean(), gain, {"rewards/accuracies": accuracy.item()}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, gain, metrics = self.get_batch_loss_metrics(model, inputs)
        self.store_metrics(metrics, "train")
        return (loss, {"gain": gain}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, gain, metrics = self.get_batch_loss_metrics(model, inputs)
        self.store_metrics(metrics, "eval")
        if prediction_loss_only:
            return loss.detach(), None, None
        return loss.detach(), gain, torch.ones_like(gain)

    def store_metrics(self, metrics: dict[str, float], where: str) -> None:
        for name, value in metrics.items():
            self._stored[where][name].append(value)

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("evaluation_loop")
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        output.metrics["eval_seen"] = output.num_samples
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        where = "train" if "loss" in logs else "eval"
        prefix = "eval_" if where == "eval" else ""
        for name, values in self._stored.pop(where, {}).items():
            logs[f"{prefix}{name}"] = sum(values) / len(values)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.calls.append("_save_checkpoint")
        super()._save_checkpoint(model, trial)


def make_pairs(num: int, seed: int) -> list[dict[str, str]]:
    """Good answers go on in the alphabet, bad ones go back; prompts and answers differ in length."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(num):
        start, length = torch.randint(3, 6, (2,), generator=generator).tolist()
        letters = "abcdefghijk"
        up, down = letters[start + 1 : start + 1 + length], letters[start - 1 :: -1][: length - 1]
        pairs.append({"prompt": letters[start] * 2, "chosen": up, "rejected": down})
    return pairs


def build(folder: Path, seed: int = 0, **options: Any) -> PreferenceTrainer:
    torch.manual_seed(seed)
    defaults: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "max_steps": 12, "learning_rate": 5e-3, "eval_strategy": "steps",
        "eval_steps": 6, "save_strategy": "steps", "save_steps": 6,
    }  # fmt: skip
    arguments = make_arguments(folder, arguments=PreferenceConfig, **{**defaults, **options})
    return PreferenceTrainer(TinyLM(), arguments, make_pairs(24, seed=1), make_pairs(9, seed=2))


def values(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("precompute", [False, True])
def test_preference_trainer_trains_evaluates_and_saves(tmp_path: Path, precompute: bool) -> None:
    trainer = build(tmp_path, precompute_reference=precompute)
    before = trainer.evaluate()["eval_loss"]
    output = trainer.train()
    accuracies = values(trainer, "rewards/accuracies")
    assert len(accuracies) == 12
    assert sum(accuracies[-4:]) / 4 > 0.9 > sum(accuracies[:2]) / 2
    assert values(trainer, "eval_rewards/accuracies")[-1] > 0.9
    assert trainer.evaluate()["eval_loss"] < before
    assert output.global_step == 12
    assert trainer.calls.count("get_batch_samples") >= 12
    assert {"evaluation_loop", "_save_checkpoint"} <= set(trainer.calls)
    assert all(not parameter.requires_grad for parameter in trainer.reference.parameters())
    assert (tmp_path / "checkpoint-12" / "model.safetensors").exists()


def test_preference_trainer_resumes_as_if_it_never_stopped(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole")
    whole.train()
    resumed = build(tmp_path / "whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert values(resumed, "loss") == values(whole, "loss")
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def train_on_two(folder: str) -> dict[str, Any]:
    """Train in one of several processes."""
    trainer = build(Path(folder), per_device_train_batch_size=2)
    trainer.train()
    return {
        "accuracies": values(trainer, "rewards/accuracies"),
        "losses": values(trainer, "loss"),
        "weights": [parameter.sum().item() for parameter in trainer.model.parameters()],
    }


@pytest.mark.distributed
def test_preference_trainer_on_two_processes_equals_one(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(train_on_two, folder=str(tmp_path / "two"))
    alone = build(tmp_path / "one")
    alone.train()
    assert both[0] == both[1]
    assert both[0]["losses"] == pytest.approx(values(alone, "loss"), rel=1e-4)
    assert both[0]["accuracies"][-1] > 0.9


def test_columns_are_not_looked_at_where_the_subclass_reads_the_data(tmp_path: Path) -> None:
    class Reading(Trainer):
        def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            texts = [row["text"] for row in rows]
            return {"x": torch.ones(len(texts), 4), "labels": torch.tensor([len(text) for text in texts])}

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.collate)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=2, collate_fn=self.collate)

    rows = [{"text": "ab"}, {"text": "a"}] * 2
    args = make_arguments(tmp_path, eval_strategy="epoch", max_steps=2)
    trainer = Reading(Net(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
