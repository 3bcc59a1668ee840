"""The documented rules of checkpoints: what is in them, which of them stay, and what a resume takes from them."""

from __future__ import annotations

import gc
import json
import os
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import Net, at, make_arguments, make_rows
from torch import nn
from torch.optim import SGD

from hftrain import SavePolicy, Trainer, TrainerCallback, set_seed
from hftrain.checkpoint import weights as weights_module
from hftrain.checkpoint.state_files import load_optimizer
from hftrain.checkpoint.weights import load_weights, read_weights
from hftrain.core.state import TrainerState
from hftrain.storage.shards import read_whole


class Tool:
    """A processing class."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tool.json").write_text("{}", encoding="utf-8")


def make(folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Return a trainer of 6 steps a pass that saves every step unless told otherwise."""
    set_seed(1)
    keywords = {name: options.pop(name, None) for name in ("precision", "compute_metrics", "save_policy")}
    arguments = make_arguments(
        folder, **{"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "logging_steps": 500, **options}
    )
    return kind(
        Net(), arguments, train_dataset=make_rows(), eval_dataset=make_rows(4, seed=2), callbacks=list(callbacks),
        processing_class=Tool(), **keywords,
    )  # fmt: skip


def scored(folder: Path, scores: list[float], **options: Any) -> Trainer:
    """Return a trainer whose evaluations, one a step, give these scores: the highest is the best."""
    given = iter(scores)
    return make(
        folder, eval_strategy="steps", eval_steps=1, metric_for_best_model="score", greater_is_better=True,
        max_steps=len(scores), compute_metrics=lambda prediction: {"score": next(given)}, **options,
    )  # fmt: skip


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


# -- what is in a checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "weights", "others"),
    [
        ({}, "model.safetensors", {"optimizer.pt", "scheduler.pt", "rng_state.pth"}),
        ({"precision": "fp16"}, "model.safetensors", {"optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"}),
        (
            {"save_safetensors": False},
            "pytorch_model.bin",
            {"optimizer.pt", "scheduler.pt", "rng_state.pth"},
        ),
        ({"save_only_model": True}, "model.safetensors", set()),
    ],
)
def test_checkpoint_of_a_plain_model_holds_the_documented_files(
    tmp_path: Path, options: dict[str, Any], weights: str, others: set[str]
) -> None:
    trainer = make(tmp_path, max_steps=3, save_steps=3, **options)
    trainer.train()
    assert steps_in(tmp_path) == [3]
    folder = tmp_path / "checkpoint-3"
    always = {"trainer_state.json", "training_args.bin", "tool.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == {weights, *always, *others}
    # A plain state dict: the names are the model's own.
    assert read_weights(folder).keys() == trainer.model.state_dict().keys()
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3
    assert torch.load(folder / "training_args.bin", weights_only=True)["max_steps"] == 3


def save_together(folder: str) -> dict[str, Any]:
    """Train on two ranks that save every step; one is late, another early."""
    writers: list[str] = []
    rank = int(os.environ["RANK"])

    class Watched(Trainer):
        def _save(self, output_dir: str, state_dict: Any = None) -> None:
            writers.append(output_dir)
            super()._save(output_dir, state_dict)

        def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
            # The process that makes the folder comes last at one save, and first at the next.
            time.sleep(0.3 * (rank == self.state.global_step % 2))
            super()._save_checkpoint(model, trial)

    trainer = make(Path(folder), kind=Watched, max_steps=2)
    trainer.train()
    # All processes come out of the end of the training with the files there; a whole model the main one saves alone.
    if trainer.is_world_process_zero():
        trainer.save_model(str(Path(folder) / "final"))
    trainer.strategy.barrier()
    found = {path.parent.name + "/" + path.name for path in Path(folder).glob("*/*")}
    return {"writes": len(writers), "found": sorted(found)}


@pytest.mark.distributed
def test_main_process_writes_the_model_and_each_its_own_random_numbers(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(save_together, folder=str(tmp_path / "out"))
    assert (first["writes"], second["writes"]) == (3, 0)
    assert first["found"] == second["found"]
    for step in (1, 2):
        for name in ("model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"):
            assert f"checkpoint-{step}/{name}" in first["found"]
    assert "final/model.safetensors" in first["found"]


# -- which checkpoints stay ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "scores", "during", "after"),
    [
        # The last four and the best.
        (5, [0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [2, 5, 6, 7, 8], [2, 5, 6, 7, 8]),
        # The last is the best.
        (5, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8]),
        # To resume, the last stays beside the best until the end.
        (1, [0.1, 0.9, 0.2, 0.3], [2, 4], [2]),
        (1, [0.1, 0.2, 0.3], [3], [3]),
        (2, [0.9, 0.1, 0.2, 0.3], [1, 4], [1, 4]),
        (None, [0.9, 0.1, 0.2], [1, 2, 3], [1, 2, 3]),
    ],
)
def test_last_and_best_checkpoints_stay(
    tmp_path: Path, limit: int | None, scores: list[float], during: list[int], after: list[int]
) -> None:
    seen: list[list[int]] = []

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(steps_in(tmp_path))
            # Times of change are not what decides.
            for path in tmp_path.glob("checkpoint-*"):
                os.utime(path, (1e9 - state.global_step, 1e9 - state.global_step))

    trainer = scored(tmp_path, scores, load_best_model_at_end=True, save_total_limit=limit)
    trainer.add_callback(Look)
    trainer.train()
    assert seen[-1] == during
    assert steps_in(tmp_path) == after
    best = scores.index(max(scores)) + 1
    # As soon as it is there, the best one never goes.
    assert all(best in found for found in seen[best - 1 :])
    loaded, saved = trainer.model.state_dict(), read_weights(tmp_path / f"checkpoint-{best}")
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


def test_limit_of_one_leaves_the_best_checkpoint_though_it_is_not_loaded(tmp_path: Path) -> None:
    scored(tmp_path, [0.1, 0.9, 0.2], save_total_limit=1).train()
    assert steps_in(tmp_path) == [2]


def test_newest_stays_beside_the_best_where_the_policy_says_so(tmp_path: Path) -> None:
    scored(tmp_path, [0.1, 0.9, 0.2], save_total_limit=1, save_policy=SavePolicy(keep_best=1)).train()
    assert steps_in(tmp_path) == [2, 3]


def test_best_model_that_is_gone_is_missed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Lose(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                (tmp_path / "checkpoint-1").rename(tmp_path / "elsewhere")

    trainer = scored(tmp_path, [0.9, 0.1, 0.2], load_best_model_at_end=True)
    trainer.add_callback(Lose)
    trainer.train()
    assert "the last model stays" in caplog.text
    assert trainer.state.global_step == 3


# -- what a resume takes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"logging_steps": 7}, r"logging_steps \(was 500, now 7\)\. The run uses the new"),
        ({"save_steps": 3}, r"save_steps \(was 1, now 3\)"),
        ({"eval_strategy": "steps", "eval_steps": 3}, r"eval_strategy \(was 'no', now 'steps'\), eval_steps"),
        ({"learning_rate": 0.5}, r"learning_rate \(was 0\.01, now 0\.5\)\. The resumed"),
        ({}, None),
    ],
)
def test_changed_arguments_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], named: str | None
) -> None:
    make(tmp_path, StopAt(2)).train()
    make(tmp_path, **options).train(resume_from_checkpoint=True)
    assert ("changed since the checkpoint" in caplog.text) == (named is not None)
    assert named is None or re.search(named, caplog.text)


