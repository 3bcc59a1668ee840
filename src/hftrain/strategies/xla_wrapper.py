"""torch_xla's own FSDP wrapper for a model on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError
from hftrain.core.tree import map_tensors


class WrappedModel:
    """Wrap a placed model and its units and keep track of the original parameter names. Mutates the model.

    The wrapper removes the parameters from their modules and trains a flat shard of each instead.

    Args:
        model: The model on the device.
        units: The modules to wrap separately, inner ones first.
        settings: Options of the wrapper.

    Attributes:
        bare: The model.
        root: The wrapper around it.

    Raises:
        ConfigError: A parameter is not in float32.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], settings: Mapping[str, Any]) -> None:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        dtypes = {str(parameter.dtype) for parameter in model.parameters()} - {"torch.float32"}
        if dtypes:
            raise ConfigError(
                f"strategy='xla_fsdp' was to train {type(model).__name__}.",
                f"torch_xla's wrapper takes float32 parameters only, and there are {', '.join(sorted(dtypes))}.",
                "Use precision='bf16', which computes in bfloat16, or strategy='xla_fsdp_v2'.",
            )
        self.bare = model
        self._names = list(model.state_dict(keep_vars=True))
        self._parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        shapes = {parameter: parameter.shape for parameter in self._parameters.values()}
        for unit in units:
            places = [
                (home, name) for home in model.modules() for name, child in home.named_children() if child is unit
            ]
            wrapped = XlaFullyShardedDataParallel(unit, **settings)
            for home, name in places:
                setattr(home, name, wrapped)
        self.root: Any = XlaFullyShardedDataParallel(model, **settings)
        # The wrapper records a removed parameter's shard on that parameter.
        self._piece_of: dict[Any, Any] = {parameter: parameter._sharded_param for parameter in shapes}
        self._shapes = {self._piece_of[parameter]: shape for parameter, shape in shapes.items()}
        # Restore the names from before the wrapping; parameters are no longer in their modules.
        self._buffers = {
            name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", ""): buffer
            for name, buffer in self.root.named_buffers()
        }

    def adopt(self, optimizer: Optimizer) -> None:
        """Make an optimizer of the original parameters update the shards instead; mutates it."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                piece = self._piece_of[parameter]
                group["params"][index] = piece
                if parameter in optimizer.state:
                    entry = optimizer.state.pop(parameter)
                    optimizer.state[piece] = {key: self._cut(value, piece) for key, value in entry.items()}

    def own_state(self) -> dict[str, Any]:
        """Return the state's tensors by name; tied names hold the same object."""
        return {name: self._parameters.get(name, self._buffers.get(name)) for name in self._names}

    def count_trainable(self) -> int:
        """Return the number of trainable elements."""
        return sum(shape.numel() for piece, shape in self._shapes.items() if piece.requires_grad)

    def state(self) -> dict[str, Any]:
        """Return the full state in host memory, with tied tensors tied."""
        copies: dict[int, torch.Tensor] = {}
        for tensor in self.own_state().values():
            if tensor is not None and id(tensor) not in copies:
                piece = self._piece_of.get(tensor)
                held = tensor if piece is None else piece
                copies[id(tensor)] = self._whole(held.detach().cpu(), piece)
        return {name: copies.get(id(tensor)) for name, tensor in self.own_state().items()}

    def load(self, state: Mapping[str, Any], *, strict: bool) -> Any:
        """Load a full state; return torch's missing and unexpected keys.

        Raises:
            RuntimeError: Names or shapes do not match.
        """
        own = self.own_state()
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing: {missing}; unexpected: {unexpected}")
        for name, value in state.items():
            target = own.get(name)
            if target is None or value is target:
                continue
            piece = self._piece_of.get(target)
            shape = self._shapes.get(piece, target.shape)
            if value.shape != shape:
                raise RuntimeError(f"size mismatch for {name}: {tuple(value.shape)} given, {tuple(shape)} here")
            with torch.no_grad():
                held = target if piece is None else piece
                held.copy_(self._cut(value, piece).to(held.device))
        return _IncompatibleKeys(missing, unexpected)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state in host memory, with the shapes of the original parameters."""
        state: dict[str, Any] = map_tensors(optimizer.state_dict(), torch.Tensor.cpu)
        pieces = _pieces(optimizer)
        for index, entry in state["state"].items():
            state["state"][index] = {key: self._whole(value, pieces[index]) for key, value in entry.items()}
        return state

    def fit_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return a result of `optimizer_state` with the shapes of the shards."""
        pieces = _pieces(optimizer)
        entries = {
            index: {key: self._cut(value, pieces[index]) for key, value in entry.items()}
            for index, entry in state["state"].items()
        }
        return {**state, "state": entries}

    def _whole(self, value: Any, piece: Any) -> Any:
        """Reshape a value of a shard's shape to its parameter's shape; return other values unchanged."""
        if piece is None or not isinstance(value, torch.Tensor) or value.shape != piece.shape:
            return value
        shape = self._shapes[piece]
        return value[: shape.numel()].view(shape) if value.dim() == 1 else value[: shape[0]]

    def _cut(self, value: Any, piece: Any) -> Any:
        """Reshape a value of a parameter's shape to its shard's shape, padded with zeros; others are unchanged."""
        if piece is None or not isinstance(value, torch.Tensor) or value.shape != self._shapes[piece]:
            return value
        if piece.dim() == 1:
            flat = value.detach().reshape(-1)
            return functional.pad(flat, (0, piece.numel() - flat.numel()))
        return functional.pad(value.detach(), (0, 0) * (value.dim() - 1) + (0, len(piece) - len(value)))


def _pieces(optimizer: Optimizer) -> list[Any]:
    return [piece for group in optimizer.param_groups for piece in group["params"]]
