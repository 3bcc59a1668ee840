"""Numbers that are sums over ranks, and who says what."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows, make_trainer
from support.words import Measured, make_words

from hftrain import Trainer, set_seed

pytestmark = pytest.mark.distributed


def count(folder: str, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    set_seed(7)
    trainer = make_trainer(
        Path(folder), Measured(), train_dataset=make_words(20), eval_dataset=make_words(6),
        include_num_input_tokens_seen="non_padding", include_tokens_per_second=True, skip_memory_metrics=False,
        per_device_train_batch_size=2, save_strategy="steps", save_steps=7, eval_strategy="epoch", **options,
    )  # fmt: skip
    metrics = trainer.train(resume_from_checkpoint=resume).metrics
    return {
        "logged": [entry["num_input_tokens_seen"] for entry in trainer.state.log_history if "loss" in entry],
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": metrics["total_flos"],
        "samples": metrics["train_samples_per_second"] * metrics["train_runtime"],
        "steps": metrics["train_steps_per_second"] * metrics["train_runtime"],
        "tokens_per_device": metrics["train_tokens_per_second"] * metrics["train_runtime"],
        "memory": sorted(name for name in metrics if "_mem_" in name),
    }


def test_tokens_operations_and_samples_are_those_of_all_ranks(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(count, folder=str(tmp_path))
    for rank in (first, second):
        # 20 samples, 2 epochs: 3 of 5 tokens are no padding, and all 5 are computed on.
        assert rank["tokens"] == rank["logged"][-1] == 2 * 20 * 3
        assert rank["logged"] == sorted(set(rank["logged"]))
        assert rank["logged"][4] == 20 * 3
        assert rank["flos"] == 2 * 20 * 5 * 10
        assert rank["samples"] == pytest.approx(40, rel=0.01)
        assert rank["steps"] == pytest.approx(10, rel=0.01)
        assert rank["tokens_per_device"] == pytest.approx(60, rel=0.01)
    assert len(first["memory"]) == 4
    assert second["memory"] == []
    # Only what the resumed run does itself counts for its speed; the totals go on from the checkpoint.
    for rank in run_distributed(count, folder=str(tmp_path), resume=True, num_train_epochs=3):
        assert (rank["tokens"], rank["flos"]) == (3 * 20 * 3, 3 * 20 * 5 * 10)
        assert rank["steps"] == pytest.approx(5, rel=0.01)
        assert rank["samples"] == pytest.approx(20, rel=0.01)


def logged_loss(folder: str) -> dict[str, Any]:
    """Train with a loss of 1 on the first rank and 3 on the second."""

    class ByRank(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            loss, logits = super().forward(x, labels)
            return 0 * loss + 1 + 2 * int(os.environ["RANK"]), logits

    options = {"per_device_train_batch_size": 2, "logging_steps": 3, "average_tokens_across_devices": False}
    trainer = Trainer(ByRank(), make_arguments(Path(folder), max_steps=6, **options), train_dataset=make_rows(24))
    output = trainer.train()
    return {"losses": [e["loss"] for e in trainer.state.log_history if "loss" in e], "mean": output.training_loss}


def test_logged_loss_is_the_mean_over_ranks_and_steps(tmp_path: Path, run_distributed: Any) -> None:
    for rank in run_distributed(logged_loss, folder=str(tmp_path)):
        assert rank["losses"] == pytest.approx([2.0, 2.0])
        assert rank["mean"] == pytest.approx(2.0)


WARNS, FAILS = ["WARNING", "ERROR"], ["ERROR"]
ONE_EACH = {"log_on_each_node": False}
# Arguments, number of machines, what the first process says, what the other one says.
RECIPES: list[tuple[dict[str, Any], int, list[str], list[str]]] = [
    # One machine: the replica is quieter.
    ({"log_level": "warning", "log_level_replica": "error"}, 1, WARNS, FAILS),
    # Several machines: each one's main process warns, or only that of the first.
    ({"log_level": "warning", "log_level_replica": "error"}, 2, WARNS, WARNS),
    ({"log_level": "warning", "log_level_replica": "error", **ONE_EACH}, 2, WARNS, FAILS),
    # Quiet everywhere.
    ({"log_level": "error", "log_level_replica": "error", **ONE_EACH}, 2, FAILS, FAILS),
    ({"log_level": "info"}, 1, ["INFO", *WARNS], WARNS),
]


def speak(folder: str) -> list[list[str]]:
    """Make a Trainer by each recipe and return the levels of the messages that this process then lets through."""
    heard: list[list[str]] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard[-1].append(record.levelname)

    logging.getLogger("hftrain").addHandler(Ear())
    for options, num_nodes, _, _ in RECIPES:
        # Two machines have one process each, as far as a process can tell.
        os.environ["LOCAL_RANK"] = os.environ["RANK"] if num_nodes == 1 else "0"
        make_trainer(Path(folder), **options)
        heard.append([])
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("hftrain.anywhere").log(level, "something")
    return heard


def test_processes_are_as_quiet_as_the_recipes_say(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(speak, folder=str(tmp_path))
    assert first == [recipe[2] for recipe in RECIPES]
    assert second == [recipe[3] for recipe in RECIPES]
