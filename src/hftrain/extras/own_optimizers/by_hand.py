"""Optimizers that a task steps itself: `automatic_optimization = False`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, StrategyError, TaskError
from hftrain.core.log import warn_once
from hftrain.core.preserve import temporarily
from hftrain.core.types import Owns
from hftrain.extras.own_optimizers.several import Optimizers
from hftrain.precision.base import Precision
from hftrain.step.stepper import StepCalls, Stepper, average_gradients
from hftrain.strategies.base import Strategy


class TaskOptimizer:
    """One optimizer of a task that steps by hand; ``self.optimizers["name"]`` in `training_step`.

    It does what the Trainer does otherwise: scales the loss to its share of the step, averages the gradients over all
    processes, unscales them, clips them to `max_grad_norm`, steps, drops them, and steps the schedule.

    Attributes:
        name: Its name.
        optimizer: The optimizer that `configure_optimizers` returned.
        max_grad_norm: The largest norm of its gradients; None takes that of the arguments.
    """

    def __init__(self, optimizers: OptimizersByHand, name: str, optimizer: Optimizer) -> None:
        self.name, self.optimizer = name, optimizer
        self.max_grad_norm: float | None = None
        self.has_gradient = False
        self._optimizers, self._counting = optimizers, Optimizers({name: optimizer})

    @property
    def num_updates(self) -> int:
        """How often it has changed its parameters, since the start of the training; checkpoints keep it."""
        return int(self.optimizer.param_groups[0]["num_updates"])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Its groups; values may be changed, but a schedule sets ``"lr"`` again at each of its steps."""
        return self.optimizer.param_groups

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What it trains."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def minimize(self, loss: torch.Tensor) -> bool:
        """Run `backward`, then `step`."""
        self.backward(loss)
        return self.step()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Add the gradients of a loss to those of this optimizer's parameters; those of others stay as they are.

        Args:
            loss: The mean over the items of the micro-batch, as `training_step` returns it otherwise.
            options: Keywords of `torch.Tensor.backward`, such as `retain_graph`.
        """
        run = self._optimizers.run
        if run is None or not torch.is_grad_enabled():
            raise TaskError(
                f"Cannot train with the optimizer {self.name!r} now.",
                "No training step is running: an evaluation calls training_step of a task without evaluation_step.",
                "Define evaluation_step(batch).",
            )
        if not any(parameter.requires_grad for parameter in self.parameters):
            raise TaskError(
                f"Cannot train with the optimizer {self.name!r} now:",
                "all its parameters are frozen.",
                "Call backward() and step() only if any(p.requires_grad for p in self.optimizers[name].parameters).",
            )
        with run.reaching(self.parameters) as inputs:
            run.precision.backward(run.weigh(loss), **{**inputs, **options})
        if all(parameter.grad is None for parameter in self.parameters):
            raise TaskError(
                f"Cannot train with the optimizer {self.name!r}:",
                "the loss does not depend on its parameters.",
                "Compute it from their network's outputs, without detach() in between.",
            )
        self.has_gradient = True

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> bool:
        """Update the parameters; return whether that was done.

        With gradient accumulation, nothing is done before the last micro-batch. In fp16 an update is left out if the
        gradients overflowed. Collective.

        Args:
            closure: Computes and returns the loss; the optimizer calls it as often as it needs, as LBFGS and SAM do.
        """
        run = self._optimizers.run
        if closure is not None:
            return self._step_with_closure(closure)
        if run is None or not run.is_last:
            return False
        if not self.has_gradient:
            raise TaskError(
                f"Cannot step the optimizer {self.name!r}:",
                "no backward() came before it.",
                "Call self.optimizers[name].backward(loss) first, or minimize(loss) for both.",
            )
        num_before = self.num_updates
        if run.precision.policy.loss_scaling:
            # The scaler lets each object step once between two changes of the scale, for which others' gradients wait.
            self._counting = Optimizers({self.name: self.optimizer})
            self._optimizers.scaled.append(self._counting)
        self._prepare(run)
        with self._optimizers.allow_steps():
            run.precision.apply(self._counting)
        return self._finish(num_before)

    def _step_with_closure(self, closure: Callable[[], torch.Tensor]) -> bool:
        run, num_before = self._optimizers.run, self.num_updates
        if run is None or run.precision.policy.loss_scaling or getattr(run.args, "gradient_accumulation_steps", 1) > 1:
            raise TaskError(
                f"Cannot step the optimizer {self.name!r} with a closure:",
                "it runs the model several times in a step, which fp16's loss scale and gradient accumulation exclude.",
                "Use bf16 or float32, and gradient_accumulation_steps=1.",
            )

        def evaluate() -> torch.Tensor:
            with torch.enable_grad():
                self.optimizer.zero_grad()
                loss = closure()
                self.backward(loss)
            self._prepare(run)
            # Of all processes: a search that each steers by its own loss would part their weights.
            return run.strategy.reduce(run.weigh(loss.detach()), "mean")

        with self._optimizers.allow_steps():
            self._counting.step(evaluate)
        return self._finish(num_before)

    def _prepare(self, run: _RunSettings) -> None:
        """Average, unscale and clip the gradients: what a Trainer does before it steps."""
        if not self._optimizers.outcomes:
            self._optimizers.norms.clear()  # of the step before
        if run.averages_gradients:
            average_gradients(self.parameters, run.strategy)
        run.precision.unscale(self._counting)
        max_norm = run.args.max_grad_norm if self.max_grad_norm is None else self.max_grad_norm
        if max_norm and isinstance(self.optimizer, torch.optim.LBFGS):
            warn_once("LBFGS is not clipped: it compares gradients of several points. Set max_grad_norm=0.")
            max_norm = 0
        if max_norm and max_norm > 0:
            self._optimizers.norms[self.name] = run.strategy.clip_grad_norm(self.parameters, max_norm)
        else:
            self._counting.measure()
            self._optimizers.norms[self.name] = self._counting.norms[self.name]

    def _finish(self, num_before: int) -> bool:
        self.optimizer.zero_grad()
        self.has_gradient = False
        self._optimizers.update_scale()
        is_updated = self.num_updates > num_before
        self._optimizers.outcomes.append(is_updated)
        if is_updated and self._optimizers.schedules is not None:
            self._optimizers.schedules.step_one(self.name)
        return is_updated

    @contextmanager
    def toggle(self) -> Iterator[None]:
        """Freeze the parameters of the other optimizers within the context: their gradients need not be computed."""
        run, own_ids = self._optimizers.run, set(map(id, self.parameters))
        frozen = [p for p in self._optimizers.parameters if p.requires_grad and id(p) not in own_ids]
        frozen = [] if run is None or run.strategy.shards_model else frozen
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)


class _RunSettings:
    """What the optimizers need of the running training, and the weight of the current micro-batch's loss."""

    def __init__(
        self, optimizers: OptimizersByHand, strategy: Strategy, precision: Precision, args: Any, calls: StepCalls | None
    ) -> None:
        self._optimizers, self._step_calls = optimizers, calls
        self.strategy, self.precision, self.args = strategy, precision, args
        self.averages_gradients = strategy.world_size > 1 and not strategy.shards_model
        self.weigh: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch is the last one of its step."""
        return self._step_calls is None or self._step_calls.syncs

    @contextmanager
    def reaching(self, parameters: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
        """Let a backward pass reach these parameters only; returns keywords for it."""
        if not self.strategy.shards_model:
            yield {"inputs": [parameter for parameter in parameters if parameter.requires_grad]}
            return
        # What autograd sees there are the gathered parameters. Their gradients are sharded at once, also in earlier
        # micro-batches: another optimizer may not have any in the last one.
        self._optimizers.task.model.set_requires_gradient_sync(True)
        own_ids = set(map(id, parameters))
        others = [(p, p.grad) for p in self._optimizers.parameters if id(p) not in own_ids]
        for parameter, _ in others:
            parameter.grad = None
        yield {}
        for parameter, gradient in others:
            parameter.grad = gradient


class OptimizersByHand(Optimizers):
    """The optimizers of a task with `automatic_optimization = False`; ``task.optimizers["name"]`` in a training.

    Args:
        task: Sees the bare model in a training under DDP: each optimizer averages its gradients itself.
    """

    def __init__(self, task: Any, members: Mapping[str, Optimizer]) -> None:
        super().__init__(members)
        self.run: _RunSettings | None = None
        self.outcomes: list[bool] = []
        self.scaled: list[Optimizers] = []
        self.task = task
        self._task_optimizers = {name: TaskOptimizer(self, name, member) for name, member in members.items()}
        self.parameters = [p for optimizer in self._task_optimizers.values() for p in optimizer.parameters]
        self._allows_steps = False
        for member in members.values():
            member.register_step_pre_hook(self._refuse_bare_step)
        task.optimizers = self

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets its own run.
        return {**self.__dict__, "run": None}

    def allow_steps(self) -> AbstractContextManager[None]:
        """Let an optimizer step in the context."""
        return temporarily(self, _allows_steps=True)

    def _refuse_bare_step(self, *_: Any) -> None:
        """Raise if an optimizer is stepped itself: its gradients would be neither averaged nor unscaled nor clipped."""
        if not self._allows_steps and self.run is not None:
            raise TaskError(
                "An optimizer was stepped by its own step().",
                "Its gradients are not averaged over processes, unscaled or clipped.",
                "Call self.optimizers[name].minimize(loss), or backward(loss) and step().",
            )

    def __getitem__(self, name: str) -> TaskOptimizer:
        if name not in self._task_optimizers:
            raise TaskError(
                f"There is no optimizer {name!r}.",
                f"configure_optimizers() returned {', '.join(self._task_optimizers)}.",
                "Use one of these names.",
            )
        return self._task_optimizers[name]

    def step(self, closure: Any = None) -> Any:
        """Do nothing: each one has stepped in `training_step`."""

    def assemble(self, strategy: Strategy, precision: Precision, args: Any, step_calls: StepCalls | None) -> Stepper:
        """Return the calls of a step, of which the task does the most.

        Raises:
            StrategyError: The strategy steps one optimizer itself, or exchanges gradients in its own way.
        """
        exchanges = strategy.world_size > 1 and not strategy.shards_model and strategy.name != "ddp"
        is_mesh = strategy.shards_model and strategy.name != "fsdp"
        if strategy.owns != Owns.NOTHING or exchanges or is_mesh:
            raise StrategyError(
                f"Cannot use automatic_optimization=False with strategy={strategy.name!r}:",
                "it steps the optimizer, or exchanges the gradients, in a way of its own.",
                "Use 'ddp', 'fsdp' or one process.",
            )
        if getattr(args, "auto_find_batch_size", False):
            raise ConfigError(
                "Cannot use auto_find_batch_size with automatic_optimization=False:",
                "a batch cannot be split, as its training_step updates parameters.",
                "Set per_device_train_batch_size.",
            )
        self.run = _RunSettings(self, strategy, precision, args, step_calls)
        if not strategy.shards_model:
            self.task.model = strategy.unwrap(self.task.model)
        return Stepper(
            autocast=precision.autocast,
            backward=lambda *_, **__: None,
            clip=self._total_norm,
            step=self._end_step,
            zero_grad=self.outcomes.clear,
        )

    def stepping(
        self, step: Callable[[Any, Any, Any], torch.Tensor], weigh: Callable[[Any, Any], Callable[[Any], torch.Tensor]]
    ) -> Callable[[Any, Any, Any], torch.Tensor]:
        """Return a training step that weighs the losses of its micro-batch; `weigh` is given batch and item count."""

        def run(model: Any, batch: Any, num_items: Any) -> torch.Tensor:
            assert self.run is not None
            self.run.weigh = weigh(batch, num_items)
            if self.run.averages_gradients:
                self.run.strategy.for_evaluation(model)  # rank 0's buffers, as DDP sends them before a forward pass
            return step(model, batch, num_items)

        return run

    def update_scale(self) -> None:
        """Adjust fp16's loss scale, unless gradients that were scaled by it wait for their step."""
        assert self.run is not None
        if not any(optimizer.has_gradient for optimizer in self._task_optimizers.values()):
            self.run.precision.update_scale()
            self.scaled.clear()

    def _total_norm(self) -> torch.Tensor | None:
        norms = list(self.norms.values()) if self.outcomes else []
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def _end_step(self) -> bool:
        """End a step of the plan; return False if all its updates were skipped."""
        if unused := [name for name, optimizer in self._task_optimizers.items() if optimizer.has_gradient]:
            raise TaskError(
                f"The step ended with gradients of {', '.join(unused)} that were not used.",
                "backward() was called, and step() was not: a checkpoint would not hold them.",
                "Call step() after each backward(); gradient_accumulation_steps adds up gradients of several batches.",
            )
        if not self.outcomes and not any(optimizer.num_updates for optimizer in self._task_optimizers.values()):
            warn_once(
                "The first step changed nothing: training_step stepped no optimizer. With automatic_optimization = "
                "False, call self.optimizers[name].minimize(loss) in it; leave that out to have the Trainer step."
            )
        self.step()  # schedules notice it
        return any(self.outcomes) or not self.outcomes
