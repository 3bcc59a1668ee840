from __future__ import annotations

import io
import re

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import PrinterCallback, Trainer
from hftrain.callbacks import CallbackHandler
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.extras.progress.bars import ProgressCallback


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Player:
    """Plays the loop's part for one callback."""

    def __init__(self, file=None, *, max_steps=100, callback=None, **state):
        self.callback = callback or ProgressCallback(file=file)
        self.state = TrainerState(max_steps=max_steps, **state)
        self.runner = CallbackHandler([self.callback], args=None, state=self.state, control=TrainerControl())

    def train(self, num_steps, *, is_ended=True):
        self.runner.fire("on_train_begin")
        for _ in range(num_steps):
            self.state.global_step += 1
            self.runner.fire("on_step_end")
        if is_ended:
            self.runner.fire("on_train_end")

    def evaluate(self, loader, num_batches=None, event="on_evaluate"):
        for _ in range(len(loader) if num_batches is None else num_batches):
            self.runner.fire("on_prediction_step", eval_dataloader=loader)
        if event:
            self.runner.fire(event, metrics={})


@pytest.mark.parametrize("file_class", [io.StringIO, Terminal])
def test_failed_run_is_closed_at_once(file_class) -> None:
    file = file_class()
    player = Player(file)
    player.train(3, is_ended=False)
    player.evaluate(range(5), num_batches=2, event=None)
    player.runner.close_run()
    assert "3/100" in file.getvalue()
    player.state.global_step = 0
    player.train(100)
    assert file.getvalue().splitlines()[-1].startswith("train: 100%")


def test_plain_output_has_a_line_per_tenth_and_nothing_garbled(monkeypatch) -> None:
    monkeypatch.setattr("hftrain.extras.progress.bars.PLAIN_INTERVAL_S", 0.0)
    file = io.StringIO()
    Player(file, max_steps=50).train(50)
    lines = file.getvalue().splitlines()
    assert [line.split(" [")[0].split()[-1] for line in lines] == [f"{step}/50" for step in range(5, 51, 5)]
    assert not set("\r\x1b█") & set(file.getvalue())


def test_other_processes_stay_silent(capsys) -> None:
    file = Terminal()
    player = Player(file, is_world_process_zero=False)
    player.train(10, is_ended=False)
    player.evaluate(range(3))
    player.runner.fire("on_log", logs={"loss": 1.0})
    player.runner.fire("on_train_end")
    assert file.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_bars_go_to_standard_error_and_logs_to_standard_output(capsys) -> None:
    player = Player()
    player.train(100)
    out, err = capsys.readouterr()
    assert (out, err[:15]) == ("", "train: 100% 100")
    player.train(0, is_ended=False)
    player.runner.fire("on_log", logs={"loss": 1.0})
    assert capsys.readouterr() == ("step 100/100  loss 1.000\n", "")


def test_whole_run_on_a_terminal_shows_its_entries_bars_and_summary(tmp_path) -> None:
    file = Terminal()
    arguments = make_arguments(tmp_path, disable_tqdm=True, eval_strategy="epoch", num_train_epochs=1)
    callbacks = [ProgressCallback(file=file)]
    trainer = Trainer(Net(), arguments, train_dataset=make_rows(), eval_dataset=make_rows(8), callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.predict(make_rows(8))
    steps = re.findall(r"(step \d/6)  epoch .*\n", file.getvalue())
    assert steps == [f"step {n}/6" for n in (1, 2, 3, 4, 5, 6, 6, 6)]
    assert "\nTrained 6 steps in " in file.getvalue()
    assert "predict: 100%" in file.getvalue()
