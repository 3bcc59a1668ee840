"""Train with parameters, gradients and optimizer state sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hftrain.core.errors import ConfigError, listed, suggest
from hftrain.core.launcher import read_launch
from hftrain.core.log import get_logger
from hftrain.core.parameters import stored_in
from hftrain.core.tree import detach
from hftrain.core.types import PrecisionPolicy, Shard
from hftrain.strategies.base import MakeOptimizer, Placed
from hftrain.strategies.checks import check_trainable
from hftrain.strategies.fsdp import states as shards
from hftrain.strategies.fsdp.units import SplitParameters, check_choice, check_dtypes, find_units, split_again
from hftrain.strategies.lockstep import SplittingStrategy

logger = get_logger(__name__)

SHARDINGS = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
STATE_DICT_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


class FSDPStrategy(SplittingStrategy):
    """Train with torch's composable `fully_shard`: each process keeps a shard of every parameter.

    A unit's parameters are gathered for its forward and backward pass and freed afterwards; gradients are averaged and
    sharded by one reduce-scatter. The model is changed in place: its parameters become `DTensor` objects.

    Args:
        sharding: ``"full_shard"`` shards parameters, gradients and optimizer state; ``"shard_grad_op"`` keeps the
            gathered parameters from the forward to the backward pass; ``"no_shard"`` shards nothing;
            ``"hybrid_shard"`` and ``"hybrid_shard_zero2"`` act as the first two within a machine and replicate across
            machines.
        offload: Keep and update parameters, gradients and optimizer state in host memory.
        auto_wrap: Make units of the model's layers; otherwise the whole model is one unit, gathered at once.
        layer_classes: Class names of the layers; None uses the model's own hint (`_no_split_modules`).
        min_num_params: Choose modules by their number of parameters instead.
        reshard_after_forward: Whether gathered parameters are resharded after the forward pass, or the size of the
            groups to reshard over; None follows `sharding`.
        forward_prefetch: Gather the next unit's parameters while one computes; for models that run in the order in
            which their modules are defined.
        sync_module_states: Broadcast rank 0's parameters and buffers at the start.
        cpu_ram_efficient_loading: Allow other ranks to build the model on the meta device, without weights.
        activation_checkpointing: Recompute each unit's activations in the backward pass.
        state_dict_type: Whether checkpoints hold each process's shards or the full state gathered on rank 0.
        shard_size: The number of processes that share one replica in hybrid sharding; None uses those of a machine.
        **options: See `DistributedStrategy`; sharded parameters are always on the device, or the CPU with `offload`.

    Raises:
        ConfigError: Options contradict each other or do not exist.

    Source: the documented `fsdp` and `fsdp_config`; Zhao et al., PyTorch FSDP, 2023.
    """

    name = "fsdp"
    split_object_like = staticmethod(shards.split_tree_like)
    shards_model = loads_parts = True

    def __init__(
        self,
        *,
        sharding: str = "full_shard",
        offload: bool = False,
        auto_wrap: bool = True,
        layer_classes: Sequence[str] | None = None,
        min_num_params: int = 0,
        reshard_after_forward: bool | int | None = None,
        forward_prefetch: bool = False,
        sync_module_states: bool = True,
        cpu_ram_efficient_loading: bool = False,
        activation_checkpointing: bool = False,
        state_dict_type: str = "SHARDED_STATE_DICT",
        shard_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if offload and options.get("backend") is None and self.device_type != "cpu":
            # Gradients in host memory need a CPU backend to sum their norm.
            self.backend = f"cpu:gloo,{self.device_type}:{self.backend}"
        self.sharding, self.offload, self.shard_size = sharding, offload, shard_size
        self.auto_wrap, self.min_num_params = auto_wrap, min_num_params
        self.layer_classes = [layer_classes] if isinstance(layer_classes, str) else layer_classes and [*layer_classes]
        gathers_twice = sharding in ("full_shard", "hybrid_shard")
        self.reshard_after_forward = gathers_twice if reshard_after_forward is None else reshard_after_forward
        self.forward_prefetch = forward_prefetch
        self.sync_module_states, self.cpu_ram_efficient_loading = sync_module_states, cpu_ram_efficient_loading
        self.activation_checkpointing = self.recomputes = activation_checkpointing
        self.state_dict_type = state_dict_type
        self._policy: PrecisionPolicy | None = None
        self._plugin: Any = None
        self._check_options()

    def check_model(self, model: nn.Module) -> None:
        """Raise if a model cannot be sharded; touches no device.

        Raises:
            ConfigError: The model has no module of a named class or none for recomputation, nothing to train, a
                parameter without dimensions, no weights, or was sharded by another strategy.
        """
        if self._split_root(model) is not None:
            return
        super().check_model(model)
        check_trainable(model, name=self.name)
        units = self._units(model)
        reason, remedy = None, ""
        scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
        if scalars:
            reason = f"Parameters without a dimension have no rows to split ({', '.join(scalars[:3])})."
            remedy = "Give them one: torch.zeros(1) in place of torch.zeros(())."
        file_tensors = stored_in(model)
        weightless = [name for name, tensor in _tensors(model) if tensor.is_meta and name not in file_tensors]
        if weightless and (self.rank == 0 or not self.cpu_ram_efficient_loading):
            reason = f"It is on the meta device, without weights: {listed(weightless, most=3)}."
            remedy = "Build it with weights in this process, or name their files with attach_weights()."
            if self.rank > 0:
                remedy = "Set fsdp_config's cpu_ram_efficient_loading, which takes them from the first process."
        if self.activation_checkpointing and not units:
            reason = "activation_checkpointing recomputes unit by unit, and the whole model is one unit."
            remedy = "Name the repeated layers in transformer_layer_cls_to_wrap, or set min_num_params."
        if reason:
            raise ConfigError(f"Cannot train {type(model).__name__} with strategy={self.name!r}.", reason, remedy)

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Shard a model in place and create its optimizer from the shards. Collective; mutates the model.

        A model that is already sharded only gets an optimizer.

        Raises:
            ConfigError: See `check_model`; the ranks have different models; or a unit trains several dtypes.
        """
        root = self._split_root(model)
        if make_optimizer is None:
            return super().setup(root or model, None, policy)
        if root is None:
            self._check_same(model)
            self.check_model(model)
            self._policy = policy
            weights = dict(_tensors(model)) if self.is_main else {}
            self._share_out(model)
            units = self._units(model)
            check_dtypes(model, units, strategy=self.name)
            if self.auto_wrap and not units:
                logger.warning(
                    "%s is one unit, whose parameters are all gathered at once. Name its repeated layers in "
                    "transformer_layer_cls_to_wrap, or set min_num_params, to save memory.",
                    type(model).__name__,
                )
            for unit in units if self.activation_checkpointing else ():
                # Not torch's checkpoint wrapper, a module that would change the parameter names.
                unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)
            root = self._split(model, units, policy, weights)
        follower = SplitParameters.attach(root, self)
        self.follower = follower if self.world_size > 1 and isinstance(root, FSDPModule) else None
        return super().setup(root, make_optimizer, policy)

    def place(self, model: nn.Module) -> nn.Module:
        return model if self._split_root(model) is not None else super().place(model)

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the sharded model, whose forward passes are collective. Collective; mutates the buffers.

        Call `finish_forwards` after the last batch, because ranks may have different numbers of batches.
        """
        root = self._split_root(model)
        if root is None:
            return super().for_evaluation(model)
        self._share_buffers(root)
        self._start_lockstep(root, self._casting)
        return root

    def after_evaluation(self, model: nn.Module) -> None:
        super().after_evaluation(model)
        split_again(model)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
            if self.follower is not None:
                self.follower.forget_passes()

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        parameters = list(parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not grads or not all(isinstance(grad, DTensor) for grad in grads):
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        return shards.scale_down(grads, shards.norm_of(grads, norm_type), max_norm).to(self.device)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        found = shards.gather(self.own_state(model), device=self.device, keeps=self.is_main)
        return detach(found) if self.is_main else {}

    def model_shards(self, model: nn.Module) -> dict[str, Shard] | None:
        if self._split_root(model) is None or self._saves_whole():
            return None
        return shards.pieces(self.own_state(model), is_main=self.is_main)

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return shards.whole_tensors(self.own_state(model), self.device)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        model = self.unwrap(model)
        own = model.state_dict()
        split = {name: shards.split_like(value, own.get(name)) for name, value in state.items()}
        return model.load_state_dict(split, strict=strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = shards.gather(optimizer.state_dict(), device=self.device, keeps=self.is_main)
        return found if self.is_main else {}

    def optimizer_shards(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, Any], dict[str, Shard]] | None:
        if self._split_root(model) is None or self._saves_whole():
            return None
        plain, split = shards.split_optimizer(optimizer.state_dict(), lambda value: isinstance(value, DTensor))
        return plain, shards.pieces(split, is_main=self.is_main)

    def split_objects(self, states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Shard]]:
        found: dict[str, Any] = {}
        return shards.take_sharded(states, (), found), shards.pieces(found, is_main=self.is_main)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        split = {
            index: {key: shards.split_like(value, parameters[index]) for key, value in entry.items()}
            for index, entry in state["state"].items()
            if not parameters[index].is_meta  # another stage of a pipeline has it
        }
        super().load_optimizer_state(model, optimizer, {**state, "state": split})

    def accelerator_options(self) -> dict[str, Any]:
        """Return the documented plugin, always the same object: checkpoints follow its `set_state_dict_type`."""
        if self._plugin is None:
            from accelerate import FullyShardedDataParallelPlugin

            self._plugin = FullyShardedDataParallelPlugin(
                cpu_offload=self.offload,
                state_dict_type=self.state_dict_type,
                activation_checkpointing=self.activation_checkpointing,
                fsdp_version=2,
                reshard_after_forward=bool(self.reshard_after_forward),
            )
        return {**super().accelerator_options(), "fsdp_plugin": self._plugin}

    # -- implementation ------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        check_choice(self.name, layer_classes=self.layer_classes, min_num_params=self.min_num_params)

        def refuse(reason: str, remedy: str, **values: Any) -> NoReturn:
            raise ConfigError(f"Cannot use strategy={self.name!r}.", reason, remedy, **values)

        for option, choices in (("sharding", SHARDINGS), ("state_dict_type", STATE_DICT_TYPES)):
            if (value := getattr(self, option)) not in choices:
                refuse(f"There is no such {option}.", suggest(str(value), choices), **{option: value})
        if self.sharding == "no_shard" and self.offload:
            refuse("Only what is split can be offloaded.", "Use sharding='full_shard' or 'shard_grad_op'.")
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            reason = "cpu_ram_efficient_loading reads weights in one process, which sync_module_states then sends out."
            refuse(reason, "Set sync_module_states to True.")
        is_hybrid = self.sharding.startswith("hybrid")
        if self.shard_size is not None and not is_hybrid:
            refuse("shard_size belongs to a hybrid sharding.", "Use sharding='hybrid_shard', or leave it out.")
        size = self.shard_size or (read_launch().local_world_size or self.world_size)
        if is_hybrid and self.world_size > 1 and (size < 2 or self.world_size % size):
            reason = f"{self.world_size} processes cannot keep copies that {size} processes each share."
            remedy = "Start several processes, as many on each machine, or use 'full_shard'."
            refuse(reason, remedy, sharding=self.sharding, shard_size=size)
        group_size = size if is_hybrid else 1 if self.sharding == "no_shard" else self.world_size
        subgroup = self.reshard_after_forward
        if not isinstance(subgroup, bool) and (subgroup < 1 or group_size % subgroup):
            reason = f"{group_size} processes that share a copy cannot be split into groups of {subgroup}."
            remedy = "Set reshard_after_forward to true, false, or to a divisor of their number."
            refuse(reason, remedy, reshard_after_forward=subgroup)
        self._group_size = group_size

    def _units(self, model: nn.Module) -> list[nn.Module]:
        if not self.auto_wrap:
            return []
        return find_units(model, layer_classes=self.layer_classes, min_num_params=self.min_num_params)

    def _mesh(self) -> DeviceMesh:
        """Return a mesh with the dimension "shard", preceded by "replicate" if there are several replicas."""
        size = min(self._group_size, self.world_size)
        if size == self.world_size:
            return init_device_mesh(self.device_type, (size,), mesh_dim_names=("shard",))
        shape = (self.world_size // size, size)
        return init_device_mesh(self.device_type, shape, mesh_dim_names=("replicate", "shard"))

    def _split_root(self, model: nn.Module) -> nn.Module | None:
        """Return the outermost unit of a sharded model; None if the model is not sharded."""
        return model if isinstance(model, FSDPModule) else None

    def _share_out(self, model: nn.Module) -> None:
        """Share the model in other ways before it is sharded. Mutates it."""

    def _held_elsewhere(self, model: nn.Module) -> set[nn.Parameter]:
        return set()

    def _split(self, model: nn.Module, units: list[nn.Module], policy: PrecisionPolicy, weights: Any) -> nn.Module:
        """Shard a model, broadcast rank 0's whole weights if requested, and return the outermost unit."""
        mesh = self._mesh()
        offload = CPUOffloadPolicy(pin_memory=self.device_type != "cpu") if self.offload else OffloadPolicy()
        casting = self._cast_options(policy)
        for unit in units:
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=MixedPrecisionPolicy(**casting),
                offload_policy=offload,
            )
        # Return full precision from the outermost unit, because losses are computed from its outputs.
        outermost = MixedPrecisionPolicy(**casting, output_dtype=policy.param_dtype if casting else None)
        elsewhere = self._held_elsewhere(model)
        fully_shard(model, mesh=mesh, mp_policy=outermost, offload_policy=offload, ignored_params=elsewhere)
        if self.forward_prefetch:
            for module, following in pairwise(each for each in model.modules() if isinstance(each, FSDPModule)):
                module.set_modules_to_forward_prefetch([following])
        file_tensors = shards.read_stored(model, "cpu" if self.offload else self.device, elsewhere=elsewhere)
        if self.sync_module_states and self.world_size > 1:
            self._send_out(model, weights, file_tensors)
        return model

    def _cast_options(self, policy: PrecisionPolicy) -> dict[str, Any]:
        # In addition to autocast, to halve the gathered bytes. Not on the CPU, where autocast does not cast some
        # operations (layer_norm), which then fail if a float32 buffer meets a cast parameter.
        if policy.autocast and self.device_type != "cpu":
            return {"param_dtype": policy.compute_dtype, "reduce_dtype": policy.reduce_dtype}
        return {}

    def _send_out(self, model: nn.Module, weights: Mapping[str, torch.Tensor], file_tensors: Mapping[str, Any]) -> None:
        """Broadcast rank 0's other parameters and buffers, one tensor at a time; each rank keeps its shards."""
        if not self._held_elsewhere(model) and any(tensor.is_meta for _, tensor in _tensors(model)):
            model.to_empty(device="cpu" if self.offload else self.device)
        with torch.no_grad():
            for name, tensor in _tensors(model):
                if name in file_tensors:
                    continue
                if self.is_main:
                    source = weights[name].to(self.device).contiguous()
                else:
                    source = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                dist.broadcast(source, src=0)
                tensor.copy_(shards.split_like(source, tensor))

    def _casting(self) -> torch.autocast:
        policy = self._policy
        assert policy is not None
        return torch.autocast(self.device_type, dtype=policy.compute_dtype, enabled=policy.autocast)

    def _saves_whole(self) -> bool:
        chosen = self.state_dict_type if self._plugin is None else self._plugin.state_dict_type.name
        return bool(chosen == "FULL_STATE_DICT")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())
