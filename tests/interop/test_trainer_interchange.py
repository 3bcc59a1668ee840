"""A run goes from transformers' Trainer to ours in the middle, and the other way, as if nobody had stopped it.

Dropout is on. Both Trainers draw the same random numbers within a pass over the data; between two passes transformers'
draws one more (its loader's). A callback that seeds at the beginning of each pass makes whole runs of both equal.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import losses_of, make_model, make_rows, run_options  # noqa: E402
from support.resuming import without_times  # noqa: E402

import hftrain  # noqa: E402
from hftrain import set_seed  # noqa: E402

pytestmark = [
    pytest.mark.interop,
    pytest.mark.usefixtures("environment_stays"),
    pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning"),
]

OURS, THEIRS = hftrain, transformers


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


@DIRECTIONS
@pytest.mark.parametrize(
    "options",
    [
        *({"lr_scheduler_type": name} for name in ("cosine", "polynomial", "inverse_sqrt", "constant_with_warmup")),
        *({"optim": name} for name in ("adamw_torch_fused", "adafactor")),
        {"optim": "sgd", "optim_args": "momentum=0.9"},
    ],
    ids=str,
)
def test_schedule_and_optimizer_go_on(tmp_path: Path, first: Any, then: Any, options: dict[str, Any]) -> None:
    options = {**options, "num_train_epochs": 1}
    resumed = go_on(first, then, tmp_path / "parts", 3, **options)
    whole = make(then, tmp_path / "whole", **options)
    whole.train()
    assert_same_run(resumed, whole)


@DIRECTIONS
def test_the_best_model_and_patience_go_on(tmp_path: Path, first: Any, then: Any) -> None:
    def options(library: Any) -> dict[str, Any]:
        return {
            "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
            "metric_for_best_model": "loss", "greater_is_better": True, "load_best_model_at_end": True,
            "name": "bert", "eval_dataset": make_rows("bert", 8, seed=2),
            "restore_callback_states_from_checkpoint": True,
            "callbacks": [library.EarlyStoppingCallback(early_stopping_patience=5)],
        }  # fmt: skip

    # The loss falls, and more is better: the first step stays the best, and five more end the run.
    begun = make(first, tmp_path / "parts", stop=3, **options(first))
    begun.train()
    resumed = make(then, tmp_path / "parts", **options(then))
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    state = resumed.state
    assert (state.global_step, state.best_global_step) == (6, 1)
    assert Path(state.best_model_checkpoint) == tmp_path / "parts" / "checkpoint-1"
    best = make_model("bert", dropout=0.2)
    best.load_state_dict(type(best).from_pretrained(tmp_path / "parts" / "checkpoint-1").state_dict())
    for name, value in best.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
    # Not the losses of an undisturbed run: each evaluation of transformers' Trainer draws a random number.
    assert state.log_history[:6] == begun.state.log_history[:6]
    assert state.best_metric == begun.state.best_metric


# -- several processes -------------------------------------------------------------------------------------------------


def train_parts(runs: list[tuple[str, str, str | None]]) -> list[list[float]]:
    """Train with one of the libraries, in a folder, from a checkpoint; answer with the losses of each run."""
    losses = []
    for which, folder, resume in runs:
        options = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "save_steps": 2}
        options |= {"average_tokens_across_devices": True, "rows": make_rows("llama", 24)}
        trainer = make({"ours": OURS, "theirs": THEIRS}[which], Path(folder), **options)
        trainer.train(resume_from_checkpoint=resume)
        losses.append(losses_of(trainer.state.log_history))
    if which == "theirs":
        # It leaves its group to the interpreter's end, where gloo's threads abort the process once in 60 times or so.
        time.sleep(0.1)
        trainer.accelerator.end_training()
    return losses


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_two_ranks_go_on_with_the_other_trainer(tmp_path: Path, run_distributed: Any) -> None:
    theirs, ours, there, here = (str(tmp_path / name) for name in ("theirs", "ours", "there", "here"))
    [whole] = run_distributed(train_parts, runs=[("theirs", theirs, None)])[0]
    runs = [("ours", ours, None), ("ours", here, f"{theirs}/checkpoint-2")]
    own, resumed = run_distributed(train_parts, runs=runs)[0]
    [resumed_there] = run_distributed(train_parts, runs=[("theirs", there, f"{ours}/checkpoint-2")])[0]
    assert len(whole) == 6
    for losses in (own, resumed, resumed_there):
        assert losses == pytest.approx(whole, rel=1e-6)
