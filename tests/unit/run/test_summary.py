"""The summary at the end of a run, against what the run did."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, share

from hftrain import ProgressCallback, SavePolicy, SummaryCallback, Trainer, TrainerCallback


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read(text: str) -> dict[str, str]:
    """Return a summary's rows by their label, the title as "title"."""
    title, *lines = text.splitlines()
    return {"title": title, **dict(re.split("  +", line.strip(), maxsplit=1) for line in lines)}


def summarize(trainer: Trainer, **options: Any) -> tuple[Any, dict[str, str]]:
    file = io.StringIO()
    trainer.add_callback(SummaryCallback(file=file))
    output = trainer.train(**options)
    return output, read(file.getvalue())


def make_trainer(folder: Path, **options: Any) -> Trainer:
    parts = {name: options.pop(name) for name in ("callbacks", "save_policy", "precision", "model") if name in options}
    model = parts.pop("model", Net())
    settings = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "share", **options}
    return Trainer(
        model,
        make_arguments(folder, load_best_model_at_end=settings["save_strategy"] != "no", **settings),
        train_dataset=make_rows(20),
        eval_dataset=make_rows(12, seed=2),
        compute_metrics=share,
        **parts,
    )


def test_summary_tells_the_numbers_of_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, num_train_epochs=3)
    output, rows = summarize(trainer)
    state = trainer.state
    assert re.fullmatch(r"Trained 15 steps in [\d.]+ m?s", rows["title"])
    assert float(rows["speed"].split()[0]) == pytest.approx(output.metrics["train_samples_per_second"], rel=1e-3)
    assert rows["best evaluation"] == f"step {state.best_global_step}  eval_share {state.best_metric:.4f}"
    assert rows["best checkpoint"] == f"{tmp_path}/checkpoint-{state.best_global_step} (loaded)"
    assert rows.keys() <= {"title", "speed", "best evaluation", "best checkpoint", "last checkpoint"}


def test_summary_of_a_resumed_run_counts_its_own_steps(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == 4

    _, rows = summarize(make_trainer(tmp_path, callbacks=[Stop]))
    assert rows["title"].startswith("Trained 4 steps")
    assert rows["stopped"] == "at step 4 of 10: a callback or the loop ended the run"
    assert rows["best checkpoint"] == f"{tmp_path}/checkpoint-4 (loaded)"
    _, rows = summarize(make_trainer(tmp_path), resume_from_checkpoint=True)
    assert rows["title"].startswith("Trained 6 steps")
    assert rows["resumed"] == f"from {tmp_path}/checkpoint-4"


class Overflowing(Net):
    """Its third loss is infinite."""

    num_calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        loss, logits = super().forward(x, labels)
        self.num_calls += self.training
        return (loss * (math.inf if self.num_calls == 3 and self.training else 1.0), logits)


@pytest.mark.filterwarnings("ignore:The loss was NaN")
def test_summary_tells_of_saves_that_were_not_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FillDisk(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 6:
                monkeypatch.setattr("hftrain.checkpoint.writer.free_bytes", lambda *args: 0)

    policy = SavePolicy(on_nonfinite="warn", on_full_disk="warn")
    _, rows = summarize(make_trainer(tmp_path, model=Overflowing(), save_policy=policy, callbacks=[FillDisk]))
    assert rows["not finite"] == "weights or losses at steps 5, 10: saved all the same"
    assert rows["not saved"] == "step 10: the disk was full"


@pytest.mark.parametrize(("is_terminal", "is_asked"), [(True, False), (False, False), (True, True)])
def test_summary_comes_once_on_a_terminal_or_where_asked(tmp_path: Path, is_terminal: bool, is_asked: bool) -> None:
    file, asked = Terminal() if is_terminal else io.StringIO(), io.StringIO()
    callbacks = [ProgressCallback(file=file), *([SummaryCallback(file=asked)] if is_asked else [])]
    Trainer(Task(), make_arguments(tmp_path), train_dataset=make_rows(), callbacks=callbacks).train()
    assert ("Trained 12 steps" in file.getvalue()) is (is_terminal and not is_asked)
    assert asked.getvalue().startswith("Trained 12 steps") is is_asked
