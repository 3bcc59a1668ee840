"""A simulated accelerator for torch: `load` makes the device ``"sim"`` and the module `torch.sim`.

See README.md beside this file. It uses private names of torch, which nothing else in this project may.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch


def _library(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def load() -> Any:
    """Build the device if need be, give it to this process's torch, and return `torch.sim`."""
    if hasattr(torch, "sim"):
        return torch.sim
    from support.torch_sim import module
    from support.torch_sim.build import build

    library = _library(build())
    torch.utils.rename_privateuse1_backend("sim")
    module.library = library
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend()
    module.start()
    return module

