"""Evaluations whose steps talk to the other processes: every process must take as many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hftrain.core.errors import ConfigError, explain
from hftrain.task.model_task import ModelTask
from hftrain.trainer.generating import generates

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer


class InStep:
    """Give a rank its batches, and keep it busy until every rank is done with theirs.

    Ranks hold different numbers of evaluation batches. A `prediction_step` that gathers over processes (downstream
    trainers do, through `trainer.accelerator`) would wait forever for one that has none left: such a rank repeats its
    last batch, and what comes of it is dropped.

    Args:
        loader: This rank's batches; other attributes are its own.
        trainer: Its strategy lets the ranks agree, once per batch.
        repeat: Runs a batch for nothing.
    """

    def __init__(self, loader: Any, trainer: Trainer, *, repeat: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._all_true = trainer.strategy.all_true
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
                explain(
                    "An evaluation was asked for: with an accelerator in use, or of a split model that generates.",
                    "Its steps may talk to other processes, and one of them has no batch to take part with.",
                    "Evaluate on at least one sample per process.",
                )
            )


def in_step(trainer: Trainer, loader: Any, *, loss_only: bool, ignore_keys: list[str] | None) -> Any:
    """Return the loader, made to keep the ranks in step where the steps may talk to each other.

    Raises:
        ConfigError: They may, and metrics are exchanged after each batch as well: two takes of turns, which uneven
            numbers of batches would mix up.
    """
    talks = trainer._accelerator is not None and isinstance(trainer.task, ModelTask)
    # A split model generates in step (`synced_gpus`).
    talks = talks or (trainer.strategy.shards_model and generates(trainer.args))
    if trainer.strategy.world_size == 1 or not talks:
        return loader
    if trainer.args.batch_eval_metrics and trainer.compute_metrics is not None and not loss_only:
        if any(map(trainer._is_overridden, ("prediction_step", "compute_loss"))):
            raise ConfigError(
                explain(
                    "batch_eval_metrics=True was asked for on several processes, with trainer.accelerator in use.",
                    f"{type(trainer).__name__} overrides the evaluation step, which may gather with it, and the "
                    "metrics are gathered after each batch too: processes with fewer batches would be waited for.",
                    "Leave batch_eval_metrics out, or gather with trainer.strategy in compute_metrics alone.",
                    batch_eval_metrics=True,
                )
            )
        # Only the metrics talk, and those take turns of their own.
        return loader
    return InStep(
        loader,
        trainer,
        repeat=lambda batch: trainer.prediction_step(trainer.task.model, batch, loss_only, ignore_keys),
    )
