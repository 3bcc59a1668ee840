"""Optimizers whose training weights differ from those to evaluate and save: switch between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def training_weights(optimizer: Any) -> AbstractContextManager[None]:
    """Give the model the training weights in the context, and the evaluation weights after it. Mutates the parameters.

    Only optimizers with the methods ``train()`` and ``eval()`` keep two sets of weights.

    Source: Defazio et al., 2024, arXiv 2405.15682.
    """
    return _between(optimizer.train, optimizer.eval) if keeps_two(optimizer) else nullcontext()


def evaluation_weights(optimizer: Any) -> AbstractContextManager[None]:
    """Give the model the evaluation weights in the context, and the previous ones after it. Mutates the parameters."""
    holds_others = keeps_two(optimizer) and optimizer.param_groups[0].get("train_mode", False)
    return _between(optimizer.eval, optimizer.train) if holds_others else nullcontext()


def keeps_two(optimizer: Any) -> bool:
    """Return whether an optimizer's training weights differ from those to evaluate and save."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextmanager
def _between(first: Callable[[], Any], last: Callable[[], Any]) -> Iterator[None]:
    first()
    try:
        yield
    finally:
        last()
