"""Private names of other packages that have no public way exist in the installed versions: a new version fails here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import GradientState, PartialState
from arch.test_house import FOREIGN
from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader


def sequential() -> lr_scheduler.SequentialLR:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ConstantLR(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


def source(*modules: str) -> Callable[[], str]:
    return lambda: "".join(inspect.getsource(importlib.import_module(module)) for module in modules)


FSDP = "torch.distributed.fsdp._fully_shard"
MODULE, WORKERS = lambda: dir(nn.Linear(1, 1)), source("torch.utils.data.dataloader")
# Where each name is: an object's attributes, or the source of what cannot be made here.
WHERE: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("_buffers", "_parameters", "_call_impl", "_compiled_call_impl"), MODULE),
    "_orig_mod": source("torch._dynamo.eval_frame"),
    **dict.fromkeys(("_rcvd_idx", "_send_idx", "_timeout"), WORKERS),
    "_iterator": lambda: dir(DataLoader([1])),
    **dict.fromkeys(("_milestones", "_schedulers"), lambda: dir(sequential())),
    "_get_lr_called_within_step": lambda: dir(lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))),
    "_comm_hooks": source("torch.nn.parallel.distributed"),
    "_register_comm_hook": lambda: dir(torch.distributed),
    "_HYBRID_SHARD_ZERO2": lambda: dir(ShardingStrategy),
    "_get_fsdp_state": lambda: dir(FSDPModule),
    **dict.fromkeys(
        ("_fsdp_param_group", "_training_state"), source(f"{FSDP}._fsdp_state", f"{FSDP}._fsdp_param_group")
    ),
    "_shared_state": lambda: dir(PartialState),
    "_set_sync_gradients": lambda: dir(GradientState),
}


@pytest.mark.parametrize("name", sorted(FOREIGN["torch"] | FOREIGN["accelerate"]))
def test_private_name_is_there(name: str) -> None:
    assert name in WHERE[name](), f"torch {torch.__version__} with accelerate {accelerate.__version__} has no {name}"
