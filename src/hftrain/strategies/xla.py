"""One process that drives one or several XLA devices (TPUs), which share the batch and optionally the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hftrain.core.devices import move
from hftrain.core.errors import ConfigError, StrategyError
from hftrain.core.extras import require
from hftrain.core.launcher import read_launch
from hftrain.core.log import get_logger
from hftrain.core.seed import add_generator
from hftrain.core.tree import map_tensors
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.base import MakeOptimizer, Placed, Strategy
from hftrain.strategies.fsdp.units import check_choice, find_units

logger = get_logger(__name__)

_AXIS = "fsdp"
_REENTRANT = ("use_reentrant", True)


class XLAStrategy(Strategy):
    """Train on XLA devices through `torch_xla`, in one process.

    Operations are recorded and run when a step ends; each set of shapes is compiled once. With several devices the
    compiler distributes the work (SPMD): this process holds the whole batch, each device computes a part of it, and
    the compiler inserts one gradient exchange per step.

    `launch` starts the XLA client, which must happen before the process's first backward pass on any device.

    Args:
        place_model: Whether `setup` moves the model.
        num_devices: The required number of devices; None uses one, or all available ones with `shards`.
        shards: Also shard parameters, gradients and optimizer state over the devices.
        layer_classes: Class names of the layers that become units; None uses the model's own hint.
        min_num_params: Choose the layers by their number of parameters instead.
        recomputes: Recompute the activations of these layers in the backward pass.

    Raises:
        MissingDependencyError: torch_xla is not installed.
        ConfigError: A launcher started several processes.

    Source: the documented `tpu_num_cores`, and `fsdp_config` with `xla`, `xla_fsdp_grad_ckpt` and `xla_fsdp_v2`;
    Xu et al., GSPMD, 2021.
    """

    name = "xla"
    saves_in_background = restores_in_a_run = False

    def __init__(
        self,
        *,
        place_model: bool = True,
        num_devices: int | None = None,
        shards: bool = False,
        layer_classes: Sequence[str] | None = None,
        min_num_params: int = 0,
        recomputes: bool = False,
    ) -> None:
        require("torch_xla", feature="strategy='xla'", extra="xla")
        if read_launch().world_size > 1:
            raise ConfigError(
                "Cannot use strategy='xla'.",
                "A launcher started several processes, and one process drives all devices of a machine.",
                "Start one process; tpu_num_cores says how many devices it uses.",
                world_size=read_launch().world_size,
            )
        check_choice(self.name, layer_classes=layer_classes, min_num_params=min_num_params)
        super().__init__(torch.device("xla"), place_model=place_model)
        self.num_cores, self.shards = num_devices, shards
        self.layer_classes, self.min_num_params, self.recomputes = layer_classes, min_num_params, recomputes
        self._mesh: Any = None
        self._num_parts = 1
        self._step_end: RemovableHandle | None = None
        self._forward_start: RemovableHandle | None = None
        self._forget_generator: Callable[[], None] | None = None

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        if device_type != "xla":
            return "it runs on XLA devices only"
        if policy.loss_scaling:
            return "XLA computes in bfloat16, which needs no loss scaling; 'bf16' works"
        return None

    def check_model(self, model: nn.Module) -> None:
        if self.recomputes and not self._units(model):
            raise ConfigError(
                "Cannot use fsdp_config={'xla_fsdp_grad_ckpt': True}.",
                f"It recomputes {type(model).__name__} layer by layer, and no layers were named.",
                "Name the repeated layers in transformer_layer_cls_to_wrap, or set min_num_params.",
            )

    def launch(self) -> None:
        """Start the XLA client and select the device; a second call changes nothing.

        Using several devices switches the process to SPMD until it exits.

        Raises:
            StrategyError: There are several replicas or machines, or the number of devices differs from `num_devices`.
        """
        if self._device is not None:
            return
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        splits = self.shards or (self.num_cores or 1) > 1
        if not splits:
            _check_alone(xr.world_size(), "replicas (by torch_xla.launch or xmp.spawn)")
        elif not xr.is_spmd():
            xr.use_spmd()
        device = torch_xla.device()
        # In SPMD, requesting the device does not start the client.
        torch.zeros((), device=device)
        torch_xla.sync()
        if splits:
            _check_alone(xr.process_count(), "machines")
            self._make_mesh(xr.global_runtime_device_count())
        self._take(device)
        self._move = self._send if splits else self._move
        self._forget_generator = add_generator("xla", capture=xm.get_rng_state, restore=xm.set_rng_state)
        xm.set_rng_state(torch.initial_seed() % 2**31)

    def close(self) -> None:
        """Release the device; SPMD and the client stay active until the process exits."""
        for handle in (self._step_end, self._forward_start):
            if handle is not None:
                handle.remove()
        if self._forget_generator is not None:
            self._forget_generator()
        self._step_end = self._forward_start = self._forget_generator = None
        super().close()

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Place and optionally shard a model; create an optimizer whose `step` ends the XLA step. Mutates the model."""
        if make_optimizer is not None and self.recomputes:
            _recompute(self._units(self.unwrap(model)))
        model, optimizer = super().setup(model, make_optimizer, policy)
        if optimizer is not None:
            if self._step_end is not None:
                self._step_end.remove()
            self._step_end = optimizer.register_step_post_hook(_end_step)
        return model, optimizer

    def recompute(self, model: nn.Module, options: Mapping[str, Any]) -> Callable[[], None]:
        """Recompute the activations of a model's layers; torch's checkpoint does not support XLA devices.

        The layers are those of ``"layer_classes"``, or those that the strategy or the model's own hint names.
        """
        classes = options.get("layer_classes")
        if classes is None:
            units, missing = self._units(model), "layer of the classes in _no_split_modules"
        else:
            kinds = [classes] if isinstance(classes, (str, type)) else classes
            names = {kind if isinstance(kind, str) else kind.__name__ for kind in kinds}
            units = [module for module in model.modules() if type(module).__name__ in names]
            missing = ", ".join(sorted(names - {type(unit).__name__ for unit in units}))
        if not units or (classes is not None and missing):
            raise ConfigError(
                "Cannot use gradient_checkpointing=True on an XLA device.",
                f"It is done layer by layer there, and {type(model).__name__} has no {missing}.",
                'Name the repeated layers: gradient_checkpointing_kwargs={"layer_classes": ["Block"]}.',
            )
        ignored = sorted(key for key in options if key != "layer_classes" and (key, options[key]) != _REENTRANT)
        if ignored:
            logger.warning(
                "gradient_checkpointing_kwargs: %s has no effect on an XLA device, whose checkpoint is reentrant.",
                ", ".join(ignored),
            )
        wrapped_units = _recompute(units)

        def undo() -> None:
            for unit in wrapped_units:
                for name in ("forward", "_xla_checkpointed_forward_original", "_xla_checkpointed_forward_no_kwargs"):
                    vars(unit).pop(name, None)

        return undo

    def place(self, model: nn.Module) -> nn.Module:
        if not self.place_model:
            return model
        model = move(model, self.device)
        self._split(model)
        return model

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the module to evaluate; each of its forward passes first runs pending operations."""
        self.after_evaluation(model)
        model = self.unwrap(model)
        self._forward_start = model.register_forward_pre_hook(_end_step)
        return model

    def after_evaluation(self, model: nn.Module) -> None:
        if self._forward_start is not None:
            self._forward_start.remove()
            self._forward_start = None

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Run a micro-step separately, so that the compiled graph does not grow with the number of micro-steps."""
        yield
        _end_step()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state in host memory, with tied tensors tied. Ends no step, so RNG states do not change."""
        to_host = cache(lambda tensor: tensor.detach().cpu())
        return {name: map_tensors(value, to_host) for name, value in self.own_state(model).items()}

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        found = super().load_model_state(model, state, strict=strict)
        self._split(self.unwrap(model))
        return found

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = map_tensors(optimizer.state_dict(), torch.Tensor.cpu)
        return state

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        super().load_optimizer_state(model, optimizer, state)
        if self.shards:
            for parameter, held in optimizer.state.items():
                for value in held.values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        self._split_tensor(value)

    # -- implementation ------------------------------------------------------------------------------------------

    def _make_mesh(self, num_found: int) -> None:
        """Set the devices as the process's global mesh, which user code can read."""
        import torch_xla.distributed.spmd as spmd

        if self.num_cores not in (None, num_found):
            raise StrategyError(
                f"Cannot use tpu_num_cores={self.num_cores}.",
                f"XLA sees {num_found} devices, and uses all it sees.",
                f"Set tpu_num_cores to {num_found}, or show XLA fewer (TPU_VISIBLE_CHIPS; CPU_NUM_DEVICES).",
                PJRT_DEVICE=os.environ.get("PJRT_DEVICE"),
            )
        self._num_parts = num_found
        self._mesh = spmd.Mesh(numpy.arange(num_found), (num_found,), (_AXIS,))
        spmd.set_global_mesh(self._mesh)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Shard a batch's tensor over the devices; replicate it if it cannot be divided evenly."""
        if tensor.device.type == "xla":
            return tensor
        if not tensor.dim() or not len(tensor) or len(tensor) % self._num_parts:
            return tensor.to(self.device)
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as spmd

        spec = spmd.ShardingSpec(self._mesh, (_AXIS, *[None] * (tensor.dim() - 1)))
        result: torch.Tensor = xm.send_cpu_data_to_device([tensor], self.device, input_sharding=spec)[0]
        return result

    def _split(self, model: nn.Module) -> None:
        if self.shards:
            for parameter in model.parameters():
                self._split_tensor(parameter)

    def _split_tensor(self, tensor: torch.Tensor) -> None:
        """Shard a tensor along its longest evenly divisible dimension; without one, keep it replicated."""
        import torch_xla.distributed.spmd as spmd

        dims = [dim for dim, size in enumerate(tensor.shape) if size and size % self._num_parts == 0]
        is_split = bool(getattr(spmd.wrap_if_sharded(tensor), "sharding_spec", None))
        if not dims or tensor.device.type != "xla" or is_split:
            return
        longest = max(dims, key=lambda dim: tensor.shape[dim])
        spmd.mark_sharding(tensor, self._mesh, tuple(_AXIS if dim == longest else None for dim in range(tensor.dim())))

    def _units(self, model: nn.Module) -> list[nn.Module]:
        return find_units(model, layer_classes=self.layer_classes, min_num_params=self.min_num_params)


def _check_alone(count: int, setting: str) -> None:
    if count > 1:
        raise StrategyError(
            "strategy='xla' was launched.",
            f"There are {count} {setting}, and it drives the devices of one machine from one process.",
            "Start the script once with plain `python`, and tpu_num_cores=N to use N devices.",
            **{setting.split()[0]: count},
        )


def _recompute(units: Iterable[nn.Module]) -> list[nn.Module]:
    """Make units recompute their activations, behind a barrier against XLA's optimisation; return changed units."""
    from torch_xla.distributed.fsdp import checkpoint_module

    changed = [unit for unit in units if "forward" not in vars(unit)]
    for unit in changed:
        checkpoint_module(unit)
    return changed


def _end_step(*_: Any) -> None:
    """Submit recorded operations to the device without waiting; advances XLA's random number generator."""
    import torch_xla

    torch_xla.sync()
