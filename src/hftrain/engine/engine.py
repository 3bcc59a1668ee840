"""Setup, step and checkpoints of a run whose loop the user writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hftrain.checkpoint import states
from hftrain.checkpoint.fitting import check_state, restoring
from hftrain.checkpoint.layout import OPTIMIZER, SCALER, rng_name
from hftrain.checkpoint.manager import CheckpointManager, Writer
from hftrain.checkpoint.manifest import read_manifest
from hftrain.checkpoint.shape import check_geometry, check_shape
from hftrain.checkpoint.shared_folder import check_shared_folder
from hftrain.checkpoint.state_files import save_rng
from hftrain.checkpoint.weights import load_weights, save_weights
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.core.seed import capture_rng, restore_rng, set_seed
from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns
from hftrain.engine.batches import ShardedBatches
from hftrain.optim.schedules import refresh_rate
from hftrain.precision.base import Precision
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.step.legality import check_legal
from hftrain.step.stepper import Stepper
from hftrain.storage.tensors import save_containers
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy

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
        raise _refused("step(), save() or load()", "There is no model yet.", "Call setup() first.")

    def __iter__(self) -> Iterator[Any]:
        return self.model  # type: ignore[no-any-return]


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
        reduce: Reduce a tensor over all processes by ``"sum"``, ``"mean"`` or ``"max"``; see `Strategy.reduce`.
        gather: Gather the rows of all processes, which may differ in number; see `Strategy.gather`.
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
        self._batches: list[ShardedBatches] = []
        self._objects: dict[str, Any] = {}
        self._is_claimed = self._is_accumulating = False
        set_seed(seed)
        self.strategy.launch()
        self.precision.open(self.strategy.device, self.strategy.scaler_factory)
        self.rank, self.world_size = self.strategy.rank, self.strategy.world_size
        self.is_main, self.device = self.strategy.is_main, self.strategy.device
        self.reduce, self.gather, self.barrier = self.strategy.reduce, self.strategy.gather, self.strategy.barrier
        self._manager: CheckpointManager | None = None
        if output_dir is not None:
            self._manager = CheckpointManager(Path(output_dir), group=self.strategy, save_total_limit=save_total_limit)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group and release the output folder; safe to call twice."""
        for batches in self._batches:
            batches.close()
        if self._manager is not None:
            self._manager.lock.release()
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
            raise _refused("setup() again", "An Engine trains one model.", "Put several networks into one nn.Module.")
        if not callable(make_optimizer) or isinstance(make_optimizer, type):
            remedy = "Pass a function: engine.setup(model, lambda model: torch.optim.AdamW(model.parameters()))."
            reason = f"{make_optimizer!r:.60} is not a function that makes an optimizer once the model is wrapped."
            raise _refused("setup()", reason, remedy)
        strategy.check_model(model)
        if "scheduler" in strategy.makes:
            remedy = "Remove the config's scheduler and register() one of torch.optim.lr_scheduler."
            raise _refused("setup()", "The DeepSpeed config makes a schedule that would know no length.", remedy)
        strategy.plan_clipping(self._max_grad_norm)
        unheld: list[torch.Tensor] = []

        def make(bare: nn.Module) -> Optimizer:
            optimizer = make_optimizer(bare)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            unheld[:] = [p for p in bare.parameters() if id(p) not in held]
            if not any(id(p) in held for p in bare.parameters()):
                remedy = "Make it from the model that the function is called with."
                raise _refused("setup()", "The optimizer holds none of the model's parameters.", remedy)
            return precision.attach(bare, optimizer)

        wrapped, optimizer = strategy.setup(precision.convert(model), make, precision.policy)
        assert optimizer is not None
        stepper = assemble_stepper(
            strategy=strategy, precision=precision, optimizer=optimizer, args=self._clipping, unheld=unheld
        )
        self._run = _Run(wrapped, optimizer, stepper)
        return wrapped, optimizer

    def register(self, name: str, stateful: T) -> T:
        """Add an object to checkpoints, such as a schedule or a counter. Each rank saves its own state.

        Args:
            name: The object's name in checkpoints.
            stateful: An object with `state_dict` and `load_state_dict`; its state holds tensors and plain containers.
        """
        methods = (getattr(stateful, method, None) for method in ("state_dict", "load_state_dict"))
        if name in self._objects or not all(map(callable, methods)):
            reason = "The name is taken." if name in self._objects else "It has no state_dict() and load_state_dict()."
            raise _refused(f"register({name!r}, ...)", reason, "Give another name, or an object that has both.")
        self._objects[name] = stateful
        return stateful

    def shard(self, loader: Any, *, training: bool = True) -> ShardedBatches:
        """Return a loader of this rank's part of the data, with batches on the device. Collective.

        Args:
            loader: The same on all ranks.
            training: Whether checkpoints save the position. Otherwise each iteration reads this rank's whole part.
        """
        batches = ShardedBatches(loader, strategy=self.strategy, seed=self._seed, is_training=training)
        self._batches += [batches] if training else []
        return batches

    # -- a step ----------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context for a forward pass."""
        return self._run.stepper.autocast()

    def accumulate(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch's forward and backward pass; only the last exchanges gradients."""
        return nullcontext() if is_last else self.strategy.no_sync(self._run.model)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a loss; divide it by the number of micro-batches yourself."""
        self._is_accumulating = True
        self._run.stepper.backward(loss)

    def clip(self, max_norm: float | None = None) -> Any:
        """Clip the gradients by their global norm and return the norm before clipping. Collective.

        Args:
            max_norm: The maximum norm; None for the engine's `max_grad_norm`.

        Returns:
            A 0-d tensor, or None without a limit. DeepSpeed clips in `step`: read the value after it.

        Raises:
            ConfigError: DeepSpeed was set up with another norm.
        """
        if max_norm is not None and max_norm != self._clipping.max_grad_norm:
            if Owns.CLIP in self.strategy.owns:
                reason = f"{self.strategy.name} clips itself, at the norm that it was set up with."
                raise _refused(f"clip({max_norm})", reason, f"Pass Engine(max_grad_norm={max_norm}).")
            self._clipping.max_grad_norm = max_norm
        return self._run.stepper.clip()

    def step(self) -> bool:
        """Update the parameters and zero the gradients; return False if skipped by an fp16 overflow. Collective."""
        is_done = self._run.stepper.step()
        self._run.stepper.zero_grad()
        self._is_accumulating = False
        return is_done

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
                found = loss(self._run.model, self.strategy.to_device(batch))
            self.backward(found)
        return found.detach()

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
        wrapped = self._run.model
        was_training = wrapped.training
        model = self.strategy.for_evaluation(wrapped)
        try:
            with torch.no_grad():
                yield model.eval()
                self.strategy.finish_forwards()
        finally:
            self.strategy.after_evaluation(wrapped)
            wrapped.train(was_training)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, step: int) -> Path:
        """Save a checkpoint of the model, optimizer, loaders and registered objects, and delete old ones. Collective.

        Args:
            step: The number of optimizer updates so far; it names the folder.

        Raises:
            CheckpointError: The checkpoint could not be written; earlier ones are unchanged.
            ConfigError: Another run saves to the folder, or gradients have not been applied by `step`.
        """
        model, optimizer, _ = self._run
        manager, strategy, scaler = self._claimed("save()"), self.strategy, self.precision.state_dict()
        if self._is_accumulating:
            raise _refused("save()", "Gradients are waiting for step(), and no checkpoint holds them.", "Step first.")
        bare, optimizer_state = strategy.unwrap(model), states.whole_state(strategy, model, optimizer)
        weights = {} if strategy.model_shards(model) is not None else strategy.model_state(model)
        own = {
            **capture_rng(),
            "batches": [batches.own_state() for batches in self._batches],
            "objects": {name: each.state_dict() for name, each in self._objects.items()},
        }
        own = map_tensors(own, torch.Tensor.cpu)
        main: list[Writer] = [
            lambda folder: save_weights(bare, folder, state_dict=weights),
            lambda folder: save_containers(optimizer_state, folder / OPTIMIZER),
        ]
        if scaler:
            main.append(lambda folder: save_containers(scaler, folder / SCALER))
        each = [
            *states.shard_writers(strategy, model, optimizer),
            lambda folder: save_rng(own, folder, rank=strategy.rank, world_size=strategy.world_size),
        ]
        geometry = {**self._kind(optimizer), **self._shape()}
        facts = {"geometry": geometry, "batches": [batches.facts() for batches in self._batches]}
        path = manager.save(step, main=main, each=each, facts=facts)
        manager.rotate()
        return path

    def load(self, path: str | Path = "auto") -> int:
        """Restore a checkpoint; call it right before the loop. Collective.

        Args:
            path: A checkpoint's folder, or ``"auto"`` for the newest valid one in `output_dir`, if there is one.

        Returns:
            The checkpoint's step, 0 without one.

        Raises:
            CheckpointError: The checkpoint is damaged or belongs to a different kind of run.
        """
        model, optimizer, stepper = self._run
        folder = self._find(path)
        if folder is None:
            return 0
        manager, strategy, bare = self._claimed("load()"), self.strategy, self.strategy.unwrap(model)
        manifest = read_manifest(folder)
        if "batches" not in manifest.facts:
            reason, remedy = "A Trainer saved it.", "Resume it with that Trainer, or read its model.safetensors."
            raise CheckpointError(f"Cannot load {folder} into an Engine:", reason, remedy)
        with restoring(folder):
            saved, facts = manifest.facts["geometry"], manifest.facts["batches"]
            check_geometry(saved, self._kind(optimizer), step=manifest.step)
            check_shape(saved, self._shape(), is_within_epoch=False, step=manifest.step)
            load_weights(bare, folder, load=strategy.load_model_state, own=strategy.own_state(bare))
            check = partial(states.check_engine, path=folder / OPTIMIZER, is_deepspeed=strategy.name == "deepspeed")
            states.restore_optimizer(folder, strategy, model, optimizer, check=check)
            if saved["precision"] == self.precision.policy.name:
                states.restore_scaler(folder, self.precision)
            rank, world_size = strategy.rank, strategy.world_size
            own = states.load_own(folder, rank=rank, world_size=world_size, num_saved=saved["world_size"])
            for name, each in self._objects.items():
                _restore(folder / rng_name(rank=rank, world_size=world_size), each, own["objects"][name])
            for batches, known, state in zip(self._batches, facts, own["batches"], strict=True):
                batches.restore(known, state, step=manifest.step)
            restore_rng(own)
        stepper.zero_grad()
        self._is_accumulating = False
        manager.follow(manifest)
        return manifest.step

    def _find(self, path: str | Path) -> Path | None:
        """Return the checkpoint to load; the main process verifies it. Collective."""
        manager, found, error = self._claimed("load()"), None, None
        if self.is_main:
            try:
                found = manager.latest() if path == "auto" else Path(path)
                if path != "auto" and manager.open(Path(path)) is None:
                    raise CheckpointError(f"{path} has no manifest. Load a checkpoint that Engine.save() wrote.")
            except CheckpointError as problem:
                error = problem
        name, reason = self.strategy.broadcast_object([found and str(found), error and str(error)])
        if reason:
            raise CheckpointError(reason) from error
        return name and Path(name)

    def _kind(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the facts that a checkpoint must match."""
        return {"optimizer": type(optimizer).__name__, "registered": [*self._objects], "shards": len(self._batches)}

    def _shape(self) -> dict[str, Any]:
        policy = self.precision.policy
        dtype = None if Owns.CASTING in self.strategy.owns else str(policy.param_dtype)
        return {"world_size": self.world_size, "precision": policy.name, "weights_dtype": dtype}

    def _claimed(self, call: str) -> CheckpointManager:
        manager = self._manager
        if manager is None:
            raise _refused(call, "There is no folder for checkpoints.", "Pass Engine(output_dir=...).")
        if not self._is_claimed:
            check_shared_folder(manager.output_dir, self.strategy, on_each_node=manager.on_each_node)
            manager.claim()
            self._is_claimed = True
        return manager


def _restore(path: Path, stateful: Any, state: dict[str, Any]) -> None:
    """Load a registered object's state; a schedule's state is validated first because its form is known."""
    if isinstance(stateful, LRScheduler):
        check_state(path, state, stateful, own=stateful.state_dict())
    stateful.load_state_dict(state)
    if isinstance(stateful, LRScheduler):
        refresh_rate(stateful)


def _refused(call: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"Cannot call Engine.{call}:", reason, remedy)
