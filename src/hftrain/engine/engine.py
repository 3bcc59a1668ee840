"""Setup, step and checkpoints of a run whose loop the user writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from hftrain.core.preserve import temporarily
from hftrain.core.seed import set_seed
from hftrain.core.types import Owns
from hftrain.engine.batches import ShardedBatches
from hftrain.engine.checkpoints import EngineCheckpoints, refused
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.step.legality import check_legal
from hftrain.step.stepper import Stepper
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy
from hftrain.task.modes import preserved_modes

T = TypeVar("T")


class _Run(NamedTuple):
    model: nn.Module
    optimizer: Optimizer
    stepper: Stepper


class Update(NamedTuple):
    """The result of `Engine.optim_step`.

    Args:
        is_updated: False if an fp16 overflow skipped the update.
        grad_norm: The norm before clipping, a 0-d tensor; None without a limit.
    """

    is_updated: bool
    grad_norm: Any


class _NoModel:
    """Placeholder until `Engine.setup`; avoids a check in each step."""

    def __getattr__(self, name: str) -> Any:
        raise refused("step(), save() or load()", "There is no model yet.", "Call setup() first.")


class Engine:
    """Use hftrain's strategies, precisions and checkpoints in your own training loop.

    Use it as a context manager, or call `close`. Every process runs the same code.

    Attributes:
        strategy: The strategy, launched.
        precision: The precision, open.
        rank: The global rank of this process.
        world_size: The number of processes.
        is_main: Whether this is global rank 0.
        device: The device of this process.
        reduce: Reduce a tensor by ``"sum"``, ``"mean"`` or ``"max"`` over the processes that read different samples
            (`Strategy.data`); see `Strategy.reduce`.
        gather: Gather the rows of these processes, which may differ in number.
        barrier: Wait until every process has reached this call.

    Args:
        strategy: A name, such as ``"fsdp"``, or a `Strategy`; ``"auto"``: ``"ddp"`` under a launcher.
        precision: A name, such as ``"bf16"``, or a `Precision`.
        seed: Seeds all random numbers and the order of the data.
        output_dir: Checkpoint folder; None disables checkpoints.
        save_total_limit: The number of checkpoints to keep; None keeps all.
        max_grad_norm: Default gradient norm limit of `clip`; DeepSpeed requires it here.

    Raises:
        ConfigError: The strategy and precision cannot be combined here, or a name is unknown.

    Example:
        >>> with Engine(strategy="single") as engine:
        ...     model, optimizer = engine.setup(nn.Linear(2, 1), lambda model: torch.optim.SGD(model.parameters(), 0.1))
        ...     engine.backward(model(torch.ones(4, 2, device=engine.device)).mean())
        ...     engine.step()
        True
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        precision: str | Precision = "fp32",
        seed: int = 42,
        output_dir: str | Path | None = None,
        save_total_limit: int | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.strategy = strategy if isinstance(strategy, Strategy) else create_strategy(strategy)
        self.precision = precision if isinstance(precision, Precision) else precisions.create(precision)
        check_legal(self.strategy, self.precision)
        self._seed, self._max_grad_norm = seed, max_grad_norm
        self._clipping = SimpleNamespace(max_grad_norm=max_grad_norm)
        self._run: _Run = cast(_Run, _NoModel())
        self._is_accumulating = False
        # Whether a backward pass exchanges its gradients now, and whether the last one did.
        self._exchanges = self._has_exchanged = True
        set_seed(seed)
        self.strategy.launch()
        self.precision.open(self.strategy.device, self.strategy.scaler_factory)
        self.rank, self.world_size = self.strategy.rank, self.strategy.world_size
        self.is_main, self.device = self.strategy.is_main, self.strategy.device
        data, self.barrier = self.strategy.data, self.strategy.barrier
        self.reduce, self.gather = data.reduce, data.gather
        folder = None if output_dir is None else Path(output_dir)
        self._checkpoints = EngineCheckpoints(self.strategy, self.precision, folder, save_total_limit)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group and release the output folder; safe to call twice."""
        self._checkpoints.close()
        self.precision.close()
        self.strategy.close()

    # -- setup -----------------------------------------------------------------------------------------------------

    def setup(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
        """Place and wrap the model, then create its optimizer. Collective; mutates the model.

        Args:
            model: The unwrapped model.
            make_optimizer: Called with the model once its parameters are final.

        Returns:
            The wrapped model to call in the loop, and the optimizer.

        Raises:
            ConfigError: The strategy cannot train the model, or the optimizer holds none of its parameters.
        """
        strategy, precision = self.strategy, self.precision
        if isinstance(self._run, _Run):
            raise refused("setup() again", "An Engine trains one model.", "Put several networks into one nn.Module.")
        if not callable(make_optimizer) or isinstance(make_optimizer, type):
            remedy = "Pass a function: engine.setup(model, lambda model: torch.optim.AdamW(model.parameters()))."
            reason = f"{make_optimizer!r:.60} is not a function that makes an optimizer once the model is wrapped."
            raise refused("setup()", reason, remedy)
        strategy.check_model(model)
        if "scheduler" in strategy.makes:
            remedy = "Remove the config's scheduler and register() one of torch.optim.lr_scheduler."
            raise refused("setup()", "The DeepSpeed config makes a schedule that would know no length.", remedy)
        strategy.plan_clipping(self._max_grad_norm)
        unheld: list[torch.Tensor] = []

        def make(module: nn.Module) -> Optimizer:
            optimizer = make_optimizer(module)
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            unheld[:] = [p for p in module.parameters() if id(p) not in ids]
            if not any(id(p) in ids for p in module.parameters()):
                remedy = "Make it from the model that the function is called with."
                raise refused("setup()", "The optimizer holds none of the model's parameters.", remedy)
            return precision.attach(module, optimizer)

        wrapper, optimizer = strategy.setup(precision.convert(model), make, precision.policy)
        assert optimizer is not None
        stepper = assemble_stepper(
            strategy=strategy, precision=precision, optimizer=optimizer, args=self._clipping, unheld=unheld
        )
        self._run = _Run(wrapper, optimizer, stepper)
        return wrapper, optimizer

    def register(self, name: str, stateful: T) -> T:
        """Add an object to checkpoints, such as a schedule or a counter. Each rank saves its own state.

        Args:
            name: The object's name in checkpoints.
            stateful: An object with `state_dict` and `load_state_dict`; its state holds tensors and plain containers.
        """
        methods = (getattr(stateful, method, None) for method in ("state_dict", "load_state_dict"))
        if name in self._checkpoints.objects or not all(map(callable, methods)):
            reason = "The name is taken, or the object has no state_dict() and load_state_dict()."
            raise refused(f"register({name!r}, ...)", reason, "Give another name, or an object that has both.")
        self._checkpoints.objects[name] = stateful
        return stateful

    def shard(self, loader: Any, *, training: bool = True) -> ShardedBatches:
        """Return a loader of this rank's part of the data, with batches on the device. Collective.

        Args:
            loader: The same on all ranks.
            training: Whether checkpoints save the position. Otherwise each iteration reads this rank's whole part.
        """
        batches = ShardedBatches(loader, strategy=self.strategy, seed=self._seed, is_training=training)
        self._checkpoints.batches += [batches] if training else []
        return batches

    # -- a step ----------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward pass."""
        return self._run.stepper.autocast()

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        """Return the context of one micro-batch's forward and backward pass; only the last exchanges gradients."""
        waits = nullcontext() if is_last else self.strategy.no_sync(self._run.model)
        with temporarily(self, _exchanges=is_last), waits:
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss; divide it by the number of micro-batches yourself."""
        self._is_accumulating, self._has_exchanged = True, self._exchanges
        self._run.stepper.backward(loss)

    def clip(self, max_norm: float | None = None) -> Any:
        """Clip the gradients by their global norm and return the norm before clipping. Collective.

        Args:
            max_norm: The maximum norm; None for the engine's `max_grad_norm`.

        Returns:
            A 0-d tensor, or None without a limit. DeepSpeed clips in `step`: read the value after it.

        Raises:
            ConfigError: DeepSpeed was set up with another norm; or see `step`.
        """
        limit = self._max_grad_norm if max_norm is None else max_norm
        if limit != self._max_grad_norm and Owns.CLIP in self.strategy.owns:
            reason = f"{self.strategy.name} clips itself, at the norm that it was set up with."
            raise refused(f"clip({max_norm})", reason, f"Pass Engine(max_grad_norm={max_norm}).")
        self._clipping.max_grad_norm = limit
        self._check_exchanged()
        return self._run.stepper.clip()

    def step(self) -> bool:
        """Update the parameters and zero the gradients; return False if skipped by an fp16 overflow. Collective.

        Raises:
            ConfigError: No micro-batch was the last one, so each process has gradients of its own.
        """
        self._check_exchanged()
        is_done = self._run.stepper.step()
        self._run.stepper.zero_grad()
        self._is_accumulating = False
        return is_done

    def _check_exchanged(self) -> None:
        if self.world_size > 1 and self._is_accumulating and not self._has_exchanged:
            reason = "The processes have not exchanged the gradients: is_last was False for the last micro-batch."
            raise refused("step()", reason, "Pass is_last=True for the last one before a step, also at an epoch's end.")

    def forward_backward(
        self, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor], *, is_last: bool = True
    ) -> torch.Tensor:
        """Run the model on a batch and add the gradients of its loss to those of earlier calls since `optim_step`.

        Args:
            batch: What `loss` takes; moved to the device.
            loss: Called with the wrapped model and the batch; returns the loss, scaled to its share of the step.
            is_last: Whether this is the last call before `optim_step`; only that one exchanges gradients.

        Returns:
            The loss, detached.
        """
        with self.accumulate(is_last):
            with self.autocast():
                value = loss(self._run.model, self.strategy.to_device(batch))
            self.backward(value)
        return value.detach()

    def optim_step(self, lr: float | None = None) -> Update:
        """Clip to the engine's `max_grad_norm`, update the parameters and drop the gradients. Collective.

        Args:
            lr: The learning rate of this update; None leaves that of the optimizer.
        """
        for group in self._run.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        norm = self.clip()
        return Update(self.step(), norm)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors of the model's state, whole, one at a time, on every process. Collective.

        For an inference engine that takes over the weights: names are those of the unwrapped model's `state_dict()`,
        and no more than one gathered tensor is in memory. Every process must read them all.

        Example:
            >>> with Engine(strategy="single") as engine:
            ...     _ = engine.setup(nn.Linear(2, 1), lambda model: torch.optim.SGD(model.parameters(), 0.1))
            ...     [(name, list(tensor.shape)) for name, tensor in engine.weights()]
            [('weight', [1, 2]), ('bias', [1])]
        """
        return self.strategy.full_tensors(self._run.model)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model to evaluate, in evaluation mode and without gradients. Collective.

        Ranks may read different numbers of batches.
        """
        wrapper = self._run.model
        model = self.strategy.for_evaluation(wrapper)
        with preserved_modes(wrapper):
            try:
                with torch.no_grad():
                    yield model.eval()
                    self.strategy.finish_forwards()
            finally:
                self.strategy.after_evaluation(wrapper)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, step: int) -> Path:
        """Save a checkpoint of the model, optimizer, loaders and registered objects, and delete old ones. Collective.

        Args:
            step: The number of optimizer updates so far; it names the folder.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are unchanged.
            ConfigError: Another run saves to the folder, or gradients have not been applied by `step`.
        """
        if self._is_accumulating:
            raise refused("save()", "Gradients are waiting for step(), and no checkpoint holds them.", "Step first.")
        return self._checkpoints.save(self._run.model, self._run.optimizer, step)

    def load(self, path: str | Path = "auto") -> int:
        """Restore a checkpoint; call it right before the loop. Collective.

        Args:
            path: A checkpoint's folder, or ``"auto"`` for the newest valid one in `output_dir`, if there is one.

        Returns:
            The checkpoint's step, 0 without one.

        Raises:
            CheckpointError: The checkpoint is damaged or belongs to a different kind of run.
        """
        step = self._checkpoints.load(self._run.model, self._run.optimizer, path)
        self._run.stepper.zero_grad()
        self._is_accumulating = False
        return step
