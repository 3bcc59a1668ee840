from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import re
import struct
import termios
import threading
import warnings

import pytest
from support.tiny import Net, make_arguments, make_rows
from tqdm import tqdm

from hftrain import PrinterCallback, Trainer
from hftrain.callbacks import CallbackHandler, ProgressCallback
from hftrain.callbacks.lines import number_text
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class PseudoTerminal:
    """A terminal of some width; what was written to its `file` is drawn as a terminal would."""

    def __init__(self, width):
        self.width, self.text = width, ""

    def __enter__(self):
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self.width, 0, 0))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self):
        read = b""
        with contextlib.suppress(OSError):  # once the other end is closed
            while part := os.read(self._master, 65536):
                read += part
        self.text = read.decode()

    def __exit__(self, *error):
        self.file.close()
        self._reader.join()
        os.close(self._master)

    def screen(self):
        """Return the lines as written: one that is longer than the terminal is wide would have been wrapped."""
        lines, row, column = [""], 0, 0
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\r\n]|[^\r\n\x1b]+", self.text):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif part.startswith("\x1b"):
                row -= int(part[2:-1] or 1) if part[-1] == "A" else 0
                lines[row] = "" if part[-1] == "K" else lines[row]
            else:
                lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
                column += len(part)
        lines = [line.rstrip() for line in lines]
        return lines[: max(i for i, line in enumerate(lines, 1) if line)]


class Player:
    """Plays the loop's part for one callback."""

    def __init__(self, file=None, *, max_steps=100, callback=None, **state):
        self.callback = callback or ProgressCallback(file=file)
        self.state = TrainerState(max_steps=max_steps, **state)
        self.runner = CallbackHandler([self.callback], args=None, state=self.state, control=TrainerControl())

    def train(self, num_steps, *, is_begun=False, is_ended=True):
        if not is_begun:
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
    """Lift the limit of one plain line per half minute."""
    monkeypatch.setattr("hftrain.callbacks.progress.PLAIN_INTERVAL_S", 0.0)


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
    assert "\rstep  10/100  loss 0.1235  " in file.getvalue()
    assert "flos" not in file.getvalue()


@pytest.mark.filterwarnings("always:x")
@pytest.mark.parametrize("kind", ["logging", "warnings"])
def test_messages_do_not_tear_the_bar(kind, monkeypatch) -> None:
    with PseudoTerminal(80) as terminal:
        handler = logging.StreamHandler(terminal.file)
        monkeypatch.setattr(logging.getLogger("somebody"), "handlers", [handler])
        monkeypatch.setattr(warnings, "showwarning", lambda *args, **kwargs: terminal.file.write("a message\n"))
        show = warnings.showwarning
        player = Player(terminal.file)
        player.train(3, is_ended=False)
        logging.getLogger("somebody").warning("a message") if kind == "logging" else warnings.warn("x", stacklevel=1)
        player.train(3, is_begun=True)
    assert terminal.screen()[0] == "a message"
    assert [line[:5] for line in terminal.screen()[1:] if line] == ["train"]
    assert (handler.filters, warnings.showwarning) == ([], show)


LOGS = {
    "loss": 0.5,
    "learning_rate": 1e-3,
    "a_name_that_is_longer_than_any_terminal_should_have_to_show": 123.456,
    "b": 1,
}


@pytest.mark.parametrize("width", [10, 24, 40, 80, 120, 200])
def test_terminal_shows_nothing_wider_than_it_is(width, monkeypatch) -> None:
    monkeypatch.setattr("hftrain.callbacks.progress.REFRESH_S", 0.0)
    with PseudoTerminal(width) as terminal:
        player = Player(terminal.file, epoch=0.5)
        player.train(20, is_ended=False)
        player.runner.fire("on_log", logs=LOGS)
        player.evaluate(range(5), event=None)
        player.runner.fire("on_log", logs={"eval_loss": float("nan"), "eval_runtime": 2.0, "epoch": 0.5})
        player.runner.fire("on_evaluate", metrics={})
        player.train(80, is_begun=True)
    lines = terminal.screen()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    if width >= 24:
        assert all(part in text for part in ("loss 0.5000", "eval_loss nan", "lr 0.001000"))
        assert re.match(r"train 100%  .*100/100", lines[-1])
    if width >= 40:
        assert re.search(r"  a_name_that_is[a-z_\s]*_to_show 123.5", text)
    if width >= 80:
        assert re.search(r"█  100/100  \[00:0\d<00:00, [\d.]+ [mu]?s/step  loss 0.5000", lines[-1])
    if width >= 120:
        assert "eval_loss nan  lr 0.001000" in lines[-1]


def test_terminal_evaluation_bar_vanishes_within_training_and_stays_outside() -> None:
    file = Terminal()
    player = Player(file)
    player.train(1, is_ended=False)
    player.evaluate(range(5))
    player.runner.fire("on_train_end")
    assert "evaluate   0%" in file.getvalue()
    assert re.search(r"0/5  \[00:00<\?\]", file.getvalue())
    assert "5/5" not in file.getvalue().splitlines()[-1]
    outside = Terminal()
    Player(outside).evaluate(range(5), event="on_predict")
    assert "5/5" in outside.getvalue().splitlines()[-1]


