"""`hftrain checkpoints`, on folders that real runs have left."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import Task, make_arguments, make_rows

from hftrain import ConfigError, Trainer
from hftrain.cli.checkpoints import show_checkpoints
from hftrain.cli.commands import main


def train(folder: Path, **settings: object) -> None:
    arguments = make_arguments(folder, max_steps=3, save_strategy="steps", save_steps=1, **settings)
    Trainer(Task(), arguments, train_dataset=make_rows(8)).train()


def test_checkpoints_are_listed_with_what_is_wrong_and_what_a_resume_takes(tmp_path: Path) -> None:
    train(tmp_path)
    lines = show_checkpoints(tmp_path)
    assert lines[0].split() == ["checkpoint", "step", "epochs", "size", "state"]
    assert [line.split()[:2] for line in lines[1:4]] == [[f"checkpoint-{n}", str(n)] for n in (1, 2, 3)]
    assert all(line.endswith("complete") for line in lines[1:4])
    # Batches of 4 of 8 samples.
    assert [line.split()[2] for line in lines[1:4]] == ["0.50", "1.00", "1.50"]
    assert lines[-1] == "resume_from_checkpoint=True takes checkpoint-3."
    weights = tmp_path / "checkpoint-3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert show_checkpoints(tmp_path)[3].endswith("complete"), "of the same size"
    lines = show_checkpoints(tmp_path, should_verify=True)
    assert "damaged: " in lines[3]
    assert "Its SHA-256 differs from the one in the manifest" in lines[3]
    assert lines[2].endswith("verified")
    assert lines[-1] == "resume_from_checkpoint=True takes checkpoint-2."
    weights.unlink()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    lines = show_checkpoints(tmp_path)
    for what in ("It has 0 bytes instead of", "It cannot be found", "manifest.json"):
        assert what in "\n".join(lines)
    assert lines[-1] == "resume_from_checkpoint=True finds no complete checkpoint."


def test_weights_alone_are_told(tmp_path: Path) -> None:
    train(tmp_path, save_only_model=True)
    lines = show_checkpoints(tmp_path)
    assert lines[-3].endswith("weights only")
    assert lines[-1].endswith("checkpoint-3, which cannot be resumed: save_only_model=True saved it.")


def test_folder_without_checkpoints_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoints", str(folder)])
        out, error = capsys.readouterr()
        assert (ended.value.code, out, error.count("\n")) == (1, "", 1)
        assert error.startswith(f"hftrain checkpoints: Cannot list the checkpoints of '{folder}'. ")
        with pytest.raises(ConfigError):
            main(["--debug", "checkpoints", str(folder)])
    with pytest.raises(ConfigError, match=r"'memory://run'. It is a URL"):
        main(["--debug", "checkpoints", "memory://run"])
