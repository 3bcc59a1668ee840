"""What every strategy can do; on its own it is one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.launcher import read_launch
from hftrain.core.parameters import whole_shape
from hftrain.core.signatures import Shown
from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns, PrecisionPolicy, Shard
from hftrain.strategies.board import Board
from hftrain.strategies.whole import check_whole

if TYPE_CHECKING:
    from hftrain.strategies.watch import RankWatch

MakeOptimizer = Callable[[nn.Module], Optimizer]
Placed = tuple[nn.Module, Optimizer | None]


class Strategy(Shown):
    """Base class of strategies: manages processes and devices, places and wraps the model, keeps replicas in sync.

    A strategy whose engine takes over part of the step says so in `owns`, and provides for

    - `Owns.BACKWARD`: ``backward(loss) -> None``;
    - `Owns.STEP`: ``step() -> bool``, False if the step was skipped; and ``zero_grad()``, if it drops gradients itself;
    - `Owns.CLIP`: nothing: its ``step`` clips, and `clip_grad_norm` is not called; it may have a ``last_norm``, which
      turns into the norm (`float`) when it is logged;
    - `Owns.SCALING`: ``backward`` and ``step``, which scale the loss themselves;
    - `Owns.CASTING`: nothing: the forward pass is then run without autocast;
    - `Owns.ACCUMULATION`: nothing: its ``backward`` counts micro-steps, and `no_sync` does nothing.

    Attributes:
        name: The registry name.
        owns: What the strategy's own engine takes over from the step.
        makes: What of ``"optimizer"`` and ``"scheduler"`` the strategy makes itself, in `setup`.
        schedule: The schedule that it made there.
        saves_in_background: Whether copies of the states that it gives are all that a checkpoint needs, to be written
            while training goes on.
        restores_in_a_run: Whether model and optimizer can be loaded from a checkpoint between two steps.
        watch: What tells the other processes of an error in this one, between `launch` and `close`; None where nothing
            does.
        shards_model: Whether each process holds a part of the model, in parameters that `setup` makes.
        recomputes: Whether `setup` lets parts of the model compute their activations again in the backward pass.
        recompute: Turns gradient checkpointing on, given a model and the options, and returns what turns it off; None:
            the model's own switch or torch's checkpoint do.
        rank: This process among all; as the launcher said until `launch`, then as the process group says.
        local_rank: This process among those of its machine, likewise.
        world_size: The number of processes, likewise.
        non_blocking: Whether batches are copied to the device without waiting; None: where that is safe and of use.
            Read by `launch`.

    Args:
        planned_device: The device that `launch` will take; saying so touches no device.
        place_model: Whether `setup` moves the model; False for a model that is already spread or quantized.
    """

    name = ""
    owns = Owns.NOTHING
    saves_in_background = restores_in_a_run = True
    shards_model = False
    recomputes = False
    recompute: Callable[[nn.Module, Mapping[str, Any]], Callable[[], None]] | None = None
    makes: frozenset[str] = frozenset()
    schedule: Any = None
    watch: RankWatch | None = None

    def __init__(self, planned_device: torch.device, *, place_model: bool = True) -> None:
        self.rank, self.local_rank, self.world_size = 0, 0, 1
        launch = read_launch()
        self._made_in = launch.rank, launch.world_size
        self.planned_device = planned_device
        self.place_model = place_model
        self.non_blocking: bool | None = None
        self._device: torch.device | None = None
        self._move: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        """Return why this strategy cannot work with a precision on a kind of device, None if it can."""
        return None

    @property
    def device_type(self) -> str:
        """The kind of device, known before `launch`: ``"cpu"``, ``"cuda"``, ``"mps"``, ..."""
        return self.planned_device.type

    @property
    def device(self) -> torch.device:
        """The device of this process.

        Raises:
            StrategyError: Not launched yet.
        """
        if self._device is None:
            raise StrategyError(
                f"Cannot tell the device of strategy={self.name!r}.", "It has none yet.", "Call launch() first."
            )
        return self._device

    @property
    def is_main(self) -> bool:
        """Whether this is the first of all processes."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    def scaler_factory(self, device: torch.device) -> GradScaler:
        """Make the gradient scaler that suits this strategy."""
        return GradScaler(device.type)

    def accelerator_options(self) -> dict[str, Any]:
        """Return what `accelerate.Accelerator(...)` must be told to describe this strategy; asked after `launch`."""
        return {"cpu": True} if self.device_type == "cpu" else {}

    def check_processes(self) -> None:
        """Raise unless this process is the one that the strategy was made in.

        Raises:
            ConfigError: It was made before a launcher started this process, and takes itself for another rank.
        """
        launch = read_launch()
        rank, world_size = launch.rank, launch.world_size
        if self._made_in != (rank, world_size):
            made_as = "rank {} of {}".format(*self._made_in)
            raise ConfigError(
                f"Cannot use this {type(self).__name__} as rank {rank} of {world_size}.",
                f"It was made before the processes were launched, as {made_as}, and would wait for the others.",
                "Make the strategy and the Trainer inside the function that launch() calls, or pass a name.",
            )

    def check_model(self, model: nn.Module) -> None:
        """Raise `ConfigError` unless the strategy can train a model; asked before `launch`, touches no device."""
        check_whole(model, name=self.name, world_size=self.world_size)

    def plan(self, *, num_steps: int, num_warmup_steps: int) -> None:
        """Receive the run's length in optimizer updates, before `setup`; for strategies that create the schedule."""

    def plan_clipping(self, max_norm: float | None) -> None:
        """Hear the largest norm of gradients before `setup`; for strategies that clip themselves."""

    def building(self) -> AbstractContextManager[Any]:
        """Return the context to build a model in that is to be trained."""
        return nullcontext()

    def launch(self) -> None:
        """Take the device, and meet the other processes; doing so again changes nothing. Collective."""
        if self._device is None:
            self.check_processes()
            self._take(self.planned_device)

    def close(self) -> None:
        """Release what `launch` acquired; safe to call twice. Collective."""
        self._device = None

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Place and wrap a model, and make its optimizer when its parameters are final. Collective; mutates the model.

        Args:
            model: The model, wrapped already or not.
            make_optimizer: Called once with the unwrapped model; None where nothing is trained, and then nothing is
                wrapped.
            policy: The precision's wishes.
        """
        model = self.place(model)
        return model, make_optimizer(self.unwrap(model)) if make_optimizer else None

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, unless `place_model` is False. Mutates the model.

        Raises:
            ConfigError: Another strategy has split it, or it has no weights.
        """
        check_whole(model, name=self.name, world_size=self.world_size)
        if self.place_model and any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                f"Cannot move {type(model).__name__} to {str(self.device)!r}:",
                "it is on the meta device, without weights.",
                "Build it outside of torch.device('meta'), or load it with from_pretrained().",
            )
        return model.to(self.device) if self.place_model else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrappers that distribute or compile it."""
        while True:
            if isinstance(model, (DistributedDataParallel, DataParallel)):
                model = model.module
            elif hasattr(model, "_orig_mod"):  # torch.compile's wrapper, told apart without importing the compiler
                model = cast(nn.Module, model._orig_mod)
            else:
                return model

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the module to evaluate: its forward talks to no other process. Collective.

        Processes hold different numbers of batches.
        """
        return self.unwrap(model)

    def finish_forwards(self) -> None:
        """Run what the other processes' forward passes still need of this one; after its last batch. Collective."""

    def after_evaluation(self, model: nn.Module) -> None:
        """Undo what `for_evaluation` did to the wrapped model; also after an error, and not collective."""

    def to_device(self, tree: Any) -> Any:
        """Return a nested batch with its tensors on the device; other leaves are kept.

        A batch that is not a mapping but has a ``to`` method of its own is moved by that. Does not synchronise.
        """
        if hasattr(tree, "to") and not isinstance(tree, (torch.Tensor, Mapping)):
            return tree.to(self.device)
        return map_tensors(tree, self._move)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose forward and backward passes do not exchange gradients."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters and processes is at most `max_norm`.

        Mutates the gradients; does not synchronise with the device.

        Args:
            parameters: Whose gradients.
            max_norm: The largest norm.
            norm_type: The p of the p-norm.

        Returns:
            The norm before clipping, a 0-d tensor on the device.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the whole model's state, keyed as the unwrapped model's. Collective.

        Where processes hold parts of the model, the main process gets the state, and the others an empty one.
        """
        return self.unwrap(model).state_dict()

    def own_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state in this process: tensors by name, and which names share one tensor."""
        return self.unwrap(model).state_dict(keep_vars=True)

    def count_trainable(self, model: nn.Module) -> int:
        """Return how many numbers of a model training may change, in all processes together."""
        return sum(whole_shape(p).numel() for p in self.unwrap(model).parameters() if p.requires_grad)

    def model_shards(self, model: nn.Module) -> dict[str, Shard] | None:
        """Return what this process writes of the model's state; None where states are saved whole."""
        return None

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Restore a whole state, the same in every process; return torch's missing and unexpected keys. Collective."""
        return self.unwrap(model).load_state_dict(state, strict=strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer's state; where processes hold parts, see `model_state`. Collective."""
        return optimizer.state_dict()

    def optimizer_shards(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, Any], dict[str, Shard]] | None:
        """Return the optimizer's state without what is split, and what this process writes of that, else None.

        The pieces are named ``"<number of the parameter>.<key>"``.
        """
        return None

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Restore a whole state, the same in every process. Collective; mutates the optimizer."""
        optimizer.load_state_dict(state)

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the ``"sum"``, ``"mean"`` or ``"max"`` over all processes, element by element. Collective."""
        return tensor

    def reduce_later(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
        """Begin to sum a tensor over all processes; return what will hold the sum, and what waits for it. Collective.

        The wait does not synchronise with a device.
        """
        return self.reduce(tensor, op="sum"), lambda: None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all processes' rows, in the order of ranks. Collective; synchronises when there are several.

        Raises:
            StrategyError: The tensors differ in more than their number of rows.

        Shapes:
            tensor: ``[rows, ...]``, rows differing by process and possibly 0; a 0-d tensor counts as one row.
        """
        return tensor if tensor.dim() else tensor.reshape(1)

    def gather_object(self, obj: Any) -> list[Any]:
        """Return all processes' objects, which must be plain JSON data. Collective; synchronises."""
        return [obj]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process `src`, which must be plain JSON data. Collective; synchronises."""
        return obj

    def barrier(self) -> None:
        """Wait until every process is here. Collective."""

    def all_true(self, flag: bool) -> bool:
        """Tell whether a flag is set in every process. Collective; synchronises."""
        return flag

    def make_board(self) -> Board:
        """Return a new board for messages between processes. Collective: all must create theirs in the same order.

        Raises:
            StrategyError: The processes share no store, as under MPI.
        """
        return Board()

    def _take(self, device: torch.device) -> None:
        """Make `device` this process's own."""
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            torch.cuda.set_device(device)
        self._device = device
        # Copies to a GPU may overlap with the host's work; copies to the host must be complete when used.
        non_blocking = device.type in ("cuda", "xpu") if self.non_blocking is None else self.non_blocking
        self._move = partial(torch.Tensor.to, device=device, non_blocking=non_blocking)


def has_engine(strategy: Strategy, engine: str) -> bool:
    """Tell whether a strategy, or one that it derives from, is of an engine (``"fsdp"``, ``"deepspeed"``)."""
    return any(engine in str(vars(kind).get("name", "")) for kind in type(strategy).__mro__)
