"""Who reports, at which level, and to which display."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import (
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)

LOGGER = logging.getLogger("hftrain")


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    level, handlers = LOGGER.level, LOGGER.handlers[:]
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers


def make_trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    arguments = make_arguments(folder, **options)
    return Trainer(Net(), arguments, train_dataset=make_rows(), eval_dataset=make_rows(4), callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("asked", "level"),
    [
        ("debug", logging.DEBUG),
        ("info", logging.INFO),
        ("warning", logging.WARNING),
        ("error", logging.ERROR),
        ("critical", logging.CRITICAL),
        ("passive", 17),
    ],
)
def test_constructor_sets_the_level_of_the_library(tmp_path: Path, asked: str, level: int) -> None:
    LOGGER.setLevel(17)
    trainer = make_trainer(tmp_path, log_level=asked)
    assert LOGGER.level == level == trainer.args.get_process_log_level()


@pytest.mark.parametrize(
    ("local_rank", "options", "level"),
    [
        (1, {}, logging.WARNING),
        (1, {"log_level_replica": "passive"}, 17),
        (1, {"log_level": "debug", "log_level_replica": "error"}, logging.ERROR),
        # The main process of another machine.
        (0, {}, 17),
        (0, {"log_level": "debug"}, logging.DEBUG),
        (0, {"log_level": "debug", "log_on_each_node": False}, logging.WARNING),
    ],
)
def test_other_processes_have_a_level_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int, options: dict[str, Any], level: int
) -> None:
    LOGGER.setLevel(17)
    for name, value in {"RANK": 1, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    make_trainer(tmp_path, **options)
    assert LOGGER.level == level


@pytest.mark.parametrize(
    ("asked", "level", "display"),
    [
        (None, "info", ProgressCallback),
        (None, "warning", ProgressCallback),
        (None, "error", PrinterCallback),
        (True, "info", PrinterCallback),
        (False, "error", ProgressCallback),
    ],
)
def test_bars_follow_the_level_unless_told(tmp_path: Path, asked: bool | None, level: str, display: type) -> None:
    callbacks = make_trainer(tmp_path, disable_tqdm=asked, log_level=level).callback_handler.callbacks
    assert display in {type(callback) for callback in callbacks}


def test_only_the_first_process_prints_and_writes_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(trainer.strategy, "rank", 1)
    trainer.log_metrics("eval", {"eval_loss": 1.0})
    trainer.save_metrics("eval", {"eval_loss": 1.0})
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(trainer.strategy, "rank", 0)
    trainer.save_metrics("eval", {"eval_loss": 1.0}, combined=False)
    trainer.save_metrics("all", {"x": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all_results.json", "eval_results.json"]


def test_every_returned_number_can_be_written_as_json(tmp_path: Path) -> None:
    def measure(prediction: EvalPrediction) -> dict[str, Any]:
        return {"share": numpy.float32(0.5), "eval_count": torch.tensor(3), "rows": numpy.arange(2)}

    trainer = make_trainer(tmp_path, skip_memory_metrics=False)
    trainer.compute_metrics = measure
    for metrics in (trainer.train().metrics, trainer.evaluate(), trainer.predict(make_rows(4)).metrics):
        assert json.loads(json.dumps(metrics)) == metrics
    metrics = trainer.evaluate()
    assert (metrics["eval_share"], metrics["eval_count"], metrics["eval_rows"]) == (0.5, 3, [0, 1])


def test_memory_of_the_constructor_covers_all_of_it(tmp_path: Path) -> None:
    class Late(TrainerCallback):
        """The last thing a constructor calls."""

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.kept = torch.ones(16 << 20)

    metrics = make_trainer(tmp_path, Late(), skip_memory_metrics=False, max_steps=1).train().metrics
    assert metrics["init_mem_cpu_alloc_delta"] == pytest.approx(64 << 20, rel=0.5)
    assert not [thread for thread in threading.enumerate() if thread.name == "hftrain-memory"]


@pytest.mark.filterwarnings("ignore:There are two callbacks of the type")
@pytest.mark.parametrize(("restores", "patience"), [(True, [3, 5]), (False, [8, 9])])
def test_callbacks_of_one_class_come_back_from_the_checkpoint(
    tmp_path: Path, restores: bool, patience: list[int]
) -> None:
    options: dict[str, Any] = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }  # fmt: skip
    first = make_trainer(tmp_path, EarlyStoppingCallback(3), EarlyStoppingCallback(5), **options)
    first.train()
    saved = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert [item["args"]["early_stopping_patience"] for item in saved["EarlyStoppingCallback"]] == [3, 5]
    assert saved["TrainerControl"]["args"].keys() == vars(first.control).keys()
    second = make_trainer(
        tmp_path, EarlyStoppingCallback(8), EarlyStoppingCallback(9), num_train_epochs=3,
        restore_callback_states_from_checkpoint=restores, **options,
    )  # fmt: skip
    assert second.train(resume_from_checkpoint=True).global_step == 18
    stoppers = [c for c in second.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    assert [stopper.early_stopping_patience for stopper in stoppers] == patience


def test_default_callbacks_can_be_removed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert isinstance(trainer.pop_callback(PrinterCallback), PrinterCallback)
    assert trainer.pop_callback(PrinterCallback) is None
    trainer.train()


def test_callbacks_receive_what_the_run_made(tmp_path: Path) -> None:
    """Not what the constructor knew: optimizer and loader exist only once training begins."""
    seen: dict[str, Any] = {}

    class See(TrainerCallback):
        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert kwargs["optimizer"] is kwargs["train_dataloader"] is None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.update(kwargs)

    trainer = make_trainer(tmp_path, See(), max_steps=1)
    trainer.train()
    assert seen["optimizer"] is trainer.optimizer
    assert seen["lr_scheduler"] is trainer.lr_scheduler
    assert seen["model"] is trainer.model
    assert len(seen["train_dataloader"]) == 6