@pytest.mark.parametrize("file_class", [io.StringIO, Terminal])
def test_failed_run_is_closed_at_once(file_class) -> None:
    file = file_class()
    player = Player(file)
    show = warnings.showwarning
    player.train(3, is_ended=False)
    player.evaluate(range(5), num_batches=2, event=None)
    player.runner.close_run()
    assert warnings.showwarning is show
    assert "3/100" in file.getvalue()
    player.state.global_step = 0
    player.train(100)
    assert file.getvalue().splitlines()[-1].startswith("train 100%")


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
    assert line == "train 100%  50/50  [00:00<00:00]"


def test_plain_logs_are_one_aligned_line_each() -> None:
    file = io.StringIO()
    player = Player(callback=ProgressCallback(max_str_len=5, file=file), max_steps=1000, epoch=0.0)
    player.train(7, is_ended=False)
    logs = {"loss": 0.12345678, "learning_rate": 4.987654e-05, "note": "abcdefgh", "epoch": 0.25, "total_flos": 1.0}
    for entry in (logs, {**logs, "loss": float("nan")}, {**logs, "loss": float("-inf"), "learning_rate": 0.001}):
        player.runner.fire("on_log", logs=entry)
    evaluation = {"eval_loss": 12.3456, "eval_runtime": 1.5, "eval_samples_per_second": 20.0, "epoch": 1.0}
    player.runner.fire("on_log", logs=evaluation)
    player.runner.fire("on_train_end")
    first, second, third, last = file.getvalue().splitlines()
    assert first.startswith("step    7/1000  epoch 0.25  loss 0.1235  lr 4.99e-05  note abcde... (8 characters)  ")
    assert re.search(r"  [\d.]+ [mu]s/step$", first)
    assert second.startswith("step    7/1000  epoch 0.25  loss nan     lr 4.99e-05  note ")
    assert third.startswith("step    7/1000  epoch 0.25  loss -inf    lr 0.001000  note ")
    assert last == "step    7/1000  epoch 1.00  eval_loss 12.35   1.50 s  20.00 samples/s"
    assert logs["loss"] == 0.12345678


def test_log_line_counts_as_a_line_of_progress() -> None:
    file = io.StringIO()
    player = Player(file, max_steps=10)
    player.train(10, is_ended=False)
    player.runner.fire("on_log", logs={"train_loss": 1.0})
    player.runner.fire("on_train_end")
    assert file.getvalue() == "step 10/10  train_loss 1.000\n"


def test_plain_evaluation_prints_one_line_each() -> None:
    file = io.StringIO()
    player = Player(file)
    player.evaluate(range(5))
    player.evaluate(range(7), event="on_predict")
    assert [line.split("[")[0] for line in file.getvalue().splitlines()] == [
        "evaluate 100%  5/5  ",
        "evaluate 100%  7/7  ",
    ]


def test_evaluation_after_a_failed_one_counts_from_the_start() -> None:
    file = io.StringIO()
    player = Player(file)
    failed, good = range(5), range(5)
    player.evaluate(failed, num_batches=2, event=None)
    player.evaluate(good)
    assert file.getvalue().splitlines()[-1].startswith("evaluate 100%  5/5")


def test_evaluation_of_a_stream_is_counted_without_a_total() -> None:
    file = io.StringIO()
    Player(file).evaluate(iter(()), num_batches=4)
    assert file.getvalue().startswith("evaluate  4  [00:00]")


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
    out, err = capsys.readouterr()
    assert out == err == ""
    player.runner.fire("on_log", logs={"loss": 1.0})
    player.runner.fire("on_train_end")
    out, err = capsys.readouterr()
    assert out.startswith("step 100/100  loss 1.000  ")
    assert err == ""


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
    assert tee.text.startswith("train 100%")


def test_whole_run_fits_into_its_terminal(tmp_path) -> None:
    with PseudoTerminal(60) as terminal:
        arguments = make_arguments(tmp_path, disable_tqdm=True, eval_strategy="epoch", num_train_epochs=1)
        callbacks = [ProgressCallback(file=terminal.file)]
        trainer = Trainer(Net(), arguments, train_dataset=make_rows(), eval_dataset=make_rows(8), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.predict(make_rows(8))
    lines = terminal.screen()
    assert max(map(len, lines)) <= 60
    starts = [line.split("  ")[0].split(" in ")[0] for line in lines if not line.startswith(" ")]
    steps = [f"step {n}/6" for n in (1, 2, 3, 4, 5, 6, 6, 6)]
    assert starts == [*steps, "train 100%", "Trained 6 steps", "predict 100%"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shown = [line for line in lines if line.startswith("step")]
    assert all(f"loss {number_text(loss)}" in line for loss, line in zip(losses, shown[:6], strict=True))


def test_log_outside_of_training_is_a_line_in_a_file() -> None:
    file = io.StringIO()
    Player(file).runner.fire("on_log", logs={"eval_loss": 0.5, "eval_runtime": 2.0, "epoch": 1.0})
    assert file.getvalue() == "eval_loss 0.5000  2.00 s\n"
    Player(file, is_world_process_zero=False).runner.fire("on_log", logs={"eval_loss": 0.5})
    assert file.getvalue().count("\n") == 1


class OwnBar(ProgressCallback):
    """As libraries write it for transformers' callback: bars of its own, and lines above them."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.training_bar = self.made = tqdm(total=state.max_steps, file=io.StringIO())
        self.current_step = 0

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
    assert re.search("mine:  100%.*a=1, b=2", shown.err)
