"""Evaluations whose steps talk to the other processes: every process must take as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hftrain.core.errors import ConfigError


class InStep:
    """Give a rank its batches, and keep it busy until every rank is done with theirs.

    Ranks hold different numbers of evaluation batches. A `prediction_step` that gathers over processes (downstream
    trainers do, through `trainer.accelerator`) would wait forever for one that has none left: such a rank repeats its
    last batch, and what comes of it is dropped.

    Args:
        loader: This rank's batches; other attributes are its own.
        all_true: Lets the ranks agree, once per batch.
        repeat: Runs a batch for nothing.
    """

    def __init__(self, loader: Any, *, all_true: Callable[[bool], bool], repeat: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._all_true = all_true
        self._repeat = repeat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches; collective before each.

        Raises:
            ConfigError: Some rank has no batch at all.
        """
        last: Any = None
        for batch in self._loader:
            if last is None:
                self._require(True)
            # A copy, because a step may pop from what it is given.
            last = dict(batch) if isinstance(batch, Mapping) else batch
            self._all_true(False)
            yield batch
        if last is None:
            self._require(False)
        while not self._all_true(True):
            self._repeat(dict(last) if isinstance(last, Mapping) else last)

    def _require(self, has_batch: bool) -> None:
        if not self._all_true(has_batch):
            raise ConfigError(
                "An evaluation was asked for: with an accelerator in use, or of a split model that generates.",
                "Its steps may talk to other processes, and one of them has no batch to take part with.",
                "Evaluate on at least one sample per process.",
            )


def check_turns(kind: type, *, is_overridden: bool) -> None:
    """Refuse steps that may talk to other processes where metrics are exchanged after each batch as well.

    Args:
        kind: The Trainer's class.
        is_overridden: Whether it overrides the evaluation step.

    Raises:
        ConfigError: It does: two takes of turns, which uneven numbers of batches would mix up.
    """
    if is_overridden:
        raise ConfigError(
            "batch_eval_metrics=True was asked for on several processes, with trainer.accelerator in use.",
            f"{kind.__name__} overrides the evaluation step, which may gather with it, and the "
            "metrics are gathered after each batch too: the others would wait for processes with fewer batches.",
            "Leave batch_eval_metrics out, or gather with trainer.strategy in compute_metrics alone.",
            batch_eval_metrics=True,
        )
