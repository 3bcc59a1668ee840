"""Predictions in files: what is written, what is read, and what predict() then leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.remote import URL, empty_store, listing
from support.tiny import Net, Stream, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, PredictionWriter, TaskError, Trainer, TrainerControl, TrainerState


def read_all(folder: Path, name: str = "outputs") -> torch.Tensor:
    return torch.cat([batch[name] for batch in PredictionWriter.read(folder)])


@pytest.mark.parametrize("batches_per_file", [1, 2, 64])
@pytest.mark.parametrize("is_stream", [False, True])
def test_files_hold_what_predict_would_return(tmp_path: Path, batches_per_file: int, is_stream: bool) -> None:
    rows: Any = make_rows(9)
    model, folder = Net(), tmp_path / "written"
    wanted = Trainer(model, make_arguments(tmp_path)).predict(rows)
    writer = PredictionWriter(folder, batches_per_file=batches_per_file)
    output = Trainer(model, make_arguments(tmp_path), callbacks=[writer]).predict(Stream(rows) if is_stream else rows)
    assert (output.predictions, output.label_ids) == (None, None)
    assert output.metrics["test_loss"] == wanted.metrics["test_loss"]
    assert read_all(folder).tolist() == wanted.predictions.tolist()
    assert read_all(folder, "labels").tolist() == wanted.label_ids.tolist()
    about = json.loads((folder / "rank0.json").read_text())
    assert about["num_batches"] == 3
    assert sorted(about["files"]) == sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(about["files"]) == -(-3 // batches_per_file)


def test_predictions_are_returned_on_request_and_where_metrics_need_them(tmp_path: Path) -> None:
    seen: list[int] = []
    for returns in (False, True):
        writer = PredictionWriter(tmp_path / "written", returns_predictions=returns)
        trainer = Trainer(
            Net(), make_arguments(tmp_path), callbacks=[writer],
            compute_metrics=lambda prediction: seen.append(len(prediction.predictions)) or {"f1": 1.0},
        )  # fmt: skip
        output = trainer.predict(make_rows(5))
        assert (output.predictions is not None) == returns
        assert output.metrics["test_f1"] == 1.0
    assert seen == [5, 5]


def test_cache_is_left_out(tmp_path: Path) -> None:
    writer, args = PredictionWriter(tmp_path), SimpleNamespace(process_index=0, world_size=1)
    outputs = {"logits": torch.ones(2, 3), "memory": SimpleNamespace(get_seq_length=lambda: 4)}
    writer.on_prediction_step(args, TrainerState(), TrainerControl(), outputs=outputs)
    writer.on_predict(args, TrainerState(), TrainerControl())
    (batch,) = PredictionWriter.read(tmp_path)
    assert list(batch) == ["outputs/logits"]


def test_next_prediction_replaces_the_files_and_evaluations_write_none(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "written", batches_per_file=1)
    trainer = Trainer(Net(), make_arguments(tmp_path), callbacks=[writer], eval_dataset=make_rows(8))
    trainer.evaluate()
    assert trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation").predictions.shape[0] == 8
    assert not (tmp_path / "written").exists()
    for number in (9, 3):
        trainer.predict(make_rows(number))
        assert len(read_all(tmp_path / "written")) == number
    assert len(list((tmp_path / "written").glob("*.safetensors"))) == 1


def test_prediction_that_failed_halfway_leaves_nothing_that_reads_as_whole(tmp_path: Path) -> None:
    class Fails(Net):
        calls = 0

        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            self.calls += 1
            if self.calls == 5:
                raise RuntimeError("broken")
            return super().forward(x, labels)

    writer = PredictionWriter(tmp_path / "written", batches_per_file=1)
    trainer = Trainer(Fails(), make_arguments(tmp_path), callbacks=[writer])
    trainer.predict(make_rows(9))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.predict(make_rows(9, seed=2))
    with pytest.raises(TaskError, match=r"rank0\.json is missing"):
        list(PredictionWriter.read(tmp_path / "written"))
    trainer.predict(make_rows(2))
    assert len(read_all(tmp_path / "written")) == 2


def test_nested_predictions_are_named_by_their_path(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return x * self.scale, {"a": (x, x[:, :1])}

    writer = PredictionWriter(tmp_path / "written")
    Trainer(Nested(), make_arguments(tmp_path), callbacks=[writer]).predict([{"x": torch.ones(3)}] * 5)
    first = next(PredictionWriter.read(tmp_path / "written"))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == {
        "outputs/0": (4, 3), "outputs/1/a/0": (4, 3), "outputs/1/a/1": (4, 1),
    }  # fmt: skip


def test_what_is_no_tensor_and_too_small_a_file_are_refused(tmp_path: Path) -> None:
    class Talks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            return {"text": "a", "x": x}

    with pytest.raises(TaskError, match="hold a str, and the files take tensors only"):
        Trainer(Talks(), make_arguments(tmp_path), callbacks=[PredictionWriter(tmp_path)]).predict(
            [{"x": torch.ones(3)}]
        )


def test_predictions_go_to_a_remote_folder_and_are_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with empty_store(monkeypatch, tmp_path / "cache"):
        trainer = Trainer(Net(), make_arguments(tmp_path), callbacks=[PredictionWriter(URL, batches_per_file=1)])
        for number in (9, 3):
            trainer.predict(make_rows(number))
            assert sum(len(batch["outputs"]) for batch in PredictionWriter.read(URL)) == number
        assert listing() == ["rank0-00000.safetensors", "rank0.json"]


def test_a_remote_folder_of_no_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsspec knows no store"):
        PredictionWriter("nowhere://bucket/predictions")
