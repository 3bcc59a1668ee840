"""A run goes from transformers' Trainer to ours in the middle, and the other way, as if nobody had stopped it.

Dropout is on. Both Trainers draw the same random numbers within a pass over the data; between two passes transformers'
draws one more (its loader's). A callback that seeds at the beginning of each pass makes whole runs of both equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, run_options, without_times  # noqa: E402

import hftrain  # noqa: E402
from hftrain import set_seed  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

OURS, THEIRS = hftrain, transformers


@pytest.fixture(autouse=True)
def environment_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep what transformers' Trainer sets for the whole process, once it has run, from outliving a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)


def seeding(library: Any, stop: int | None) -> Any:
    """Return a callback that seeds each pass alike in both libraries, and may save and stop at a step."""

    class Seeding(library.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            passes = state.epoch or 0.0
            if abs(passes - round(passes)) < 1e-9:
                set_seed(100 + round(passes))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == stop:
                control.should_save = control.should_training_stop = True

    return Seeding()


def make(library: Any, folder: Path, *, stop: int | None = None, name: str = "llama", **options: Any) -> Any:
    extra = {key: options.pop(key) for key in ("eval_dataset", "compute_metrics") if key in options}
    callbacks = [seeding(library, stop), *options.pop("callbacks", [])]
    rows = options.pop("rows", None) or make_rows(name, 22)
    defaults = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 2, "num_train_epochs": 3}
    defaults |= {"save_strategy": "steps", "save_steps": 1000}
    arguments = library.TrainingArguments(str(folder), **run_options(**{**defaults, **options}))
    model = make_model(name, dropout=0.2)
    set_seed(5)
    return library.Trainer(model, arguments, train_dataset=rows, callbacks=callbacks, **extra)


def go_on(first: Any, then: Any, folder: Path, stop: int, **options: Any) -> Any:
    """Begin a run with one library and end it with the other."""
    make(first, folder, stop=stop, **options).train()
    trainer = make(then, folder, **options)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{stop}"))
    return trainer


def assert_same_run(resumed: Any, whole: Any, *, exact: bool = False) -> None:
    history, expected = (without_times(trainer.state.log_history) for trainer in (resumed, whole))
    # The last line sums a run up: what a stopped one writes is one too many, and flops are counted by one Trainer only.
    history, expected = ([line for line in lines if "train_loss" not in line] for lines in (history, expected))
    assert len(history) == len(expected)
    for mine, other in zip(history, expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-6, abs=1e-12), other
    assert resumed.state.global_step == whole.state.global_step
    for name, value in whole.model.state_dict().items():
        if exact:
            assert torch.equal(resumed.model.state_dict()[name], value), name
        # Adam turns a last-bit difference of a small gradient into one of the update.
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


DIRECTIONS = pytest.mark.parametrize(("first", "then"), [(THEIRS, OURS), (OURS, THEIRS)], ids=["to_ours", "to_theirs"])


# 22 samples, 6 batches; with 4 batches a step, each pass ends in a short window. Step 6, or 2 and 4: a pass is over.
@DIRECTIONS
@pytest.mark.parametrize(
    ("accumulation", "stop"), [(1, 1), (1, 4), (1, 6), (1, 9), (3, 1), (3, 2), (3, 3), (4, 3), (4, 4)]
)
def test_a_run_goes_on_with_the_other_trainer(
    tmp_path: Path, first: Any, then: Any, accumulation: int, stop: int
) -> None:
    options = {"gradient_accumulation_steps": accumulation}
    resumed = go_on(first, then, tmp_path / "parts", stop, **options)
    for library in (first, then):
        whole = make(library, tmp_path / "whole", **options)
        whole.train()
        assert_same_run(resumed, whole)
