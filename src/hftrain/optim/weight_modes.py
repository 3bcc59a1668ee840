"""Optimizers that train other weights than those to evaluate and save: which of the two the model holds when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def training_weights(optimizer: Any) -> AbstractContextManager[None]:
    """Let the model hold the weights to train, and those to evaluate afterwards. Mutates the parameters.

    Only optimizers with the methods ``train()`` and ``eval()`` keep two kinds.

    Source: Defazio et al., 2024, arXiv 2405.15682.
    """
    return _between(optimizer.train, optimizer.eval) if keeps_two(optimizer) else nullcontext()


def evaluation_weights(optimizer: Any) -> AbstractContextManager[None]:
    """Let the model hold the weights to evaluate and save, and the former ones afterwards. Mutates the parameters."""
    holds_others = keeps_two(optimizer) and optimizer.param_groups[0].get("train_mode", False)
    return _between(optimizer.eval, optimizer.train) if holds_others else nullcontext()


def keeps_two(optimizer: Any) -> bool:
    """Tell whether an optimizer trains other weights than those to evaluate and save."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextmanager
def _between(first: Callable[[], Any], last: Callable[[], Any]) -> Iterator[None]:
    first()
    try:
        yield
    finally:
        last()
