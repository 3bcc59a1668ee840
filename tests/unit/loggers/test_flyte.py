"""What a Flyte task that trains leaves behind, run locally."""

from __future__ import annotations

from pathlib import Path

from support.trackers import needs, train

pytestmark = needs("flytekit", "flytekitplugins", "transformers")

SCRIPT = """
from flytekit import current_context, task
from flytekit.core.checkpointer import SyncCheckpoint
from hftrain import Trainer
from support.tiny import Net, make_arguments, make_rows

@task
def fit() -> int:
    # A local task has no checkpoint of its own; this is what the platform gives one.
    type(current_context()).checkpoint = property(lambda self: store)
    args = make_arguments("out", report_to="flyte", save_strategy="epoch", num_train_epochs=1)
    trainer = Trainer(Net(), args, train_dataset=make_rows(8))
    trainer.train()
    return trainer.state.global_step

store = SyncCheckpoint(checkpoint_dest="synced")
print(fit())
"""


def test_task_saves_its_checkpoints(tmp_path: Path) -> None:
    train(tmp_path, script=SCRIPT)
    assert next((tmp_path / "synced").rglob("model.safetensors"))
