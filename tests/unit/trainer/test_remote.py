"""A Trainer whose output_dir is a URL, on fsspec's store in memory; processes and S3 are tested elsewhere."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.remote import URL, failing, listing, read, write
from support.resuming import Stop
from support.tiny import Net, at, make_arguments, make_resumable, make_rows

from hftrain import (
    CheckpointError,
    ConfigError,
    MissingDependencyError,
    SavePolicy,
    Trainer,
    TrainerCallback,
    set_seed,
)
from hftrain.checkpoint.weights import load_weights
from hftrain.storage.files import mirror_of

pytestmark = pytest.mark.usefixtures("store")


def make_trainer(folder=URL, *callbacks, **options) -> Trainer:
    return make_resumable(folder, *callbacks, **{"save_steps": 2, "max_steps": 8, **options})


def saved() -> list[str]:
    return [name.partition("/")[0] for name in listing() if name.endswith("/manifest.json")]


def same_weights(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


@pytest.mark.parametrize(("limit", "kept"), [(None, [2, 4, 5, 6, 8]), (1, [8])])
@pytest.mark.parametrize("save_async", [False, True])
def test_a_run_is_resumed_from_the_store_alone_and_ends_the_same(tmp_path, save_async, limit, kept):
    options = {"save_policy": SavePolicy(save_async=save_async), "save_total_limit": limit}
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    make_trainer(URL, Stop(5), **options).train()
    shutil.rmtree(mirror_of(URL))
    resumed = make_trainer(**options)
    assert resumed.train(resume_from_checkpoint="auto").global_step == 8
    assert saved() == [f"checkpoint-{step}" for step in kept]
    assert same_weights(resumed.model.state_dict(), whole.model.state_dict())


def test_auto_begins_anew_where_nothing_is_and_not_where_nothing_can_be_read(monkeypatch):
    assert make_trainer(max_steps=2).train(resume_from_checkpoint="auto").global_step == 2
    failing(monkeypatch, "get_file", times=99, error=OSError("unreachable"))
    with pytest.raises(CheckpointError, match="unreachable"):
        make_trainer().train(resume_from_checkpoint="auto")


@pytest.mark.parametrize("name", [f"{URL}/checkpoint-4", f"{URL}/checkpoint-4/", "checkpoint-4"])
def test_a_checkpoint_can_be_named(name):
    make_trainer().train()
    shutil.rmtree(mirror_of(URL))
    steps = []

    watch = at("on_step_begin", lambda args, state, control, **kwargs: steps.append(state.global_step))
    make_trainer(URL, watch).train(resume_from_checkpoint=name)
    assert steps == [4, 5, 6, 7]


def test_a_local_run_can_begin_from_a_remote_checkpoint(tmp_path):
    make_trainer().train()
    trainer = make_trainer(tmp_path / "out")
    assert trainer.train(resume_from_checkpoint=f"{URL}/checkpoint-4").global_step == 8
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint-6",
        "checkpoint-8",
        "journal.jsonl",
    ]


def test_a_remote_checkpoint_that_is_absent_or_no_folder_is_an_error():
    with pytest.raises(CheckpointError, match=r"Cannot read .*bucket/run/checkpoint-9\. It is not a checkpoint"):
        make_trainer().train(resume_from_checkpoint=f"{URL}/checkpoint-9")
    with pytest.raises(ConfigError, match="It names no folder"):
        make_trainer().train(resume_from_checkpoint="memory://bucket")
    with pytest.raises(CheckpointError, match=r"There is no valid checkpoint with a manifest in 'memory://bucket/run'"):
        make_trainer().train(resume_from_checkpoint=True)


def test_the_best_model_is_loaded_from_the_store(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    make_trainer(URL, Stop(4), **options).train()
    shutil.rmtree(mirror_of(URL))
    trainer = make_trainer(URL, **options, learning_rate=5.0)
    trainer.train(resume_from_checkpoint=True)
    best = trainer.state.best_model_checkpoint
    assert best is not None
    assert best.startswith(f"{URL}/checkpoint-")
    assert saved() == [Path(best).name]
    fetched = Net()
    load_weights(fetched, mirror_of(URL) / Path(best).name)
    assert same_weights(trainer.model.state_dict(), fetched.state_dict())


def test_a_best_model_that_is_gone_is_warned_of(caplog):
    trainer = make_trainer(
        URL, eval_strategy="steps", eval_steps=2, save_total_limit=1, load_best_model_at_end=True, learning_rate=0.0
    )

    class Lose(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            from fsspec.implementations.memory import MemoryFileSystem

            if state.global_step == 8:
                MemoryFileSystem().rm("/bucket/run/checkpoint-2", recursive=True)
                shutil.rmtree(mirror_of(URL) / "checkpoint-2")

    trainer.add_callback(Lose())
    trainer.train()
    assert "the last model stays" in caplog.text


def test_what_verbs_write_is_published():
    trainer = make_trainer(save_strategy="no")
    trainer.train()
    assert listing() == []
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"loss": 1.0})
    names = ["all_results.json", "model.safetensors", "train_results.json", "trainer_state.json", "training_args.bin"]
    assert listing() == names
    assert json.loads(read("train_results.json")) == {"loss": 1.0}


def test_what_callbacks_write_is_published_with_the_checkpoints():
    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (mirror_of(URL) / "runs").mkdir(parents=True, exist_ok=True)
            (mirror_of(URL) / "runs" / "events").write_text(str(state.global_step))

    make_trainer(URL, Note(), max_steps=7).train()
    assert read("runs/events") == b"7"


def test_a_model_is_saved_to_another_url():
    trainer = make_trainer()
    trainer.save_model("memory://bucket/final")
    assert "model.safetensors" in listing("/bucket/final")
    assert listing() == []


def test_a_file_url_is_a_path(tmp_path):
    trainer = make_trainer(f"file://{tmp_path / 'out'}")
    assert trainer.output_dir == tmp_path / "out"
    trainer.train()
    assert (tmp_path / "out" / "checkpoint-8" / "manifest.json").exists()


def test_a_trial_has_its_own_remote_folder():
    set_seed(1)
    trainer = Trainer(
        model_init=Net, args=make_arguments(URL, save_strategy="steps", save_steps=2, max_steps=2),
        train_dataset=make_rows(22),
    )  # fmt: skip

    class Trial:
        """As much of Optuna's as a trial with given values needs."""

        def __init__(self) -> None:
            self.number, self.params = 3, {"learning_rate": 1e-3}

        def suggest_float(self, *args, **kwargs):
            return 1e-3

    trainer.train(trial=Trial())
    assert [name for name in listing() if name.endswith("manifest.json")] == ["run-3/checkpoint-2/manifest.json"]


