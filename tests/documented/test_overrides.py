"""Subclasses that write files of their own, and that read their data themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.tiny import Net, make_arguments, make_rows
from torch.utils.data import DataLoader

from hftrain import Trainer


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


def test_columns_are_not_looked_at_where_the_subclass_reads_the_data(tmp_path: Path) -> None:
    class Reading(Trainer):
        def collate(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            texts = [row["text"] for row in rows]
            return {"x": torch.ones(len(texts), 4), "labels": torch.tensor([len(text) for text in texts])}

        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.collate)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=2, collate_fn=self.collate)

    rows = [{"text": "ab"}, {"text": "a"}] * 2
    args = make_arguments(tmp_path, eval_strategy="epoch", max_steps=2)
    trainer = Reading(Net(), args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
