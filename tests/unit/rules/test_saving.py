"""What no checkpoint can hold is said before the work, and not after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.tiny import MapRows, Net, make_arguments, make_rows
from torch.optim.lr_scheduler import StepLR

from hftrain import CheckpointError, Trainer, TrainerCallback


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.num = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num += 1


class OddSchedule(StepLR):
    """Keeps a function, which torch's state_dict of a schedule does not leave out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.shape = lambda step: step
        super().__init__(optimizer, 2)


class OddState(torch.optim.SGD):
    """Makes a state in its first step that cannot be saved."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["seen"] = range(3)


class OddData(MapRows):
    """A dataset with a state that cannot be saved."""

    def state_dict(self) -> Any:
        return {"rows": range(3)}

    def load_state_dict(self, state: Any) -> None: ...


def make(
    folder: Path, callbacks: Any = (), *, optimizer: type, schedule: Any = None, data: Any = None, **options: Any
) -> Any:
    model = Net()
    made = optimizer(model.parameters(), lr=options.pop("lr", 0.1))
    args = make_arguments(folder, **{"save_strategy": "epoch", "max_steps": 3, **options})
    optimizers = (made, schedule and schedule(made))
    return Trainer(model, args, train_dataset=data or make_rows(), callbacks=list(callbacks), optimizers=optimizers)


SGD = torch.optim.SGD
ROW = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "schedule": ({"optimizer": SGD, "schedule": OddSchedule}, 0),
    "data": ({"optimizer": SGD, "data": OddData(make_rows())}, 0),
    "setting": ({"optimizer": SGD, "lr": numpy.float32(0.1)}, 0),
    # Its state is there after the first step.
    "optimizer": ({"optimizer": OddState}, 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("setting", [{"save_strategy": "no"}, {"save_only_model": True}], ids=str)
def test_state_that_is_not_saved_may_be_anything(tmp_path: Path, name: str, setting: dict[str, Any]) -> None:
    options, _ = CASES[name]
    assert make(tmp_path, **options, **setting).train().global_step == 3


def test_model_state_is_looked_at_in_either_format(tmp_path: Path) -> None:
    class Extra(Net):
        def get_extra_state(self) -> Any:
            return range(3)

        def set_extra_state(self, state: Any) -> None: ...

    for safe in (True, False):
        args = make_arguments(tmp_path, save_strategy="epoch", save_safetensors=safe)
        with pytest.raises(CheckpointError, match="extra_state"):
            Trainer(Extra(), args, train_dataset=make_rows()).train()
    assert not any(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("fault", ["generation config", "shared tensors"])
def test_model_of_transformers_that_does_not_save_is_refused_at_the_start(tmp_path: Path, fault: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 8, "n_positions": 8}
    model, steps = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), Steps()
    if fault == "shared tensors":
        model.transformer.h[1].mlp = model.transformer.h[0].mlp
    else:
        model.generation_config.top_k = -3
    trainer = Trainer(model, make_arguments(tmp_path, save_strategy="epoch"), train_dataset=[ROW], callbacks=[steps])
    with pytest.raises(CheckpointError, match=f"(?i)Cannot save this GPT2LMHeadModel.*{fault.replace(' ', ' ?')}"):
        trainer.train()
    assert steps.num == 0


def test_model_of_a_type_that_the_format_lacks_is_refused_at_the_start(tmp_path: Path) -> None:
    model, steps = Net(), Steps()
    model.register_buffer("waves", torch.zeros(2, dtype=torch.complex128))
    args = make_arguments(tmp_path, save_strategy="epoch")
    with pytest.raises(CheckpointError, match=r"Cannot save .*waves.*save_safetensors=False"):
        Trainer(model, args, train_dataset=make_rows(), callbacks=[steps]).train()
    assert steps.num == 0
    args = make_arguments(tmp_path, save_strategy="epoch", save_safetensors=False, max_steps=1)
    assert Trainer(model, args, train_dataset=make_rows()).train().global_step == 1
