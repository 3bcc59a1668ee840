"""What TensorBoard reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.trackers import logged, needs, train

pytestmark = needs("tensorboard")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(events: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)]


def test_run_is_read_back_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path, report_to="tensorboard", save_strategy="steps", save_steps=1, num_train_epochs=2)
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    events = read(folder)
    assert scalars(events, "train/loss") == logged(tmp_path, "loss")
    assert scalars(events, "eval/loss") == logged(tmp_path, "eval_loss")
    assert {"test/loss", "train/learning_rate", "train/train_runtime"} <= set(events.Tags()["scalars"])
    text = events.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"learning_rate": 0.01' in text
    assert "hidden_size" in events.Tensors("model_config/text_summary")[0].tensor_proto.string_val[0].decode()
    parameters = str(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    assert "learning_rate" in parameters

    printed = train(tmp_path, report_to="tensorboard", num_train_epochs=3, resume="out/checkpoint-3")
    assert "starts a new run" not in printed
    assert list((tmp_path / "out" / "runs").iterdir()) == [folder]
    # What the first run wrote after the checkpoint, its step 4, is hidden by what the second one wrote.
    assert scalars(read(folder), "train/loss") == logged(tmp_path, "loss")
    assert [step for step, _ in logged(tmp_path, "loss")] == [1, 2, 3, 4, 5, 6]


def test_logging_dir_is_where_events_go(tmp_path: Path) -> None:
    train(tmp_path, report_to=["tensorboard"], logging_dir="events")
    assert scalars(read(tmp_path / "events"), "train/loss") == logged(tmp_path, "loss")
    assert not (tmp_path / "out" / "runs").exists()


def test_writer_of_the_user_is_used_and_left_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    from hftrain import TensorBoardCallback
    from hftrain.loggers.base import RunFacts

    with SummaryWriter(str(tmp_path)) as writer:
        callback = TensorBoardCallback(writer)
        callback.logger.start(RunFacts(name="x", hparams={"a": 1}))
        callback.logger.log({"train/loss": 1.5}, 3)
        callback.logger.close()
        writer.add_scalar("mine", 2.0, 4)
    assert scalars(read(tmp_path), "train/loss") == [(3, 1.5)]
    assert scalars(read(tmp_path), "mine") == [(4, 2.0)]