def test_changed_rate_without_an_argument_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rate in (0.5, 0.5, 0.25):
        caplog.clear()
        trainer = make(tmp_path, StopAt(2), max_steps=6, overwrite_output_dir=True)
        trainer.optimizer = SGD(trainer.model.parameters(), lr=rate)
        trainer.train(resume_from_checkpoint="auto")
        assert ("learning_rate (was 0.5, now 0.25). The resumed" in caplog.text) == (rate != 0.5)


def test_state_of_a_resume_follows_the_present_arguments(tmp_path: Path) -> None:
    make(tmp_path, StopAt(2), max_steps=-1, num_train_epochs=1, eval_strategy="steps", eval_steps=2).train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    saved = json.loads(path.read_text())
    assert (saved["max_steps"], saved["num_train_epochs"]) == (6, 1)
    saved.update(is_world_process_zero=False, is_local_process_zero=False)
    steps = {"logging_steps": 5, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    trainer = make(tmp_path, max_steps=-1, num_train_epochs=2, **steps)
    found: dict[str, Any] = {}
    look = at("on_train_begin", lambda args, state, control, **kwargs: found.update({**vars(state)}))
    # As if another process had saved it: the manifest holds the file's digest, so the reader is given the text.
    read = trainer_state_of(saved)
    trainer.add_callback(look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hftrain.run.plan.load_trainer_state", lambda folder: read)
        trainer.train(resume_from_checkpoint=True)
    assert (found["max_steps"], found["num_train_epochs"], found["global_step"]) == (12, 2, 2)
    assert (found["logging_steps"], found["save_steps"], found["eval_steps"]) == (5, 4, 3)
    assert found["is_world_process_zero"]
    assert found["is_local_process_zero"]
    assert trainer.state.global_step == 12


def trainer_state_of(values: dict[str, Any]) -> TrainerState:
    state = TrainerState()
    vars(state).update({name: value for name, value in values.items() if name in vars(state)})
    return state


def test_state_of_a_gpu_is_read_onto_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written as if their tensors lay on a GPU; there may be none here."""
    trainer = make(tmp_path, max_steps=1, save_safetensors=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        trainer.train()
    folder = tmp_path / "checkpoint-1"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA device"):
            torch.load(folder / "pytorch_model.bin", weights_only=True)
    states = [read_weights(folder), *load_optimizer(folder)["state"].values()]
    assert {value.device.type for state in states for value in state.values()} == {"cpu"}
    load_weights(Net(), folder)


@pytest.mark.parametrize("safe", [True, False])
def test_state_that_was_loaded_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: bool) -> None:
    make(tmp_path, StopAt(1), save_safetensors=safe).train()
    read: list[weakref.ref[torch.Tensor]] = []

    def watch(state: dict[str, Any]) -> dict[str, Any]:
        found = read_whole(state)
        read.extend(weakref.ref(value) for value in found.values())
        return found

    kept: list[int] = []

    class Count(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gc.collect()
            kept.append(sum(each() is not None for each in read))

    trainer = make(tmp_path, Count(), save_safetensors=safe)
    monkeypatch.setattr(weights_module, "read_whole", watch)
    trainer.train(resume_from_checkpoint=True)
    assert read
    assert kept == [0]
