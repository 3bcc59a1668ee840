"""Private names of other packages that have no public way exist in the installed versions: a new version fails here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.state import GradientState, PartialState
from arch.test_house import FOREIGN
from support.source import PACKAGE, modules
from torch import nn
from torch._C import _distributed_c10d as c10d
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
    **dict.fromkeys(("_parameters", "_call_impl", "_compiled_call_impl"), MODULE),
    "_orig_mod": source("torch._dynamo.eval_frame"),
    **dict.fromkeys(("_rcvd_idx", "_send_idx", "_timeout"), WORKERS),
    "_iterator": lambda: dir(DataLoader([1])),
    **dict.fromkeys(("_milestones", "_schedulers"), lambda: dir(sequential())),
    "_get_lr_called_within_step": lambda: dir(lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))),
    "_lazy_clone": lambda: dir(torch),
    "_dump_fr_trace_json": lambda: dir(c10d),
    # Builds for CPUs have no NCCL.
    "_dump_nccl_trace_json": lambda: dir(c10d) if dist.is_nccl_available() else ["_dump_nccl_trace_json"],
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


# What looks behind the language or another package's back, each in one file; the tests of that file are its canary.
TRICKS = {
    "_getframe(1).f_code": "core/lazy.py",  # `from package import name` alone may raise ImportError
    "gc.disable": "core/lazy.py",  # a pass over torch's objects takes as long as our imports
    "frame, level = sys._getframe": "core/log.py",  # Python before 3.12 has no skip_file_prefixes
    "f_locals": "data/workers.py",  # torch's errors name neither the samples nor the worker's batch
    "SIGCHLD": "data/workers.py",  # torch's handler raises in the midst of a save
    "_compiled_call_impl": "task/model_call.py",  # a compiled model has no other place for its call
    "pthread_kill": "preemption/signals.py",  # a blocking call of the main thread goes on otherwise
    "os._exit": "preemption/exits.py",  # a collective whose partner is gone never ends
    "_shared_state": "core/accelerate_state.py",  # accelerate's state cannot be read without creating it
}


@pytest.mark.parametrize("trick", TRICKS)
def test_trick_stands_in_one_file(trick: str) -> None:
    files = [str(module.path.relative_to(PACKAGE)) for module in modules() if trick in module.path.read_text("utf-8")]
    assert files == [TRICKS[trick]]
