"""What MLflow's client reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.trackers import logged, needs, train

from hftrain import ConfigError
from hftrain.loggers.base import RunFacts
from hftrain.loggers.mlflow import MLflowLogger

pytestmark = needs("mlflow")

# In a process of its own: the client keeps threads and files.
READ = """
import json, mlflow, sys
client = mlflow.MlflowClient()
found = []
for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
    names = ("train/loss", "eval/loss", "test/loss")
    series = {n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)] for n in names}
    found.append({
        "id": run.info.run_id, "name": run.info.run_name, "status": run.info.status, "params": run.data.params,
        "tags": run.data.tags, "experiment": client.get_experiment(run.info.experiment_id).name,
        "artifacts": [a.path for a in client.list_artifacts(run.info.run_id)], **series,
    })
json.dump(found, open("found.json", "w"))
"""


def read(folder: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    import json

    train(folder, env=env, script=READ)
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def test_run_is_read_back_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    env = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db",
        "MLFLOW_EXPERIMENT_NAME": "digits",
        "MLFLOW_TAGS": '{"release": "1"}',
        "MLFLOW_FLATTEN_PARAMS": "true",
        "HF_MLFLOW_LOG_ARTIFACTS": "1",
    }
    train(tmp_path, env=env, report_to="mlflow", save_strategy="epoch")
    (run,) = read(tmp_path, env)
    assert (run["name"], run["experiment"], run["status"]) == ("my run", "digits", "FINISHED")
    assert (run["params"]["learning_rate"], run["params"]["nested.depth"]) == ("0.01", "1")
    assert run["tags"]["release"] == "1"
    assert run["artifacts"] == ["checkpoint-2"]
    for name in ("loss", "eval_loss"):
        expected = [[step, pytest.approx(value)] for step, value in logged(tmp_path, name)]
        assert run[f"{'eval' if 'eval' in name else 'train'}/loss"] == expected
    assert len(run["test/loss"]) == 1

    # The length of the run is a parameter that MLflow does not let change; the first value stays.
    printed = train(tmp_path, env=env, report_to="mlflow", num_train_epochs=2, resume="out/checkpoint-2")
    assert "Tracker mlflow" not in printed
    (again,) = read(tmp_path, env)
    assert again["id"] == run["id"]
    assert [step for step, _ in again["train/loss"]] == [1, 2, 3, 4]


def test_run_that_is_gone_makes_a_new_one_and_says_so(tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db"}
    train(tmp_path, env=env, report_to="mlflow", save_strategy="steps", save_steps=1)
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/other.db"}
    printed = train(tmp_path, env=env, report_to="mlflow", resume="out/checkpoint-1")
    assert "Tracker mlflow cannot continue run" in printed
    assert "starts a new run for the resumed training" in printed
    (run,) = read(tmp_path, env)
    assert [step for step, _ in run["train/loss"]] == [2]


def test_run_id_and_nesting_follow_the_variables(tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db", "MLFLOW_NESTED_RUN": "true"}
    script = """
import mlflow, os
from hftrain import Trainer
from support.tiny import Net, make_arguments, make_rows
with mlflow.start_run(run_name="parent"):
    trainer = Trainer(Net(), make_arguments("out", report_to="mlflow"), train_dataset=make_rows(8))
    trainer.train()
    for callback in trainer.callback_handler.callbacks[1:-1]: callback.close()
    assert mlflow.active_run().info.run_name == "parent"
os.environ["MLFLOW_NESTED_RUN"] = "false"
os.environ["MLFLOW_RUN_ID"] = callback.run_id
trainer = Trainer(Net(), make_arguments("out", report_to="mlflow"), train_dataset=make_rows(8))
trainer.train()
"""
    train(tmp_path, env=env, script=script)
    runs = read(tmp_path, env)
    (parent,) = [run for run in runs if run["name"] == "parent"]
    (child,) = [run for run in runs if run["tags"].get("mlflow.parentRunId") == parent["id"]]
    assert len(runs) == 2
    assert len(child["train/loss"]) == 8


def test_run_ends_with_its_training_and_the_next_training_has_its_own(tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db"}
    script = """
import mlflow
from hftrain import Trainer
from support.tiny import Net, make_arguments, make_rows
rows, trainers = make_rows(8), []
for name in ("first", "second"):
    args = make_arguments(name, report_to="mlflow", run_name=name, num_train_epochs=1)
    trainers.append(Trainer(Net(), args, train_dataset=rows, eval_dataset=rows))
    trainers[-1].train()
    assert mlflow.active_run() is None, "open after the training"
    trainers[-1].evaluate()
    assert mlflow.active_run() is None, "open after the evaluation"
with mlflow.start_run(run_name="mine"):
    Trainer(Net(), make_arguments("third", report_to="mlflow"), train_dataset=rows).train()
    assert mlflow.active_run().info.run_name == "mine"
"""
    train(tmp_path, env=env, script=script)
    runs = {run["name"]: run for run in read(tmp_path, env)}
    assert {name: len(run["train/loss"]) for name, run in runs.items()} == {"first": 2, "second": 2, "mine": 4}
    assert {name: len(run["eval/loss"]) for name, run in runs.items()} == {"first": 1, "second": 1, "mine": 0}
    assert {run["status"] for run in runs.values()} == {"FINISHED"}


def test_tags_that_are_no_json_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TAGS", "release=1")
    monkeypatch.setattr("mlflow.active_run", lambda: type("Run", (), {"info": type("Info", (), {"run_id": "1"})})())
    with pytest.raises(ConfigError, match=r"MLFLOW_TAGS='release=1' is set. It is not a JSON object"):
        MLflowLogger().start(RunFacts(name="x"))
