"""The accelerator that torch has here, whatever its kind: what torch's module for it can tell and do."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hftrain.core.tree import map_tensors


def find_device_type(*, use_cpu: bool = False) -> str:
    """Return the device type to run on: torch's accelerator if there is one, unless `use_cpu` is set.

    Allocates nothing on it.
    """
    found = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def has_own_queue(device_type: str) -> bool:
    """Return whether copies from and to pinned memory may end after the call that starts them.

    Left out for MPS, whose copies from the host do not wait for each other.
    """
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device_type != "mps"


def use_device(device: torch.device) -> torch.device:
    """Make a device the current one of its kind, and return it with its index; without one, it is the current."""
    if not has_own_queue(device.type):
        return device
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def device_name(device: torch.device) -> str:
    """Return the model of a device if torch knows it, otherwise the machine's architecture."""
    read_name = getattr(_module(device.type), "get_device_name", None)
    return platform.machine() if read_name is None else str(read_name(device))


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors took on a device at once; None if torch does not count them."""
    read_peak = getattr(_module(device.type), "max_memory_allocated", None)
    return None if read_peak is None else int(read_peak(device))


def empty_cache() -> None:
    """Release the device memory in torch's cache."""
    release = getattr(_module(find_device_type()), "empty_cache", None)
    if release is not None:
        release()


def to_host(tree: Any) -> Callable[[], Any]:
    """Begin to copy the tensors of a nested structure to host memory; return a function that waits and returns them.

    Nothing waits if it is called when the device has done what was queued before, such as a step later. What changes a
    tensor meanwhile does not change its copy.
    """
    devices: set[torch.device] = set()

    def begin(tensor: torch.Tensor) -> torch.Tensor:
        if not has_own_queue(tensor.device.type):
            return tensor.detach().to("cpu", copy=True)
        devices.add(tensor.device)
        room = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
        return room.copy_(tensor.detach(), non_blocking=True)

    copies, events = map_tensors(tree, begin), []
    for device in devices:
        events.append(torch.Event(device))
        events[-1].record(torch.accelerator.current_stream(device))

    def wait() -> Any:
        for event in events:
            event.synchronize()
        return copies

    return wait


def move(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device in place; the parameters stay the same objects. Mutates the module.

    On some devices torch would replace them by new ones, which unties tied weights, and an optimizer would hold those
    from before.
    """
    probe = nn.LayerNorm(1, device="cpu")
    weight = probe.weight
    # Where all parameters are on the device, there is none to replace, but other tensors may still have to move.
    is_there = all(each.device == device for each in module.parameters())
    if is_there or probe.to(device).weight is weight:
        return module.to(device)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _module(device_type: str) -> Any:
    return getattr(torch, device_type, None)
