"""Subclasses as the documentation shows them, in both generations of signatures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer


def run(kind: type[Trainer], folder: Path, **options: Any) -> Trainer:
    trainer = kind(Net(), make_arguments(folder, **options), train_dataset=make_rows(), eval_dataset=make_rows(5))
    trainer.train()
    trainer.evaluate()
    trainer.predict(make_rows(3))
    return trainer


HOOKS = (
    "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "log", "create_optimizer_and_scheduler",
    "create_optimizer", "create_scheduler", "compute_loss", "training_step", "prediction_step", "evaluate", "predict",
    "evaluation_loop", "get_batch_samples", "save_model", "compute_loss_context_manager", "get_decay_parameter_names",
    "_prepare_inputs", "_get_train_sampler", "_get_eval_sampler", "_save_checkpoint", "_save",
    "set_initial_training_values", "get_optimizer_cls_and_kwargs",
)  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_called_through_the_instance(tmp_path: Path, hook: str) -> None:
    calls = []
    is_static = hook == "get_optimizer_cls_and_kwargs"

    def override(*args: Any, **kwargs: Any) -> Any:
        calls.append(hook)
        return getattr(Trainer, hook)(*args, **kwargs)

    kind = type("Overriding", (Trainer,), {hook: staticmethod(override) if is_static else override})
    run(kind, tmp_path, max_steps=2, eval_strategy="epoch", save_strategy="epoch")
    assert calls


def test_files_written_into_the_folder_of_a_checkpoint_before_it_is_saved_stay(tmp_path: Path) -> None:
    class WritesFirst(Trainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            (folder / "more").mkdir(parents=True, exist_ok=True)
            (folder / "tokens_state.json").write_text(str(self.state.global_step))
            (folder / "more" / "note.txt").write_text("kept")
            super()._save_checkpoint(model, trial)

    arguments = make_arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    trainer = WritesFirst(Net(), arguments, train_dataset=make_rows())
    trainer.train()
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "tokens_state.json").read_text() == str(step)
        assert (folder / "more" / "note.txt").read_text() == "kept"
        assert (folder / "model.safetensors").exists()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
