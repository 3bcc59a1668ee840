from __future__ import annotations

import ast
import io
import threading

import pytest

from hftrain.callbacks import CallbackHandler, ProgressCallback
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


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


@pytest.fixture
def every_line(monkeypatch):
    """Lift the limit of one plain line per second."""
    monkeypatch.setattr("hftrain.callbacks.progress.PLAIN_INTERVAL_S", 0.0)


def test_terminal_gets_a_bar_of_optimizer_steps() -> None:
    file = Terminal()
    Player(file).train(100)
    assert "\r" in file.getvalue()
    last = file.getvalue().rsplit("\r", 1)[1]
    assert last.startswith("train: 100%")
    assert "100/100" in last
    assert last.endswith("\n")


def test_terminal_bar_starts_at_the_resumed_step() -> None:
    file = Terminal()
    Player(file, global_step=40).train(60)
    first, last = file.getvalue().split("\r")[1], file.getvalue().rsplit("\r", 1)[1]
    assert "40/100" in first
    assert "100/100" in last


def test_terminal_logs_are_written_on_lines_of_their_own() -> None:
    file = Terminal()
    player = Player(file)
    player.train(10, is_ended=False)
    player.runner.fire("on_log", logs={"loss": 0.123456, "total_flos": 1e15})
    player.runner.fire("on_train_end")
    assert "\r{'loss': 0.1235}\n" in file.getvalue()


def test_terminal_evaluation_bar_vanishes_within_training_and_stays_outside() -> None:
    file = Terminal()
    player = Player(file)
    player.train(1, is_ended=False)
    player.evaluate(range(5))
    player.runner.fire("on_train_end")
    assert "inference:   0%" in file.getvalue()
    assert "5/5" not in file.getvalue().splitlines()[-1]
    outside = Terminal()
    Player(outside).evaluate(range(5), event="on_predict")
    assert "5/5" in outside.getvalue().splitlines()[-1]


def test_terminal_bars_start_no_thread() -> None:
    before = threading.active_count()
    player = Player(Terminal())
    player.train(3, is_ended=False)
    assert threading.active_count() == before
    player.runner.fire("on_train_end")


@pytest.mark.parametrize("file_class", [io.StringIO, Terminal])
def test_failed_run_is_closed_by_the_next_one(file_class) -> None:
    file = file_class()
    player = Player(file)
    player.train(3, is_ended=False)
    player.evaluate(range(5), num_batches=2, event=None)
    player.state.global_step = 0
    player.train(100)
    assert file.getvalue().splitlines()[-1].startswith("train: 100%")
    assert "3/100" in file.getvalue()


@pytest.mark.usefixtures("every_line")
def test_plain_output_has_a_line_per_tenth_and_nothing_garbled() -> None:
    file = io.StringIO()
    Player(file, max_steps=50).train(50)
    lines = file.getvalue().splitlines()
    assert [line.split("[")[0].split()[-1] for line in lines] == [f"{step}/50" for step in range(5, 51, 5)]
    assert not set("\r\x1b█") & set(file.getvalue())


def test_plain_output_of_a_short_run_is_its_last_line() -> None:
    file = io.StringIO()
    Player(file, max_steps=50, global_step=20).train(30)
    (line,) = file.getvalue().splitlines()
    assert line.startswith("train: 100% 50/50")


def test_plain_logs_are_literals_with_rounded_numbers_and_cut_texts() -> None:
    file = io.StringIO()
    player = Player(callback=ProgressCallback(max_str_len=5, file=file))
    player.train(1, is_ended=False)
    logs = {"loss": 1234.56789, "learning_rate": 4.987654e-05, "note": "abcdefgh", "step": 7, "total_flos": 1.0}
    player.runner.fire("on_log", logs=logs)
    shown = ast.literal_eval(file.getvalue().splitlines()[-1])
    assert shown == {"loss": 1234.5679, "learning_rate": 4.988e-05, "note": "abcde... (8 characters)", "step": 7}
    assert logs["loss"] == 1234.56789
    assert "total_flos" in logs
    player.runner.fire("on_train_end")


def test_plain_evaluation_prints_one_line_each() -> None:
    file = io.StringIO()
    player = Player(file)
    player.evaluate(range(5))
    player.evaluate(range(7), event="on_predict")
    assert [line.split("[")[0] for line in file.getvalue().splitlines()] == [
        "inference: 100% 5/5 ",
        "inference: 100% 7/7 ",
    ]


def test_evaluation_after_a_failed_one_counts_from_the_start() -> None:
    file = io.StringIO()
    player = Player(file)
    failed, good = range(5), range(5)
    player.evaluate(failed, num_batches=2, event=None)
    player.evaluate(good)
    assert file.getvalue().splitlines()[-1].startswith("inference: 100% 5/5")


def test_evaluation_of_a_stream_is_counted_without_a_total() -> None:
    file = io.StringIO()
    Player(file).evaluate(iter(()), num_batches=4)
    assert file.getvalue().startswith("inference: 4batch")


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
    player.train(100, is_ended=False)
    player.runner.fire("on_log", logs={"loss": 1.0})
    player.runner.fire("on_train_end")
    out, err = capsys.readouterr()
    assert out == "{'loss': 1.0}\n"
    assert err.startswith("train: 100% 100/100")


def test_output_without_isatty_is_no_terminal() -> None:
    class Tee:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    tee = Tee()
    Player(tee).train(100)
    assert tee.text.startswith("train: 100%")
