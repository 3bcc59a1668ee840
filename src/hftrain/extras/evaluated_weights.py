"""`evaluate(ckpt=...)` and `predict(ckpt=...)`: run on a checkpoint's weights, then put the live ones back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hftrain.core.errors import CheckpointError, ConfigError, HFTrainError
from hftrain.core.types import Owns
from hftrain.run.parts import TrainerHooks
from hftrain.run.plan import AUTO, find_resume
from hftrain.task.modes import evaluation_weights
from hftrain.trainer.parts import TrainerParts


@contextmanager
def other_weights(
    trainer: TrainerHooks, parts: TrainerParts, ckpt: str | Path | None, *, stage: str, weights: str
) -> Iterator[None]:
    """Give the model a checkpoint's weights, or the live ones, in a stage, and its own after it. Collective.

    Args:
        ckpt: ``"best"``, ``"last"`` or a folder; None for the weights that train.
        stage: ``"eval"`` or ``"predict"``.

    Raises:
        ConfigError: An engine holds the weights, a callback evaluates averages, or has left them in the model.
    """
    events, is_engine = trainer.callback_handler, Owns.STEP in trainer.strategy.owns
    has_average = weights == "average" and bool(events.at_point("evaluation_weights"))
    if weights not in ("average", "live") or has_average or (ckpt is not None and is_engine):
        raise ConfigError(
            f"Cannot use ckpt={ckpt and str(ckpt)!r}, weights={weights!r} with strategy={trainer.strategy.name!r}"
            f"{' and a callback that averages weights' * has_average}.",
            "weights is 'average' or 'live'; only a resume restores the averages of a checkpoint; and an engine keeps "
            "copies of the weights, which could not be put back exactly.",
            "Pass weights='live', or load the checkpoint into a model and Trainer of its own.",
        )
    has_left = any(getattr(callback, "has_left_average", False) for callback in events.callbacks)
    if weights == "live" and ckpt is None and has_left:
        raise ConfigError(
            "Cannot evaluate with weights='live' after the training.",
            "The model has the averages now, and only checkpoints the weights that trained.",
            "Pass ckpt='last', too, or leave both out.",
        )
    modes = evaluation_weights(trainer.optimizer)
    with parts.activity.running(stage), modes, events.evaluation_weights(live=True):
        if ckpt is None:
            yield
            return
        folder = _find_checkpoint(trainer, parts, ckpt)
        parts.activity.place()  # before the weights come: a conversion would round them, and a move leave them behind
        tensors = [tensor.detach() for tensor in (*trainer.task.parameters(), *trainer.task.buffers())]
        saved = [tensor.clone() for tensor in tensors]
        try:
            parts.hooks.load_from_checkpoint(str(folder))
            yield
        finally:
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


def _find_checkpoint(trainer: TrainerHooks, parts: TrainerParts, ckpt: str | Path) -> Path:
    """Return the checkpoint's folder on this machine; the main process finds and verifies it. Collective."""
    best, path, problem = trainer.state.best_model_checkpoint, None, None
    # By name, because the folder of the run may have been moved since.
    request = {"last": AUTO, "best": Path(best).name if best else False}.get(str(ckpt), str(ckpt))
    try:
        path = find_resume(trainer, parts.hooks, parts.output, request)
        if path is None and trainer.strategy.is_main:
            raise CheckpointError(
                f"Cannot evaluate ckpt={ckpt!r}.",
                f"There is no {ckpt} checkpoint in {str(parts.output.folder)!r}.",
                "Save one (save_strategy; for the best one also metric_for_best_model), or pass its path.",
            )
    except HFTrainError as error:
        problem = error
    if reason := trainer.strategy.broadcast_object(problem and str(problem)):
        raise problem or CheckpointError(reason)
    folder = parts.output.share(path, is_on_each_node=trainer.args.save_on_each_node)
    assert folder is not None
    return folder
