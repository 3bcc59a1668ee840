"""What a run hands to its loop, which features it uses that a loop may not support, and the loops' states."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from hftrain.adapter.sharing import syncs_each_batch
from hftrain.checkpoint.policy import SavePolicy
from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.core.types import Owns
from hftrain.loops.contract import Loop
from hftrain.loops.fit import Feed, FitConfig, FitHooks, FitParts
from hftrain.precision.base import Precision
from hftrain.step.stepper import Stepper
from hftrain.strategies.base import Strategy
from hftrain.trainer.fitting import MicroBatches, found_size
from hftrain.trainer.setup import empty_cache

if TYPE_CHECKING:
    from hftrain.trainer.session import TrainSession

logger = get_logger(__name__)


def fit_parts(session: TrainSession, config: FitConfig, stepper: Stepper) -> FitParts:
    """Return what the training loop works with."""
    trainer, strategy = session.trainer, session.trainer.strategy
    take, step = trainer._shares.take, trainer._slot_training_step
    if trainer.args.auto_find_batch_size is True:
        fitting = MicroBatches(
            training_step=step,
            shares=trainer._shares,
            owner=type(trainer).__name__,
            strategy=strategy,
            task=trainer.task,
            model=trainer.model,
            state=trainer.state,
            logs=session.logs,
            size=found_size(trainer.args, session.resume),
        )
        take, step = fitting.take, fitting.step

    def make_feed(dataset: Any) -> Feed:
        before, trainer.train_dataset = trainer.train_dataset, dataset
        try:
            return session.open_data()
        finally:
            trainer.train_dataset = before

    hooks = FitHooks(
        get_batch_samples=session.salvage.watching(session.counts.watching(take)),
        training_step=step,
        before_epoch=session.before_epoch,
        restore_rng=session.restore_rng,
        log=session.log,
        evaluate=session.evaluate,
        save=session.save_now,
        empty_cache=empty_cache,
        make_feed=make_feed,
        evaluate_on=lambda dataset, prefix: trainer.evaluate(dataset, session.ignore_keys, prefix),
        act=session.step_end.run if trainer._is_overridden("_maybe_log_save_evaluate") else None,
        mark_sync=trainer._note_sync if config.accumulation > 1 else None,
    )
    return FitParts(
        config=config,
        hooks=hooks,
        feed=session.checkpoints.feed,
        dataset=trainer.train_dataset,
        stepper=stepper,
        model=trainer.model_wrapped,
        optimizer=session.optimizer,
        schedule=None if isinstance(trainer.lr_scheduler, ReduceLROnPlateau) else trainer.lr_scheduler,
        no_sync=nullcontext if syncs_each_batch(trainer.args) else strategy.no_sync,
        device=strategy.device,
        progress=session.progress,
        state=trainer.state,
        control=trainer.control,
        events=trainer.callback_handler,
        losses=session.losses,
        pending=session.pending,
    )


def used_in_training(
    args: Any, strategy: Strategy, precision: Precision, policy: SavePolicy, *, dataset: Any, resume: Any
) -> dict[str, str]:
    """Return the features that a training uses, of those that a loop may not support, each with what was asked for.

    Args:
        args: The training arguments.
        strategy, precision: As chosen.
        policy: When the run saves besides what the arguments say.
        dataset: What to train on; None where a loader is overridden.
        resume: The checkpoint to go on from, if any.
    """
    saves_by_clock = f"SavePolicy(every_s={policy.every_s})"
    has_length = dataset is not None and not isinstance(dataset, IterableDataset)
    asked = {
        "accumulation": (
            args.gradient_accumulation_steps > 1,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}",
        ),
        "auto_find_batch_size": (
            bool(args.auto_find_batch_size),
            f"{args.auto_find_batch_size=}".removeprefix("args."),
        ),
        "engines": (bool(strategy.owns & (Owns.BACKWARD | Owns.STEP)), f"strategy={strategy.name!r}"),
        "loss_scaling": (precision.policy.name == "fp16", "precision='fp16'"),
        "ranks": (strategy.world_size > 1, f"{strategy.world_size} processes"),
        "resume": (resume is not None, "resume_from_checkpoint"),
        "saving": (args.save_strategy != "no", f"save_strategy={str(args.save_strategy)!r}"),
        "sharded_models": (strategy.shards_model, f"strategy={strategy.name!r}"),
        "signals": (
            policy.on_signal or policy.every_s is not None,
            "SavePolicy(on_signal=True), the default," if policy.on_signal else saves_by_clock,
        ),
        "streams": (not has_length, "a stream" if dataset is not None else "an overridden get_train_dataloader"),
    }
    return {feature: text for feature, (is_used, text) in asked.items() if is_used}


class LoopStates:
    """The states of a Trainer's own loops, as one part of what each process saves.

    A fit loop is given its state once it is attached.

    Args:
        loops: By stage.
    """

    def __init__(self, loops: Mapping[str, Loop[Any]]) -> None:
        self._loops = loops
        self._waiting: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the states that there are, by stage."""
        ready = {stage: loop for stage, loop in self._loops.items() if stage != "fit" or loop.is_attached}
        states = {stage: loop.state_dict() for stage, loop in ready.items()}
        return {stage: state for stage, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; a checkpoint from before there were loops has none.

        Raises:
            CheckpointError: The run was trained by a loop with a state, and this one has no such loop.
        """
        for stage, state in states.items():
            loop = self._loops.get(stage)
            if loop is None or not loop.keeps_state:
                if stage == "fit":
                    raise CheckpointError(
                        "Cannot go on from this checkpoint:",
                        "the loop that it was trained with has a state, which this Trainer's loop does not take.",
                        "Pass the same loop=, or start a new run.",
                    )
            elif stage == "fit":
                self._waiting[stage] = state
            else:
                loop.load_state_dict(state)
        for stage, loop in self._loops.items():
            if stage not in states and loop.keeps_state:
                logger.warning("The checkpoint holds no state of %s, which begins as it is.", type(loop).__name__)

    def hand_over(self, loop: Loop[Any]) -> None:
        """Load the state that waited for its loop to be attached."""
        if loop.stage in self._waiting:
            loop.load_state_dict(self._waiting.pop(loop.stage))
