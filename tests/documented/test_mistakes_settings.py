"""Usual mistakes in arguments, a Trainer's construction, configs, resuming and launching, and what each is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mistakes import Mistake, check, table
from support.tiny import Net, make_arguments, make_trainer

from hftrain import Trainer
from hftrain.core.errors import UnknownArgumentError

ROWS = [
    Mistake("learning_rte", lambda folder: make_arguments(folder, learning_rte=1), ("'learning_rate'",)),
    Mistake("batch_size", lambda folder: make_arguments(folder, batch_size=8), ("'per_device_train_batch_size'",)),
    Mistake("epochs", lambda folder: make_arguments(folder, epochs=3), ("'num_train_epochs'",)),
    Mistake("lr", lambda folder: make_arguments(folder, lr=1e-3), ("'learning_rate'",), unsaid=("lr_scheduler",)),
    Mistake(
        "eval_strategy", lambda folder: make_arguments(folder, eval_strategy="epochs"), ("eval_strategy", "'epoch'")
    ),
    Mistake("optim adam", lambda folder: make_arguments(folder, optim="adam"), ("optim='adam'", "'adamw_torch'")),
    Mistake(
        "bf16-mixed", lambda folder: make_trainer(folder, precision="bf16-mixed"), ("'bf16'",), unsaid=("bf16_true",)
    ),
    Mistake(
        "devices",
        lambda folder: Trainer(Net(), devices=2),  # type: ignore[call-arg]
        ("devices=", "torchrun --nproc_per_node"),
        UnknownArgumentError,
    ),
    Mistake("fit", lambda folder: make_trainer(folder).fit(), ("Call train()",), AttributeError),
]


@table(ROWS)
def test_mistake_is_told_in_words_that_help(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(mistake, tmp_path, monkeypatch)
