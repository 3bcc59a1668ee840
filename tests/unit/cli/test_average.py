"""`hftrain average` writes the mean of checkpoints' weights, which loads as any saved model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import Net, make_trainer

from hftrain.cli.commands import main


def test_mean_of_checkpoints_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(Net().layers[0], torch.nn.BatchNorm1d(8))
    for step in (1, 2):
        torch.nn.init.constant_(model[0].weight, float(step))
        model[1].num_batches_tracked += 1
        make_trainer(tmp_path, model).save_model(str(tmp_path / str(step)))
    main(["average", str(tmp_path / "1"), str(tmp_path / "2"), "-o", str(tmp_path / "mean")])
    assert "2 checkpoints" in capsys.readouterr().out
    found = load_file(tmp_path / "mean" / "model.safetensors")
    assert torch.equal(found["0.weight"], torch.full((8, 4), 1.5))
    assert int(found["1.num_batches_tracked"]) == 2
    model.load_state_dict(found)
    with pytest.raises(SystemExit):
        main(["average", str(tmp_path / "1"), "-o", str(tmp_path / "mean")])
    make_trainer(tmp_path, Net()).save_model(str(tmp_path / "other"))
    with pytest.raises(SystemExit):
        main(["average", str(tmp_path / "1"), str(tmp_path / "other"), "-o", str(tmp_path / "no")])
    assert "other names or shapes" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
