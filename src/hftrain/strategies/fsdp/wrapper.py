"""The older FSDP engine, torch's wrapper class, for features that only it has."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, StrategyError, suggest
from hftrain.core.parameters import load_optimizer_state
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.fsdp.strategy import FSDPStrategy

_PREFETCHES = {
    "backward_pre": BackwardPrefetch.BACKWARD_PRE,
    "backward_post": BackwardPrefetch.BACKWARD_POST,
    "no_prefetch": None,
}
_PREFIX = "_fsdp_wrapped_module."


class FSDP1Strategy(FSDPStrategy):
    """Train with torch's older `FullyShardedDataParallel`, which wraps the model and each of its units.

    Do not call the unwrapped model: only the outermost unit gathers its parameters. An optimizer sees each parameter
    as this process's elements in one dimension; optimizers that need whole matrices (Muon, Adafactor) need
    `FSDPStrategy`. Checkpoints are the same as with `FSDPStrategy`.

    Args:
        backward_prefetch: When to gather the next unit in the backward pass: before this unit's gradients are computed
            (``"backward_pre"``), after (``"backward_post"``), or when it is needed (``"no_prefetch"``).
        limit_all_gathers: Whether the host waits, so that at most two units are gathered at a time.
        **options: See `FSDPStrategy`; `reshard_after_forward` follows from `sharding`.

    Raises:
        ConfigError: See `FSDPStrategy`.

    Source: the documented `fsdp` and `fsdp_config`; Zhao et al., PyTorch FSDP, 2023.
    """

    name = "fsdp1"
    loads_parts = False
    saves_objects = False

    def __init__(
        self, *, backward_prefetch: str = "backward_pre", limit_all_gathers: bool = True, **options: Any
    ) -> None:
        self.backward_prefetch, self.limit_all_gathers = backward_prefetch, limit_all_gathers
        self._root: FullyShardedDataParallel | None = None
        self._names: list[str] = []
        self._sizes: dict[str, int] = {}
        super().__init__(**options)

    def check_model(self, model: nn.Module) -> None:
        """Raise if a model cannot be sharded; touches no device.

        Raises:
            ConfigError: See `FSDPStrategy.check_model`; or a unit has parameters of several dtypes.
        """
        super().check_model(model)
        if self._split_root(model) is not None:
            return
        units = self._units(model)
        for unit in (*units, model):
            dtypes = {str(parameter.dtype) for part in _parts(unit, units) for parameter in part.parameters(False)}
            if len(dtypes) > 1:
                raise ConfigError(
                    f"Cannot train {type(model).__name__} with strategy={self.name!r}.",
                    f"Its unit {type(unit).__name__} has parameters of {' and '.join(sorted(dtypes))}, which the "
                    "older wrapper cannot lay into one flat tensor.",
                    "Use strategy='fsdp', or make units of the parts (transformer_layer_cls_to_wrap).",
                )

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = super().unwrap(model)
        return self.unwrap(model.module) if isinstance(model, FullyShardedDataParallel) else model

    def scaler_factory(self, device: torch.device) -> GradScaler:
        return ShardedGradScaler(device.type)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        assert self._root is not None
        context: AbstractContextManager[Any] = self._root.no_sync()
        return context

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model by their norm over all shards; see `Strategy`."""
        assert self._root is not None
        return self._root.clip_grad_norm_(max_norm, norm_type)

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        raise StrategyError(
            f"Cannot return whole weights one at a time with strategy={self.name!r}:",
            "FSDP1 gathers units, not tensors.",
            "Use strategy='fsdp'.",
        )

    def own_state(self, model: nn.Module) -> dict[str, Any]:
        root = self._split_root(model)
        if root is None:
            return super().own_state(model)
        held = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        found = {name.replace(_PREFIX, ""): tensor for name, tensor in held}
        return {name: found.get(name) for name in self._names}

    def count_trainable(self, model: nn.Module) -> int:
        if self._split_root(model) is None:
            return super().count_trainable(model)
        own = self.own_state(model)
        return sum(size for name, size in self._sizes.items() if own[name].requires_grad)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        root = self._split_root(model)
        if root is None:
            return super().load_model_state(model, state, strict=strict)
        own = self.own_state(model)
        # Skip the values that came from `own_state`.
        new = {name: value for name, value in state.items() if value is None or value is not own.get(name)}
        with self._as(StateDictType.FULL_STATE_DICT, root):
            found = root.load_state_dict(new, strict=False)
        missing = [name for name in found.missing_keys if name not in state]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(f"missing: {missing}; unexpected: {found.unexpected_keys}")
        return type(found)(missing, found.unexpected_keys)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        root = self._split_root(model)
        assert root is not None
        known = {id(parameter): name.replace(_PREFIX, "") for name, parameter in root.named_parameters()}
        names = [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        named = {
            "state": {names[index]: entry for index, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]
            ],
        }
        with self._as(StateDictType.FULL_STATE_DICT, root):
            own = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, named)
            load_optimizer_state(optimizer, own)

    # -- implementation ------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        reason, remedy = None, ""
        if self.backward_prefetch not in _PREFETCHES:
            reason, remedy = "There is no such choice.", suggest(self.backward_prefetch, _PREFETCHES)
        if self.reshard_after_forward is not (self.sharding in ("full_shard", "hybrid_shard")):
            reason = f"reshard_after_forward={self.reshard_after_forward} does not follow from {self.sharding!r}."
            remedy = "Leave it out, or use strategy='fsdp'."
        if reason:
            asked = f"Cannot use strategy='fsdp1' with backward_prefetch={self.backward_prefetch!r}."
            raise ConfigError(asked, reason, remedy)
        super()._check_options()

    def _split_root(self, model: nn.Module) -> nn.Module | None:
        root = self._root
        return root if root is not None and (model is root or self.unwrap(model) is self.unwrap(root)) else None

    def _engine_options(self) -> dict[str, Any]:
        return {"fsdp_version": 1, "sharding_strategy": self._torch_sharding(), "use_orig_params": True}

    def _torch_sharding(self) -> ShardingStrategy:
        """Return torch's name for the sharding; NO_SHARD if each replica is on one process."""
        parts = min(self._group_size, self.world_size)
        if parts == 1:
            return ShardingStrategy.NO_SHARD
        is_hybrid = parts < self.world_size
        if self.reshard_after_forward:
            return ShardingStrategy.HYBRID_SHARD if is_hybrid else ShardingStrategy.FULL_SHARD
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if is_hybrid else ShardingStrategy.SHARD_GRAD_OP

    def _split(
        self, model: nn.Module, units: list[nn.Module], policy: PrecisionPolicy, whole: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        self._names = list(model.state_dict(keep_vars=True))
        self._sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        sharding = self._torch_sharding()
        options: dict[str, Any] = {
            "sharding_strategy": sharding,
            # Without a mesh, hybrid sharding treats every process as a separate machine and averages nothing.
            "device_mesh": None if sharding is ShardingStrategy.NO_SHARD else self._mesh(),
            # On the CPU everything is in host memory, and torch's offload needs an accelerator.
            "cpu_offload": CPUOffload(offload_params=True) if self.offload and self.device_type != "cpu" else None,
            "mixed_precision": MixedPrecision(**self._cast_options(policy)),
            "backward_prefetch": _PREFETCHES[self.backward_prefetch],
            "forward_prefetch": self.forward_prefetch,
            "limit_all_gathers": self.limit_all_gathers,
            "use_orig_params": True,
            "device_id": self.device,
        }
        for unit in units:
            places = [
                (home, name) for home in model.modules() for name, child in home.named_children() if child is unit
            ]
            wrapped = self._wrap(unit, options)
            for home, name in places:
                setattr(home, name, wrapped)
        self._root = self._wrap(model, options)
        return self._root

    def _wrap(self, unit: nn.Module, options: dict[str, Any]) -> FullyShardedDataParallel:
        """Wrap a unit whose inner units are already wrapped; first receive rank 0's weights if requested."""
        if self.sync_module_states:
            self._receive(unit)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
            return FullyShardedDataParallel(unit, **options)

    def _receive(self, unit: nn.Module) -> None:
        """Receive a unit's tensors from rank 0 and allocate those on the meta device.

        torch's own function does not support the CPU.
        """
        received: dict[int, torch.Tensor] = {}
        for part in _parts(unit, ()):
            held = [*part.named_parameters("", False, False), *part.named_buffers("", False, False)]
            for name, tensor in held:
                if id(tensor) not in received:
                    received[id(tensor)] = self._received(tensor)
                setattr(part, name, received[id(tensor)])

    def _received(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=self.device)
            is_parameter = isinstance(tensor, nn.Parameter)
            tensor = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        if self.world_size > 1:
            whole = tensor.detach().to(self.device).contiguous()
            dist.broadcast(whole, src=0)
            tensor.data.copy_(whole)
        return tensor

    def _state(self, model: nn.Module) -> dict[str, Any]:
        root = self._split_root(model)
        if root is None:
            return super()._state(model)
        with self._as(self._form(), root):
            state = root.state_dict()
        # Give tied names the same object.
        first: dict[int, str] = {}
        own = self.own_state(model)
        return {name: state[first.setdefault(id(own[name]), name) if own[name] is not None else name] for name in own}

    def _optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        root = self._split_root(model)
        assert root is not None
        with self._as(self._form(), root):
            state = FullyShardedDataParallel.optim_state_dict(root, optimizer)
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers = {name: number for number, name in enumerate(names)}
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
        return {"state": {numbers[name]: entry for name, entry in state["state"].items()}, "param_groups": groups}

    def _form(self) -> StateDictType:
        """Return the state dict type in which sharded tensors are `DTensor` and others are plain."""
        splits = self._torch_sharding() is not ShardingStrategy.NO_SHARD
        return StateDictType.SHARDED_STATE_DICT if splits else StateDictType.FULL_STATE_DICT

    @contextmanager
    def _as(self, form: StateDictType, root: nn.Module) -> Iterator[None]:
        # Do not let torch offload to the host: on a CPU it frees memory that is still in use.
        settings: tuple[Any, Any] = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
        if form is StateDictType.SHARDED_STATE_DICT:
            settings = ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)
        with warnings.catch_warnings():
            # Its replacement always offloads.
            warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
            warnings.filterwarnings("ignore", "When using ``NO_SHARD``", UserWarning)
            with FullyShardedDataParallel.state_dict_type(root, form, *settings):
                yield


def _parts(unit: nn.Module, units: Any) -> Iterator[nn.Module]:
    """Yield a unit and its modules, without other units and their modules."""
    yield unit
    for child in unit.children():
        if child not in units and not isinstance(child, FullyShardedDataParallel):
            yield from _parts(child, units)
