"""Which weights the model holds when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hftrain.task.modes import evaluation_weights, training_weights


class TwoKinds(torch.optim.SGD):
    """Holds 1.0 to train and 2.0 to evaluate."""

    def train(self) -> None:
        self._hold(1.0, train_mode=True)

    def eval(self) -> None:
        self._hold(2.0, train_mode=False)

    def _hold(self, value: float, *, train_mode: bool) -> None:
        for group in self.param_groups:
            group["train_mode"] = train_mode
            nn.init.constant_(group["params"][0], value)


def test_weights_are_those_of_the_moment() -> None:
    weight = nn.Parameter(torch.zeros(()))
    optimizer = TwoKinds([weight], lr=0.1)
    with evaluation_weights(optimizer):
        assert weight.item() == 0.0
    with training_weights(optimizer):
        assert weight.item() == 1.0
        with evaluation_weights(optimizer):
            assert weight.item() == 2.0
            with evaluation_weights(optimizer):
                assert weight.item() == 2.0
        assert weight.item() == 1.0
    assert weight.item() == 2.0


def test_weights_are_to_evaluate_after_an_error() -> None:
    weight = nn.Parameter(torch.zeros(()))
    with pytest.raises(KeyboardInterrupt), training_weights(TwoKinds([weight], lr=0.1)):
        raise KeyboardInterrupt
    assert weight.item() == 2.0


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)])
def test_weights_of_other_optimizers_stay(optimizer: torch.optim.Optimizer | None) -> None:
    with training_weights(optimizer), evaluation_weights(optimizer):
        pass
