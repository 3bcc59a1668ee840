"""Weights that the optimizer trains and the model does not hold, such as a loss's, are saved and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.outside import Heads, OwnLoss
from support.resuming import StopAt, assert_same, check_resumes
from support.tiny import Net, make_arguments, make_rows
from torch import nn

from hftrain import CheckpointError, SavePolicy, Trainer, set_seed
from hftrain.run.trained_parameters import TrainedParameters


def make(folder: Path, *callbacks: Any, heads: nn.Module | None = None, save_async: bool = False) -> OwnLoss:
    set_seed(3)
    model, made = Net(), Heads()
    return OwnLoss(
        model, make_arguments(folder, max_steps=6), train_dataset=make_rows(), callbacks=list(callbacks),
        heads=made if heads is None else heads, save_policy=SavePolicy(save_async=save_async),
    )  # fmt: skip


@pytest.mark.parametrize("save_async", [False, True])
def test_weights_of_a_loss_are_resumed_to_the_bit(tmp_path: Path, save_async: bool) -> None:
    whole, resumed = check_resumes(partial(make, save_async=save_async), tmp_path, [4])
    assert_same(resumed.heads.state_dict(), whole.heads.state_dict())


def test_loss_with_other_weights_is_refused(tmp_path: Path) -> None:
    make(tmp_path, StopAt(2)).train()
    heads = Heads()
    heads.layers[2] = nn.Linear(3, 5)
    with pytest.raises(CheckpointError, match="are not those that were saved"):
        make(tmp_path, heads=heads).train(resume_from_checkpoint=True)


def test_checkpoint_without_weights_of_a_loss_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TrainedParameters, "state_dict", lambda *_: None)  # as versions before did
        make(tmp_path, StopAt(2)).train()
    with pytest.warns(UserWarning, match="does not hold 6 parameters that the optimizer trains"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_model_that_holds_all_weights_saves_no_others(tmp_path: Path) -> None:
    Trainer(Net(), make_arguments(tmp_path, max_steps=2, save_strategy="epoch"), train_dataset=make_rows()).train()
    assert not (tmp_path / "checkpoint-2" / "outside_weights.safetensors").exists()
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
