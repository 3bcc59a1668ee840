"""GradientAccumulationScheduler: the updates of a plain loop, exact resumes, refused where it cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Stream, make_arguments, make_rows

from hftrain import ConfigError, GradientAccumulationScheduler, StrategyError, Trainer, set_seed
from hftrain.core.types import Owns
from hftrain.strategies import SingleDeviceStrategy

SCHEDULE = {0: 1, 2: 3, 5: 2}
# Micro-batches of each update; 7 batches make a pass, whose last update takes what is left (the fourth).
SIZES = [1, 1, 3, 2, 3, 2, 2, 2, 2, 2]


def make(
    folder: Path, *callbacks: Any, schedule: Any = SCHEDULE, data: Any = None, kind: Any = Trainer, **options: Any
) -> Any:
    set_seed(3)
    strategy = options.pop("strategy", None)
    arguments = {"max_steps": len(SIZES), "gradient_accumulation_steps": 3, "max_grad_norm": 0.0, **options}
    return kind(
        Net().double(),
        make_arguments(folder, **arguments),
        train_dataset=data or [{**row, "x": row["x"].double()} for row in make_rows(28)],
        callbacks=[GradientAccumulationScheduler(schedule), *callbacks],
        **({"strategy": strategy} if strategy else {}),
    )


class Noting(Trainer):
    """Note the micro-batches of each update."""

    windows: list[list[Any]]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        taken = super().get_batch_samples(*args, **kwargs)
        self.windows += [taken[0]] if taken[0] else []
        return taken


def test_updates_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    trainer = make(tmp_path, kind=Noting, optim="sgd")
    trainer.windows = []
    model = Net().double()
    model.load_state_dict(trainer.model.state_dict())
    trainer.train()
    assert [len(window) for window in trainer.windows] == SIZES
    for step, window in enumerate(trainer.windows):
        loss, _ = model(*(torch.cat([batch[name] for batch in window]) for name in ("x", "labels")))
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= 1e-2 * (1 - step / len(SIZES)) * gradient
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_stream_is_scheduled_too(tmp_path: Path) -> None:
    rows = [{**row, "x": row["x"].double()} for row in make_rows(28)]
    trainer = make(tmp_path, data=Stream(rows))
    trainer.train()
    assert trainer.state.global_step == len(SIZES)


class Engine(SingleDeviceStrategy):
    owns = Owns.ACCUMULATION


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"schedule": {5: 2}}, ConfigError, "first of which is 0"),
        ({"schedule": {0: 0}}, ConfigError, "at least 1"),
        ({"schedule": {}}, ConfigError, "0: 1"),
        ({"gradient_accumulation_steps": 4}, ConfigError, "gradient_accumulation_steps=3"),
        ({"max_steps": -1}, ConfigError, "max_steps"),
        ({"strategy": Engine()}, StrategyError, "accumulates"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(options: Any, kind: type[Exception], told: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=told):
        make(tmp_path, **options).train()
