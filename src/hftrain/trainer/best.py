"""The best evaluation so far: what decides it, and a rehearsal that it will be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from hftrain.core.errors import ConfigError, explain, suggest
from hftrain.core.log import get_logger
from hftrain.trainer.checks import best_metric_key
from hftrain.trainer.eval_sets import own_metrics

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class _Silence:
    """Events that nobody hears, for rehearsals."""

    heard: frozenset[str] = frozenset()

    def fire(self, event: str, **extra: Any) -> None:
        """Tell nobody."""


class _Lenient:
    """Call `compute_metrics` and keep what it raises: whoever failed must not leave the others waiting."""

    def __init__(self, compute: Callable[..., dict[str, Any]]) -> None:
        self.error: Exception | None = None
        self._compute = compute

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return self._compute(*args, **kwargs)
        except Exception as error:
            self.error = error
            return {}


def note_best(trainer: Trainer, metrics: Mapping[str, Any]) -> bool:
    """Remember the best evaluation so far in the state, and tell whether this is it."""
    state, args = trainer.state, trainer.args
    if args.metric_for_best_model is None:
        return False
    value = read_metric(metrics, args.metric_for_best_model)
    best = state.best_metric
    # NaN is never better, and everything is better than NaN.
    is_better = best is None or best != best or (value > best if args.greater_is_better else value < best)
    is_better = is_better and value == value
    if is_better:
        state.best_metric, state.best_global_step = value, state.global_step
    return bool(is_better)


def read_metric(metrics: Mapping[str, Any], wanted: str) -> float:
    """Return the metric that picks the best model.

    Raises:
        ConfigError: The evaluation did not report it, or it is no number.
    """
    key = best_metric_key(wanted)
    if key not in metrics:
        raise ConfigError(
            explain(
                f"metric_for_best_model={wanted!r} was asked for.",
                f"An evaluation reported no {key!r}.",
                f"Available: {', '.join(sorted(metrics))}. {suggest(key, metrics)}",
                metric_for_best_model=wanted,
            )
        )
    try:
        return float(metrics[key])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            explain(
                f"metric_for_best_model={wanted!r} was asked for.",
                f"An evaluation reported {key!r} as a {type(metrics[key]).__name__}, which is no single number.",
                "Let compute_metrics return a number under that name, or choose another metric.",
                **{key: metrics[key]},
            )
        ) from error


def rehearse_best_metric(trainer: Trainer, *, ignore_keys: list[str] | None) -> None:
    """Evaluate one batch to see that the metric that picks the best model exists, before hours are spent."""
    wanted = trainer.args.metric_for_best_model
    datasets = trainer.eval_dataset
    if wanted is None or trainer.args.eval_strategy == "no" or best_metric_key(wanted) == "eval_loss":
        return
    if trainer._adds_metrics:
        return
    names = list(datasets) if isinstance(datasets, Mapping) else [None]
    found: dict[str, Any] = {}
    with trainer._evaluating("eval"):
        for name in names:
            loader = trainer._sharded(trainer.get_eval_dataloader(name), is_training=False)
            with own_metrics(trainer, trainer._eval_sets.get(name or "")):
                lenient = None if trainer.compute_metrics is None else _Lenient(trainer.compute_metrics)
                trainer.compute_metrics = lenient
                loop = trainer._evaluate_loop(
                    loss_only=trainer.compute_metrics is None, ignore_keys=ignore_keys, events=_Silence()
                )
            metrics = loop.run(islice(iter(loader), 1)).metrics
            error = None if lenient is None else lenient.error
            if not trainer.strategy.all_true(error is None):
                # One batch may lack what a metric needs (a second class, say): the full evaluation decides.
                logger.warning(
                    "The rehearsal of metric_for_best_model on one batch failed: %s",
                    repr(error) if error else "in another process",
                )
                return
            prefix = "eval" if name is None else f"eval_{name}"
            found.update({key if key.startswith(prefix) else f"{prefix}_{key}": v for key, v in metrics.items()})
    read_metric(found, wanted)
