"""Optimizers that train other weights than those to evaluate and save: which of the two the model holds when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def training_weights(optimizer: Any) -> Iterator[None]:
    """Let the model hold the weights to train, and those to evaluate afterwards. Mutates the parameters.

    Only optimizers with the methods ``train()`` and ``eval()`` keep two kinds.

    Source: Defazio et al., 2024, arXiv 2405.15682.
    """
    if not keeps_two(optimizer):
        yield
        return
    optimizer.train()
    try:
        yield
    finally:
        optimizer.eval()


@contextmanager
def evaluation_weights(optimizer: Any) -> Iterator[None]:
    """Let the model hold the weights to evaluate and save, and the former ones afterwards. Mutates the parameters."""
    if not (keeps_two(optimizer) and optimizer.param_groups[0].get("train_mode", False)):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


def keeps_two(optimizer: Any) -> bool:
    """Tell whether an optimizer trains other weights than those to evaluate and save."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
