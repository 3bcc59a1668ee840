"""The base class of strategies, which implements one process on one device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from hftrain.core.devices import has_own_queue, move, use_device
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.launcher import read_launch
from hftrain.core.parameters import load_optimizer_state, whole_shape
from hftrain.core.signatures import Shown
from hftrain.core.tree import map_tensors, uncompiled
from hftrain.core.types import Owns, PrecisionPolicy, Shard
from hftrain.preemption.consensus import Board
from hftrain.strategies.checks import check_whole

if TYPE_CHECKING:
    from hftrain.strategies.watch import RankWatch

MakeOptimizer = Callable[[nn.Module], Optimizer]
Placed = tuple[nn.Module, Optimizer | None]


class Ranks:
    """Processes with a rank each, and the collectives among them; here, one process.

    Attributes:
        rank: The rank among these processes.
        world_size: Their number.
        copy: The number of this process among those that read the same samples.
        group: Their torch process group; None is the one of all processes.
    """

    rank, world_size, copy = 0, 1, 0
    group: Any = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the elementwise ``"sum"``, ``"mean"`` or ``"max"`` over all processes. Collective."""
        return tensor

    def reduce_later(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
        """Start a sum; return the result and a function that waits for it without synchronising. Collective."""
        return self.reduce(tensor, op="sum"), lambda: None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all processes in rank order. Collective; synchronises if there are several.

        Raises:
            StrategyError: The tensors differ in more than their number of rows.

        Shapes:
            tensor: ``[rows, ...]``, rows differing by process and possibly 0; a 0-d tensor counts as one row.
        """
        return tensor if tensor.dim() else tensor.reshape(1)

    def gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all processes, which must be plain JSON data. Collective; synchronises."""
        return [obj]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`, which must be plain JSON data. Collective; synchronises."""
        return obj

    def barrier(self) -> None:
        """Wait until every process has reached this call. Collective."""

    def all_true(self, flag: bool) -> bool:
        """Return whether a flag is true on every process. Collective; synchronises."""
        return flag


class Strategy(Ranks, Shown):
    """Base class of strategies: manages processes and devices, places and wraps the model, keeps replicas in sync.

    A strategy whose engine takes over part of the step declares it in `owns` and provides for

    - `Owns.BACKWARD`: ``backward(loss) -> None``;
    - `Owns.STEP`: ``step() -> bool``, False if the step was skipped; and ``zero_grad()``, if it drops gradients itself;
    - `Owns.CLIP`: nothing: its ``step`` clips, and `clip_grad_norm` is not called; a ``last_norm``, if defined, is
      converted to the norm (`float`) when it is logged;
    - `Owns.SCALING`: ``backward`` and ``step``, which scale the loss themselves;
    - `Owns.CASTING`: nothing: the forward pass runs without autocast;
    - `Owns.ACCUMULATION`: nothing: its ``backward`` counts micro-steps, and `no_sync` does nothing.

    Attributes:
        name: The registry name.
        owns: The parts of the step that the strategy's engine performs.
        makes: Which of ``"optimizer"`` and ``"scheduler"`` the strategy creates itself, in `setup`.
        schedule: The schedule that the strategy created.
        saves_in_background: Whether a checkpoint can be written from copies of the states while training continues.
        saves_objects: Whether checkpoints can hold objects that follow the parameters, such as a second optimizer.
        restores_in_a_run: Whether model and optimizer can be loaded from a checkpoint between two steps.
        watch: Reports errors of this process to the other ranks, between `launch` and `close`; None if unsupported.
        shards_model: Whether each process holds a shard of the model, in parameters that `setup` creates.
        sizes: The number of processes along each dimension of a mesh (``"tp"``, ``"cp"``, ...); empty without a mesh.
        loads_parts: Whether states may hold `StoredTensor` values when they are loaded.
        parallelize: The task's plan for tensor ranks, see `TaskModule.parallelize`; set before `setup`.
        recomputes: Whether `setup` enables activation recomputation in the backward pass.
        recompute: Enables gradient checkpointing (model, options); returns what disables it. None: as the model does.
        rank: The global rank; read from the launcher before `launch`, from the process group afterwards.
        local_rank: The rank on this machine, from the same sources.
        world_size: The number of processes, from the same sources.
        non_blocking: Whether batches are copied without waiting; None does so to devices but MPS. Read by `launch`.

    Args:
        planned_device: The device that `launch` will use; setting it touches no device.
        place_model: Whether `setup` moves the model; False for a model that is already dispatched or quantized.
    """

    name = ""
    owns = Owns.NOTHING
    saves_in_background = restores_in_a_run = saves_objects = True
    shards_model = loads_parts = recomputes = False
    sizes: Mapping[str, int] = MappingProxyType({})
    parallelize: Callable[[Any], Mapping[str, Any] | None] | None = None
    recompute: Callable[[nn.Module, Mapping[str, Any]], Callable[[], None]] | None = None
    makes: frozenset[str] = frozenset()
    schedule: Any = None
    watch: RankWatch | None = None

    def __init__(self, planned_device: torch.device, *, place_model: bool = True) -> None:
        self.rank, self.local_rank, self.world_size = 0, 0, 1
        self._origin = (launch := read_launch()).rank, launch.world_size
        self.planned_device, self.place_model = planned_device, place_model
        self.non_blocking: bool | None = None
        self._device: torch.device | None = None
        self._move: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        """Return why this strategy cannot use a precision on a device type; None if it can."""
        return None

    @property
    def device_type(self) -> str:
        """The device type, known before `launch`: ``"cpu"``, ``"cuda"``, ``"mps"``, ..."""
        return self.planned_device.type

    @property
    def device(self) -> torch.device:
        """The device of this process.

        Raises:
            StrategyError: Not launched yet.
        """
        if self._device is None:
            raise StrategyError(
                f"Cannot determine the device of strategy={self.name!r}.", "It has none yet.", "Call launch() first."
            )
        return self._device

    @property
    def data(self) -> Ranks:
        """The processes that read different samples, over which samples, items and losses are counted.

        All processes, unless several hold parts of one model or sequence. `rank` and `world_size` count processes.
        """
        return self

    @property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0."""
        return self.local_rank == 0

    def scaler_factory(self, device: torch.device) -> GradScaler:
        """Create the gradient scaler for this strategy."""
        return GradScaler(device.type)

    def accelerator_options(self) -> dict[str, Any]:
        """Return the `accelerate.Accelerator` arguments that describe this strategy; called after `launch`."""
        return {"cpu": True} if self.device_type == "cpu" else {}

    def check_processes(self) -> None:
        """Raise `ConfigError` if the strategy was created in another process."""
        launch = read_launch()
        rank, world_size = launch.rank, launch.world_size
        if self._origin != (rank, world_size):
            made_as = "rank {} of {}".format(*self._origin)
            raise ConfigError(
                f"Cannot use this {type(self).__name__} as rank {rank} of {world_size}.",
                f"It was made before the processes were launched, as {made_as}, and would wait for the others.",
                "Make the strategy and the Trainer inside the function that launch() calls, or pass a name.",
            )

    def check_model(self, model: nn.Module) -> None:
        """Raise `ConfigError` if the strategy cannot train a model; called before `launch`, touches no device."""
        check_whole(model, name=self.name, world_size=self.world_size)

    def plan(self, *, num_steps: int, num_warmup_steps: int) -> None:
        """Receive the run's length in optimizer updates, before `setup`; for strategies that create the schedule."""

    def plan_clipping(self, max_norm: float | None) -> None:
        """Receive the maximum gradient norm before `setup`; for strategies that clip themselves."""

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which to build a model for training."""
        return nullcontext()

    def launch(self) -> None:
        """Select the device and join the other processes; a second call changes nothing. Collective."""
        if self._device is None:
            self.check_processes()
            self._take(self.planned_device)

    def close(self) -> None:
        """Release what `launch` acquired; safe to call twice. Collective."""
        self._device = None

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Place and wrap a model, then create its optimizer. Collective; mutates the model.

        Args:
            model: The model, wrapped or not.
            make_optimizer: Called once with the unwrapped model when its parameters are final; with None, nothing is
                trained and the model is not wrapped.
            policy: The precision's settings.
        """
        model = self.place(model)
        return model, make_optimizer(self.unwrap(model)) if make_optimizer else None

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, unless `place_model` is False. Mutates the model.

        Raises:
            ConfigError: Another strategy has sharded the model, or it has no weights.
        """
        check_whole(model, name=self.name, world_size=self.world_size)
        if self.place_model and any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                f"Cannot move {type(model).__name__} to {str(self.device)!r}:",
                "it is on the meta device, without weights.",
                "Build it outside of torch.device('meta'), or with from_pretrained(); train() reads attached weights.",
            )
        return move(model, self.device) if self.place_model else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrappers that distribute or compile it."""
        while True:
            module: nn.Module = uncompiled(model)
            if isinstance(model, (DistributedDataParallel, DataParallel)):
                module = model.module
            if module is model:
                return model
            model = module

    def called(self, model: nn.Module) -> nn.Module:
        """Return the module whose calls return the model's outputs: the model, or the pipeline that evaluates it."""
        return model

    def has_outputs(self, model: nn.Module) -> bool | None:
        """Return whether the running call of a model computes its outputs; None if they come from another process."""
        return True

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the module to evaluate, which ranks may call unequally often: it does not communicate. Collective."""
        return self.unwrap(model)

    def finish_forwards(self) -> None:
        """After the last batch, take part in the remaining forward passes of other ranks. Collective."""

    def after_evaluation(self, model: nn.Module) -> None:
        """Undo the changes of `for_evaluation` to the wrapped model; also called after errors; not collective."""

    def to_device(self, tree: Any) -> Any:
        """Return a nested batch with its tensors on the device; other leaves are kept.

        A batch with its own ``to`` method is moved by it, unless it is a mapping. Does not synchronise. The first call
        launches, if nothing has before.
        """
        if self._device is None:
            self.launch()
        if hasattr(tree, "to") and not isinstance(tree, (torch.Tensor, Mapping)):
            return tree.to(self.device)
        return map_tensors(tree, self._move)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for forward and backward passes that do not exchange gradients."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients in place, without synchronising, so that their norm over all processes is at most `max_norm`.

        Args:
            norm_type: The p of the p-norm.

        Returns:
            The norm before clipping, a 0-d tensor on the device.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full model state, with the keys of the unwrapped model. Collective.

        If the model is sharded, the main process gets the state and the others an empty one.
        """
        return self.unwrap(model).state_dict()

    def own_state(self, model: nn.Module) -> dict[str, Any]:
        """Return this process's model state, tensors by name; names that share a tensor hold the same object."""
        return self.unwrap(model).state_dict(keep_vars=True)

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the model's state by name, whole, one at a time and on every process. Collective.

        Raises:
            StrategyError: The engine puts tensors together only on the main process.
        """
        for name, tensor in self.own_state(model).items():
            yield name, tensor.detach()

    def count_trainable(self, model: nn.Module) -> int:
        """Return the number of trainable elements of a model, over all processes."""
        return sum(whole_shape(p).numel() for p in self.unwrap(model).parameters() if p.requires_grad)

    def model_shards(self, model: nn.Module) -> dict[str, Shard] | None:
        """Return this process's shards of the model state; None if states are saved unsharded."""
        return None

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a full state, equal on all ranks; return torch's missing and unexpected keys. Collective."""
        return self.unwrap(model).load_state_dict(state, strict=strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full optimizer state; if it is sharded, see `model_state`. Collective."""
        return optimizer.state_dict()

    def optimizer_shards(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, Any], dict[str, Shard]] | None:
        """Return the optimizer state without sharded tensors, and this process's shards; None if saved unsharded.

        Shards are named ``"<parameter index>.<key>"``.
        """
        return None

    def split_objects(self, states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Shard]]:
        """Return the states of users' objects without sharded tensors, and this process's shards of these.

        Shards are named by their path, a JSON list of keys.
        """
        return states, {}

    def split_object_like(self, tree: Any, like: Any) -> Any:
        """Return an object's state with its tensors sharded as in its current one."""
        return tree

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full state, equal on all ranks. Collective; mutates the optimizer."""
        load_optimizer_state(optimizer, state)

    def make_board(self) -> Board:
        """Return a new board for messages between processes. Collective: all must create theirs in the same order.

        Raises:
            StrategyError: The processes share no store, as under MPI.
        """
        return Board()

    def _take(self, device: torch.device) -> None:
        self._device = device = use_device(device)
        # Copies to a device may overlap with host work; copies to the host must be complete before use.
        non_blocking = has_own_queue(device.type) if self.non_blocking is None else self.non_blocking
        self._move = partial(torch.Tensor.to, device=device, non_blocking=non_blocking)


def has_engine(strategy: Strategy, engine: str) -> bool:
    """Return whether a strategy or one of its base classes uses an engine (``"fsdp"``, ``"deepspeed"``)."""
    return any(engine in str(vars(kind).get("name", "")) for kind in type(strategy).__mro__)
