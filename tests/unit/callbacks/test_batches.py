"""Callbacks that ask for batch, outputs and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows

from hftrain import BatchCallback, Trainer


class Seen(BatchCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, event: str, batch: Any, outputs: Any, loss: torch.Tensor) -> None:
        self.seen.append((event, batch, outputs, loss))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("sub", kwargs["batch"], kwargs["outputs"], kwargs["loss"])

    def on_step_end(self, args: Any, state: Any, control: Any, batch: Any, outputs: Any, loss: Any, **_: Any) -> None:
        self.note("step", batch, outputs, loss)


def train(folder: Path, model: Any, *callbacks: Any) -> Trainer:
    args = make_arguments(folder, max_steps=2, gradient_accumulation_steps=2, logging_steps=1)
    trainer = Trainer(model, args, train_dataset=make_rows(16), callbacks=list(callbacks))
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [Net, Task])
def test_callbacks_get_what_the_micro_step_used_and_gave(tmp_path: Path, kind: Any) -> None:
    class Other(Seen):
        """A second one."""

    first, second = Seen(), Other()
    model = kind()
    trainer = train(tmp_path, model, first, second)
    assert [event for event, *_ in first.seen] == ["sub", "step"] * 2
    assert len(second.seen) == 4
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for number, (event, batch, outputs, loss) in enumerate(first.seen):
        assert batch["x"].shape == (4, 4)
        assert not loss.requires_grad
        assert outputs is not None
        if event == "step":
            assert float(loss + first.seen[number - 1][3]) == pytest.approx(logged[number // 2])
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_run_without_one_wraps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hftrain.extras.batches._Events.fire", lambda *_, **__: 1 / 0)
    train(tmp_path, Net())


def test_parts_of_a_model_that_is_not_called_have_no_outputs(tmp_path: Path) -> None:
    class Parts(Task):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model.layers(batch["x"]).square().mean()

    seen = Seen()
    train(tmp_path, Parts(), seen)
    assert [outputs for _, _, outputs, _ in seen.seen] == [None] * 4
