"""What has to stand before the first step: the model placed and wrapped, optimizer, schedule, and the step itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.parts import load_trainer_state
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.progress import TrainerControl
from hftrain.core.types import Owns
from hftrain.loops.window import LossWindow
from hftrain.rules.evaluation import check_cadences
from hftrain.rules.optimizer import check_optimizer
from hftrain.step.assemble import assemble_stepper
from hftrain.step.stepper import Stepper
from hftrain.strategies.base import Strategy
from hftrain.task.modes import TrainingMode
from hftrain.task.module import TaskModule

if TYPE_CHECKING:
    from hftrain.trainer.session import TrainSession
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def set_up(session: TrainSession, max_steps: int) -> Stepper:
    """Place and wrap the model, make optimizer and schedule, assemble the step. Collective."""
    trainer, strategy, precision = session.trainer, session.trainer.strategy, session.trainer.precision
    # Before the weights are loaded, which would be rounded to the dtype they are copied into.
    trainer.model = trainer.task.model = precision.convert(trainer.model)
    if session.resume is not None:
        session.checkpoints.load_model(session.resume)
    place_task(trainer.task, strategy, is_model_placed=True)
    trainer._align_special_tokens()
    noise = None if trainer.neftune_noise_alpha is None else (trainer._activate_neftune, trainer._deactivate_neftune)
    session.changes.apply(trainer.model, noise_hooks=noise)
    trainer._forget_schedule()
    if Owns.STEP in strategy.owns and strategy.unwrap(trainer.model_wrapped) is not trainer.model_wrapped:
        # An earlier run's went into an engine that is gone.
        logger.warning("strategy=%r starts this run with a new optimizer and a new schedule.", strategy.name)
        trainer.optimizer = trainer.lr_scheduler = None

    strategy.plan(num_steps=max_steps, num_warmup_steps=trainer.args.get_warmup_steps(max_steps))

    # The weights of a loss, say, that `create_optimizer` trains too; and what it leaves to others, or to nobody.
    outside = session.checkpoints.outside
    untrained: list[torch.Tensor] = []

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if "scheduler" in strategy.makes:
            trainer.create_optimizer()
        else:
            trainer.create_optimizer_and_scheduler(num_training_steps=max_steps)
        assert trainer.optimizer is not None
        # Here, for a strategy may put parameters of its own into the groups.
        check_optimizer(trainer.optimizer, trainer.lr_scheduler, trainer.model)
        outside.find(trainer.optimizer, trainer.task)
        trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        untrained[:] = [p for p in trainer.task.parameters() if id(p) not in trained and p.requires_grad]
        return precision.attach(trainer.model, trainer.optimizer)

    wrapped, optimizer = _wrap(session, make_optimizer)
    trainer.compiler.compile(trainer.model)
    trainer._cast_model()
    if "scheduler" in strategy.makes:
        trainer.lr_scheduler = strategy.schedule
    elif "optimizer" in strategy.makes:
        trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
    trainer._check_in_backward(optimizer)
    # An interrupted run, or the user, may have left gradients.
    trainer.model.zero_grad()
    trainer.optimizer = session.optimizer = optimizer
    trainer.task.model = trainer.model_wrapped = wrapped
    trainer._shares = trainer._make_shares()
    trainer._training_mode = TrainingMode(trainer.task, optimizer)
    stepper = assemble_stepper(
        strategy=strategy,
        precision=precision,
        optimizer=optimizer,
        args=trainer.args,
        unclipped=outside.parameters,
        untrained=untrained,
        average_unclipped=outside.average if outside.is_averaged else None,
    )
    trainer._computing.use(stepper, optimizer)
    return stepper


def tear_down(trainer: Trainer) -> None:
    """Put the bare model back, and let the step's hooks act outside of a run again; safe to call twice."""
    trainer.task.model = trainer.model
    trainer._computing.use(trainer.precision, None)
    if trainer._training_mode is not None:
        trainer._training_mode.close()
        trainer._training_mode = None
    trainer._note_sync(True)


def _wrap(session: TrainSession, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap the model through the hook; what an override left to do is done after it."""
    trainer, strategy = session.trainer, session.trainer.strategy
    made: list[torch.optim.Optimizer] = []

    def wrap(model: nn.Module) -> nn.Module:
        wrapped, optimizer = strategy.setup(model, make_optimizer, trainer.precision.policy)
        assert optimizer is not None
        made[:] = [optimizer]
        return wrapped

    session.wrap = wrap
    # The wrapper that the user brought, if it still holds the model.
    outermost = trainer._outermost if strategy.unwrap(trainer._outermost) is trainer.model else trainer.model
    wrapped = trainer._wrap_model(outermost)
    if not made:
        wrapped = wrap(wrapped)
    if strategy.unwrap(wrapped) is not trainer.model:
        raise ConfigError(
            f"{type(trainer).__name__}._wrap_model returned a {type(wrapped).__name__}.",
            f"strategy={strategy.name!r} cannot look through it to the model.",
            "Wrap the model before it is given to the Trainer, or return what super()._wrap_model returned.",
        )
    return wrapped, made[0]


def place_task(task: TaskModule, strategy: Strategy, *, is_model_placed: bool = False) -> None:
    """Move a task's metrics and what else it holds to the device, and the model unless the strategy does."""
    model = task.model
    # Its other children, and the tensors it holds itself.
    del task.model
    task.to(strategy.device)
    task.model = model if is_model_placed else strategy.place(model)


def loss_window(
    args: TrainingArguments,
    strategy: Strategy,
    *,
    gather: Callable[[torch.Tensor], torch.Tensor],
    is_overridden: Callable[[str], bool],
) -> LossWindow:
    """Return what sums the losses between two log lines, over all processes; an overridden hook gathers them."""
    reduce: Callable[[torch.Tensor], torch.Tensor] = partial(strategy.reduce, op="mean")
    if is_overridden("_nested_gather"):
        reduce = lambda loss: gather(loss).mean()  # noqa: E731
    # Documented: not on XLA.
    filters = args.logging_nan_inf_filter and strategy.device_type != "xla"
    return LossWindow(filters_nonfinite=filters, reduce=reduce, is_live=is_overridden("_maybe_log_save_evaluate"))


def empty_cache() -> None:
    """Give the memory that torch keeps for later back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def start_state(trainer: Trainer, resume: Path | None, *, max_steps: int, num_epochs: int) -> None:
    """Let the documented state begin a run, from a checkpoint if there is one; in place: callbacks hold it."""
    state, args, fresh = trainer.state, trainer.args, trainer._new_state()
    loaded = fresh if resume is None else load_trainer_state(resume)
    for flag in ("is_local_process_zero", "is_world_process_zero"):
        setattr(loaded, flag, getattr(fresh, flag))
    vars(state).update(vars(loaded))
    state.max_steps, state.num_train_epochs = max_steps, num_epochs
    if state.epoch is None:
        state.epoch = 0.0
    state.train_batch_size = args.train_batch_size
    state.compute_steps(args, max_steps)
    if trainer._trial_run is not None:
        trainer._trial_run.describe(state)
    check_cadences(args, trainer._eval_sets, eval_steps=state.eval_steps)
    reset(trainer.control)


def reset(control: TrainerControl) -> None:
    """Forget what was asked for: a run that was stopped is resumed to go on."""
    for flag in vars(control):
        setattr(control, flag, False)
