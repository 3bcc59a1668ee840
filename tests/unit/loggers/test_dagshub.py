"""DagsHub: MLflow on its server. Only a local MLflow store and a stand-in for the upload can run here."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trackers import needs, train

from hftrain import ConfigError
from hftrain.loggers.base import RunFacts
from hftrain.loggers.mlflow import DagsHubLogger

pytestmark = needs("dagshub", "mlflow")

SCRIPT = """
import dagshub.upload, json, mlflow, os
uploads = []
class Repo:
    def __init__(self, **names): self.names = names
    def directory(self, path): self.path = path; return self
    def add_dir(self, folder, commit_message): uploads.append([self.names, self.path, sorted(os.listdir(folder))])
dagshub.upload.Repo = Repo  # the real one talks to dagshub.com
from hftrain import Trainer
from support.tiny import Net, make_arguments, make_rows
args = make_arguments("out", report_to="dagshub", save_strategy="epoch", num_train_epochs=1)
trainer = Trainer(Net(), args, train_dataset=make_rows(8))
trainer.add_callback(type("Late", (), {"on_train_begin": lambda self, *a, **k: os.environ.update(
    MLFLOW_TRACKING_URI="https://dagshub.com/me/digits.mlflow")}))
trainer.train()
run = mlflow.last_active_run()  # it has ended with the training
((names, path, files),) = uploads
assert names == {"owner": "me", "name": "digits", "branch": "side"} and path == "artifacts/net", uploads
assert "model.safetensors" in files
mlflow.set_tracking_uri(os.environ["STORE"])
losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
assert [m.step for m in losses] == [1, 2], losses
print("HELD")
"""


def test_run_goes_to_mlflow_and_the_model_to_the_repository(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/runs.db"
    env = {"MLFLOW_TRACKING_URI": store, "STORE": store, "BRANCH": "side"}
    env |= {"HF_DAGSHUB_LOG_ARTIFACTS": "true", "HF_DAGSHUB_MODEL_NAME": "net"}
    # The address changes once the run is open, so that the real MLflow writes to a store of this machine.
    script = SCRIPT.replace(
        "from hftrain import Trainer", f"mlflow.set_tracking_uri({store!r})\nfrom hftrain import Trainer"
    )
    assert "HELD" in train(tmp_path, env=env, script=script)


def test_start_without_a_repository_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI does not say which repository"):
        DagsHubLogger().start(RunFacts(name="x"))