def test_a_new_run_is_told_of_the_checkpoints_of_another(caplog):
    make_trainer().train()
    shutil.rmtree(mirror_of(URL))
    make_trainer(max_steps=2).train()
    assert "memory://bucket/run contains checkpoints of another run (checkpoint-2, checkpoint-4" in caplog.text


# -- what is refused, and what fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["s3:/bucket/run", "simplecache::s3://bucket/run", "nowhere://bucket/run"])
def test_a_folder_that_cannot_be_is_refused_at_once(folder):
    with pytest.raises(ConfigError, match="Cannot use the folder"):
        make_trainer(folder)


def test_a_missing_package_is_named_at_once(monkeypatch):
    import importlib
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(importlib.import_module("fsspec.registry"), "_registry", {})
    with pytest.raises(MissingDependencyError, match="pip install s3fs"):
        make_trainer("s3://bucket/run")


def test_a_store_that_refuses_writes_is_found_before_training(monkeypatch):
    failing(monkeypatch, "put_file", times=99, error=PermissionError("Access Denied"))
    trainer = make_trainer()
    with pytest.raises(ConfigError, match="Access Denied"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("save_async", [False, True])
def test_a_store_that_fails_while_training_ends_the_run_like_a_full_disk(monkeypatch, save_async):
    failing(monkeypatch, "put_file", times=99, error=OSError("gone"), only=lambda path: "checkpoint-4" in path)
    with pytest.raises(CheckpointError, match=r"Cannot upload checkpoint-4 to memory://bucket/run"):
        make_trainer(save_policy=SavePolicy(save_async=save_async)).train()
    assert saved() == ["checkpoint-2"]
    assert (mirror_of(URL) / "checkpoint-4" / "manifest.json").exists()


def test_saving_in_the_background_sends_nothing_in_the_main_thread(monkeypatch):
    class Write(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (mirror_of(URL) / "events").write_text(str(state.global_step))

        def on_train_end(self, args, state, control, **kwargs):
            monkeypatch.undo()

    sent = []
    put_file = MemoryFileSystem.put_file

    def watched(self, source, target, *args, **kwargs):
        sent.append((threading.current_thread() is threading.main_thread(), target.rpartition("/")[2]))
        return put_file(self, source, target, *args, **kwargs)

    trainer = make_trainer(URL, Write(), save_policy=SavePolicy(save_async=True))
    with monkeypatch.context() as monkeypatch:
        monkeypatch.setattr(MemoryFileSystem, "put_file", watched)
        trainer.train()
    assert (False, "events") in sent
    assert (False, "model.safetensors") in sent
    # What is asked before the first step is whether the folder can be written to.
    assert not {"events", "model.safetensors", "manifest.json"}.intersection(name for is_main, name in sent if is_main)
    assert read("events") == b"8"


def test_logs_that_cannot_be_published_end_nothing(monkeypatch, caplog):
    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (mirror_of(URL) / "events").write_text(str(state.global_step))

    failing(monkeypatch, "put_file", times=999, error=OSError("gone"), only=lambda path: path.endswith("events"))
    make_trainer(URL, Note()).train()
    assert "Cannot upload files to memory://bucket/run" in caplog.text
    assert "checkpoint-8" in saved()


@pytest.mark.parametrize("verb", [Trainer.save_model, Trainer.save_state])
def test_a_verb_that_cannot_publish_raises_and_leaves_its_files(monkeypatch, verb):
    trainer = make_trainer()
    failing(monkeypatch, "put_file", times=99, error=PermissionError("no"))
    with pytest.raises(CheckpointError, match=r"Cannot upload files to memory://bucket/run.*They are complete in"):
        verb(trainer)
    assert list(mirror_of(URL).iterdir())


def test_another_processes_leftovers_in_the_mirror_are_not_published():
    mirror_of(URL).mkdir(parents=True)
    (mirror_of(URL) / "model.safetensors").write_text("old")
    write("model.safetensors", b"newer")
    make_trainer().train()
    assert read("model.safetensors") == b"newer"
