"""What a Flyte task that trains leaves behind, run locally."""

from __future__ import annotations

from pathlib import Path

from support.trackers import needs, train

pytestmark = needs("flytekit")

SCRIPT = """
from flytekit import FlyteContextManager, current_context, task
from flytekit.core.checkpointer import SyncCheckpoint
from hftrain import FlyteCallback, Trainer
from support.tiny import Net, make_arguments, make_rows

@task(enable_deck=True)
def fit() -> int:
    args = make_arguments("out", report_to="flyte", save_strategy="epoch", num_train_epochs=1)
    trainer = Trainer(Net(), args, train_dataset=make_rows(8))
    # A local task has no checkpoint of its own; this is what the platform gives one.
    context = current_context()
    type(context).checkpoint = property(lambda self: store)
    trainer.train()
    return trainer.state.global_step

store = SyncCheckpoint(checkpoint_dest="synced")
print(fit(), [deck.name for deck in current_context().decks])
for deck in current_context().decks:
    if deck.name == "Log History":
        print(deck.html)
"""


def test_task_shows_its_log_and_saves_its_checkpoints(tmp_path: Path) -> None:
    printed = train(tmp_path, script=SCRIPT)
    assert "<th>train/loss</th>" in printed
    assert (tmp_path / "synced" / "checkpoint-2" / "model.safetensors").exists() or (
        tmp_path / "synced" / "model.safetensors"
    ).exists()


def test_run_outside_a_task_goes_on_without_its_checkpoints(tmp_path: Path) -> None:
    printed = train(tmp_path, report_to="flyte", save_strategy="epoch")
    assert "Tracker flyte failed (log_artifact): NotImplementedError" in printed
