from __future__ import annotations

import io
import re

import pytest
from support.tiny import Net, make_arguments, make_rows
from tqdm import tqdm

from hftrain import PrinterCallback, Trainer
from hftrain.callbacks import CallbackHandler
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState
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
    assert "\rstep 10/100  loss 0.1235\n" in file.getvalue()
    assert "flos" not in file.getvalue()
    assert "loss 0.1235]" in file.getvalue().splitlines()[-1]


def test_terminal_evaluation_bar_vanishes_within_training_and_stays_outside() -> None:
    file = Terminal()
    player = Player(file)
    player.train(1, is_ended=False)
    player.evaluate(range(5))
    player.runner.fire("on_train_end")
    assert "evaluate:   0%" in file.getvalue()
    assert "5/5" not in file.getvalue().splitlines()[-1]
    outside = Terminal()
    Player(outside).evaluate(range(5), event="on_predict")
    assert "5/5" in outside.getvalue().splitlines()[-1]


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


class Tee:
    """An output without `isatty`."""

    text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_plain_output_of_a_short_run_is_its_last_line() -> None:
    file = Tee()
    Player(file, max_steps=50, global_step=20).train(30)
    (line,) = file.text.splitlines()
    assert line.startswith("train: 100% 50/50 [00:00<00:00, ")


def test_plain_logs_are_one_line_each() -> None:
    file = io.StringIO()
    player = Player(callback=ProgressCallback(max_str_len=5, file=file), max_steps=1000, epoch=0.0)
    player.train(7, is_ended=False)
    logs = {"loss": 0.12345678, "learning_rate": 4.987654e-05, "note": "abcdefgh", "epoch": 0.25, "total_flos": 1.0}
    evaluation = {"eval_runtime": 1.5, "eval_samples_per_second": 20.0, "eval_loss": float("nan"), "epoch": 1.0}
    for entry in (logs, evaluation):
        player.runner.fire("on_log", logs=entry)
    player.runner.fire("on_train_end")
    assert file.getvalue().splitlines() == [
        "step 7/1000  epoch 0.25  loss 0.1235  lr 4.99e-05  note abcde... (8 characters)",
        "step 7/1000  epoch 1.00  eval_loss nan  1.50 s  20.00 samples/s",
    ]
    assert logs["loss"] == 0.12345678


def test_plain_evaluations_print_one_line_each_and_count_from_the_start() -> None:
    file = io.StringIO()
    player = Player(file)
    player.evaluate(range(5))
    player.evaluate(range(5), num_batches=2, event=None)  # fails
    player.evaluate(range(7), event="on_predict")
    shown = [line.split(" [")[0] for line in file.getvalue().splitlines()]
    assert shown == ["evaluate: 100% 5/5", "evaluate:  40% 2/5", "evaluate: 100% 7/7"]


def test_evaluation_of_a_stream_is_counted_without_a_total() -> None:
    file = io.StringIO()
    Player(file).evaluate(iter(()), num_batches=4)
    assert file.getvalue().startswith("evaluate: 4batch [00:00")


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


def test_log_outside_of_training_is_a_line_in_a_file() -> None:
    for file, shown in ((io.StringIO(), "eval_loss 0.5000  2.00 s\n"), (Terminal(), "")):
        Player(file).runner.fire("on_log", logs={"eval_loss": 0.5, "eval_runtime": 2.0, "epoch": 1.0})
        assert file.getvalue() == shown


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


class OwnBar(ProgressCallback):
    """As libraries write it for transformers' callback: bars of its own, and lines above them."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.training_bar = self.made = tqdm(total=state.max_steps, file=io.StringIO())

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self.prediction_bar is None:
            self.prediction_bar = self.predicted = tqdm(total=len(eval_dataloader), file=io.StringIO())
        self.prediction_bar.update()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None:
            self.training_bar.write("own line")
        super().on_log(args, state, control, logs, **kwargs)


def test_bars_that_a_subclass_sets_are_advanced_and_closed(tmp_path) -> None:
    own = OwnBar()
    assert own.training_bar is None is own.prediction_bar
    args = make_arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=3)
    trainer = Trainer(Net(), args, train_dataset=make_rows(), eval_dataset=make_rows(8), callbacks=[own])
    trainer.train()
    assert (own.made.n, own.made.disable, own.predicted.n, own.predicted.disable) == (3, True, 2, True)
    assert own.training_bar is None is own.prediction_bar


def test_bar_of_the_callback_takes_lines_and_values(tmp_path, capsys) -> None:
    class Writes(ProgressCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if self.training_bar is not None:
                self.training_bar.set_description("mine")
                self.training_bar.set_postfix({"a": 1}, b=2)
                self.training_bar.write("own line")
                self.training_bar.refresh()

    Trainer(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows(), callbacks=[Writes()]).train()
    shown = capsys.readouterr()
    assert shown.out.count("own line") == 3
    assert re.search("mine: 100%.*a=1, b=2", shown.err)
