"""DagsHub: MLflow on its server. Only a local MLflow store and a stand-in for the upload can run here."""

from __future__ import annotations

from pathlib import Path

from support.trackers import needs, train

pytestmark = needs("dagshub", "mlflow", "transformers")

SCRIPT = """
import dagshub.upload, mlflow, os
uploads = []
class Repo:
    def __init__(self, **names): self.names = names
    def directory(self, path): self.path = path; return self
    def add_dir(self, folder, **options): uploads.append([self.names, self.path, sorted(os.listdir(folder))])
dagshub.upload.Repo = Repo  # the real one talks to dagshub.com
from hftrain import Trainer
from support.tiny import Net, make_arguments, make_rows
args = make_arguments("out", report_to="dagshub", save_strategy="epoch", num_train_epochs=1)
Trainer(Net(), args, train_dataset=make_rows(8)).train()
((names, path, files),) = uploads
assert names == {"owner": "me", "name": "digits", "branch": "side"} and path == "artifacts", uploads
assert "checkpoint-2" in files
losses = mlflow.MlflowClient().get_metric_history(mlflow.last_active_run().info.run_id, "loss")
assert [m.step for m in losses] == [1, 2], losses
print("HELD")
"""


def test_run_goes_to_mlflow_and_the_model_to_the_repository(tmp_path: Path) -> None:
    (tmp_path / "me").mkdir()
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/me/digits.db", "BRANCH": "side"}
    env |= {"HF_DAGSHUB_LOG_ARTIFACTS": "true"}
    assert "HELD" in train(tmp_path, env=env, script=SCRIPT)
