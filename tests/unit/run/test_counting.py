"""Tokens and floating-point operations: what is counted, when it is read, and what a resume goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.resuming import StopAt
from support.tiny import make_arguments
from support.words import PAD, Measured, Words, make_words

from hftrain import Trainer
from hftrain.run.counting import TokenCounter


def make_trainer(folder: Path, model: Any = None, **options: Any) -> Trainer:
    parts = {"train_dataset": make_words(), "eval_dataset": make_words(4)}
    return tiny.make_trainer(folder, Words() if model is None else model, **{**parts, **options})


@pytest.mark.parametrize(
    ("asked", "per_epoch"), [(True, 50), ("all", 50), ("non_padding", 30), (False, None), ("no", None)]
)
def test_tokens_seen_are_logged_and_kept(tmp_path: Path, asked: Any, per_epoch: int | None) -> None:
    trainer = make_trainer(tmp_path, include_num_input_tokens_seen=asked, eval_strategy="epoch")
    trainer.train()
    logged = [entry.get("num_input_tokens_seen") for entry in trainer.state.log_history if "loss" in entry]
    if per_epoch is None:
        assert set(logged) == {None}
        assert trainer.state.num_input_tokens_seen == 0
    else:
        assert logged[2::3] == [per_epoch, 2 * per_epoch]
        assert logged == sorted(set(logged))
        evaluated = [e["num_input_tokens_seen"] for e in trainer.state.log_history if "eval_loss" in e]
        assert evaluated == [per_epoch, 2 * per_epoch]
        assert trainer.state.num_input_tokens_seen == 2 * per_epoch


def test_padding_is_told_by_the_mask_else_by_the_padding_token() -> None:
    ids = torch.tensor([[1, 2, PAD], [3, PAD, PAD]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    assert TokenCounter("input_ids").count({"input_ids": ids}) == 6
    counter = TokenCounter("input_ids", skips_padding=True, padding_id=PAD)
    assert int(counter.count({"input_ids": ids, "attention_mask": mask})) == 3
    assert int(counter.count({"input_ids": ids})) == 3
    with pytest.warns(UserWarning, match="neither an attention_mask"):
        assert TokenCounter("input_ids", skips_padding=True).count({"input_ids": ids}) == 6


@pytest.mark.parametrize("batch", [{"x": torch.ones(2)}, (torch.ones(2),), {"input_ids": [1, 2]}])
def test_batch_without_the_main_input_warns_once(batch: Any) -> None:
    counter = TokenCounter("input_ids")
    with pytest.warns(UserWarning, match="main_input_name") as caught:
        assert counter.count(batch) == counter.count(batch) == 0
    assert len(caught) == 1


def test_counts_go_on_after_a_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"include_num_input_tokens_seen": "non_padding", "logging_steps": 4}
    whole = make_trainer(tmp_path / "whole", Measured(), **options)
    whole.train()
    stopped = make_trainer(
        tmp_path / "parts", Measured(), callbacks=[StopAt(3)], save_strategy="steps", save_steps=100, **options
    )
    stopped.train()
    assert stopped.state.num_input_tokens_seen == 30
    assert stopped.state.total_flos == 500
    options |= {"include_tokens_per_second": True, "save_strategy": "steps", "save_steps": 100}
    resumed = make_trainer(tmp_path / "parts", Measured(), **options)
    resumed.current_flos = 7  # what an earlier run that failed had not stored
    output = resumed.train(resume_from_checkpoint=True)
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen == 60
    assert resumed.state.total_flos == whole.state.total_flos == output.metrics["total_flos"] == 1000
    assert output.metrics["train_tokens_per_second"] * output.metrics["train_runtime"] == pytest.approx(30, rel=0.1)


def test_tokens_per_second_are_those_of_this_session(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, include_tokens_per_second=True)
    metrics = trainer.train().metrics
    rate = metrics["train_tokens_per_second"]
    assert rate * metrics["train_runtime"] == pytest.approx(100, rel=0.02)
    assert "num_input_tokens_seen" not in trainer.state.log_history[0]
    assert "train_tokens_per_second" not in make_trainer(tmp_path).train().metrics


def test_num_tokens_walks_the_loader_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    before = torch.get_rng_state()
    loader = trainer.get_train_dataloader()
    assert trainer.num_tokens(loader) == 50
    assert trainer.num_tokens(loader, max_steps=2) == 40
    assert trainer.num_tokens(loader, max_steps=7) == 50 + 50 + 20
    assert trainer.num_tokens(loader, 0) == 0
    assert torch.equal(before, torch.get_rng_state())


def test_operations_are_the_models_own_or_none(tmp_path: Path) -> None:
    batch = {"input_ids": torch.ones(2, 3)}
    assert make_trainer(tmp_path, Measured()).floating_point_ops(batch) == 60
    assert make_trainer(tmp_path).floating_point_ops(batch) == 0
    assert make_trainer(tmp_path).train().metrics["total_flos"] == 0


def test_operations_of_an_override_are_counted_per_micro_batch(tmp_path: Path) -> None:
    class Counting(Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            return 7

    arguments = make_arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    trainer = Counting(Words(), arguments, train_dataset=make_words(10))
    assert trainer.train().metrics["total_flos"] == 3 * 7
    assert trainer.current_flos == 0
    assert trainer.train().metrics["total_flos"] == 3 * 7


def test_counting_reads_nothing_from_the_device() -> None:
    """A meta tensor cannot be read, as one on a busy device should not be."""
    ids = torch.ones(2, 3, device="meta")
    counted = TokenCounter("input_ids", skips_padding=True).count({"input_ids": ids, "attention_mask": ids})
    assert isinstance(counted + counted, torch.Tensor)
