"""Private names of other packages: each stands in one source file, and a canary tells whether it still does its work.

A canary runs with the installed versions, so `tests-newest` shows what a new release has changed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.source import PACKAGE, Module, modules
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

from hftrain.core.parameters import attention_of, layer_hint
from hftrain.core.tree import pytree, uncompiled

# What has no public way, by the file that it stands in.
FOREIGN = {
    "extras/chunked_loss.py": {"_loss_function"},
    "extras/attaching.py": {"_keys_to_ignore_on_load_unexpected"},
    "checkpoint/weights.py": {"_keys_to_ignore_on_save"},
    "compat/accelerate_patches.py": {"_from_accelerator"},
    "core/launcher.py": {"_set_sync_gradients", "_shared_state"},
    "core/lazy.py": {"_handle_fromlist"},
    "core/parameters.py": {"_attn_implementation", "_no_split_modules"},
    "core/tree.py": {"_orig_mod", "_pytree"},
    "data/datasets.py": {"_ex_iterable"},
    "data/samplers.py": {"_distributed"},
    "data/sharding.py": {"_iterator"},
    "data/states.py": {"_utils"},
    "extras/flight/stacks.py": {"_C", "_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json"},
    "extras/flight/ledger.py": {"_fingerprint"},
    "extras/added_groups.py": {"_init_lrs", "_last_lr", "_schedulers"},
    "optim/extras/low_rank.py": {"_initialize_projector"},
    "optim/groups.py": {"_parameters"},
    "precision/autocast.py": {"_growth_tracker"},
    "extras/mistakes.py": {"_utils"},
    "strategies/checks.py": {"_is_fsdp_managed_module"},
    "strategies/deepspeed/states.py": {
        *("_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"),
        "_swappable_optimizer_subgroup",
    },
    "strategies/fsdp/units.py": {"_fsdp_param_group", "_get_fsdp_state", "_training_state"},
    "strategies/lockstep.py": {"_dynamo"},
    "strategies/mesh/blocks.py": {"_buffers"},
    "strategies/mesh/cutting.py": {"_pp_plan"},
    "strategies/trainable_parameters.py": {"_comm_hooks", "_register_comm_hook"},
    "strategies/xla.py": {"_xla_checkpointed_forward_no_kwargs", "_xla_checkpointed_forward_original"},
    "task/compilation.py": {"_dynamo", "_inductor"},
    "task/introspect.py": {"_hf_peft_config_loaded", "_tp_size"},
    "task/metric_state.py": {"_computed", "_forward_cache"},
    "task/model_call.py": {"_call_impl", "_compiled_call_impl"},
    "extras/acceleration.py": {"_mixed_precision"},
    "extras/hub/trainer_hub.py": {"_name_or_path"},
}
NAMES = set().union(*FOREIGN.values())
# Public, though they look private: of named tuples, of `os` and of `sys`.
PUBLIC = frozenset({"_replace", "_fields", "_exit", "_getframe", "_current_frames"})
OF_STRINGS = frozenset({"endswith", "startswith", "removesuffix", "removeprefix", "partition", "replace"})
# Our own names that no class defines as an attribute.
OURS = frozenset(
    {
        *("_bias_after", "_chosen_n_gpu", "_deepspeed_plugin", "_hftrain_follower", "_outside", "_shares_loss"),
        *(
            "_compilation_time",
            "_kwargs",
            "_mem_",
            "_per_second",
            "_preparation_time",
            "_runtime",
            "_time",
            "_weightless",
        ),
    }
)


def own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a file's functions and classes, and of the attributes that its classes have."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            yield from [node.attr] * isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.ClassDef):
            fields = (target for each in node.body for target in _targets(each))
            yield from (name.id for target in fields for name in ast.walk(target) if isinstance(name, ast.Name))


def _targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def private_names(module: Module) -> Iterator[str]:
    """Yield the private names that a file imports, reads or writes: as attributes, as modules, or as strings.

    A string that is the end or the beginning of others is none.
    """
    parts = {
        id(each)
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.JoinedStr, ast.BinOp))
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OF_STRINGS)
        for each in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found = node.value.split(".")
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("hftrain"):
            found = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        if all(map(str.isidentifier, found)):
            yield from (name for name in found if name.startswith("_") and name.strip("_") and not name.endswith("__"))


def test_private_name_of_another_package_stands_in_one_file() -> None:
    ours = {name for module in modules() for name in own_names(module.tree)} - NAMES
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        file = module.path.relative_to(PACKAGE).as_posix()
        for name in set(private_names(module)) - ours - set(own_names(module.tree)) - PUBLIC - OURS:
            found[file].add(name)
    assert dict(found) == FOREIGN


# -- canaries --------------------------------------------------------------------------------------------------------

CANARIES: dict[str, Callable[[], None]] = {}


def canary(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check of what some private names do."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CANARIES.update(dict.fromkeys(names, check))
        return check

    return register


@canary("_orig_mod")
def compiled_wrapper() -> None:
    model = nn.Linear(1, 1)
    assert uncompiled(torch.compile(model, backend="eager")) is model
    assert uncompiled(model) is model


@canary("_call_impl", "_compiled_call_impl")
def call_of_a_module() -> None:
    model: Any = nn.Linear(1, 1)
    assert model._compiled_call_impl is None
    model._compiled_call_impl = lambda x: model._call_impl(x) + 1
    x, seen = torch.ones(1), []
    model.register_forward_hook(lambda *_: seen.append(1))
    assert model(x) == model.forward(x) + 1
    assert seen == [1]


@canary("_parameters", "_buffers")
def slots_of_modules() -> None:
    module = nn.BatchNorm1d(1, affine=False)
    assert module._parameters == {"weight": None, "bias": None}
    assert set(module._buffers) == {"running_mean", "running_var", "num_batches_tracked"}


@canary("_handle_fromlist")
def importing_from_a_package() -> None:
    assert hasattr(importlib._bootstrap, "_handle_fromlist")  # type: ignore[attr-defined]


@canary("_growth_tracker")
def state_of_a_scaler() -> None:
    assert {"growth_interval", "_growth_tracker"} <= torch.amp.GradScaler("cpu").state_dict().keys()


@canary("_computed", "_forward_cache")
def values_that_metrics_keep() -> None:
    metric = importlib.import_module("torchmetrics").MeanMetric()
    metric(1.0)
    assert (metric._computed, metric._forward_cache) == (None, 1)
    assert metric.compute() == metric._computed == 1


@canary("_xla_checkpointed_forward_no_kwargs", "_xla_checkpointed_forward_original")
def recomputing_of_xla() -> None:
    source = inspect.getsource(pytest.importorskip("torch_xla.distributed.fsdp.utils"))
    assert all(f"m.{name}" in source for name in FOREIGN["strategies/xla.py"])


@canary("_initialize_projector")
def projector_of_apollo() -> None:
    assert hasattr(pytest.importorskip("apollo_torch").APOLLOAdamW, "_initialize_projector")


@canary("_pytree")
def nested_structures() -> None:
    leaves, spec = pytree.tree_flatten({"a": [1, (2, 3)]})
    assert leaves == pytree.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]
    spec = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert pytree.tree_unflatten([4, 5, 6], spec) == {"a": [4, (5, 6)]}
    assert pytree.tree_map(len, {"a": [1, 2]}, is_leaf=lambda each: isinstance(each, list)) == {"a": 2}


@canary("_iterator")
def loader_with_workers() -> None:
    loader: Any = DataLoader([1, 2, 3], num_workers=1, persistent_workers=True)
    passing = iter(loader)
    assert loader._iterator is passing
    workers = passing._workers
    loader._iterator = passing = None
    assert not any(worker.is_alive() for worker in workers)


@canary("_utils")
def pinning() -> None:
    pin = importlib.import_module("torch.utils.data._utils.pin_memory").pin_memory
    assert next(iter(inspect.signature(pin).parameters)) == "data"


@canary("_C", "_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json")
def flight_recorder() -> None:
    from torch._C import _distributed_c10d as c10d

    assert isinstance(json.loads(c10d._dump_fr_trace_json()), dict)  # type: ignore[attr-defined]
    assert not dist.is_nccl_available() or hasattr(c10d, "_dump_nccl_trace_json")


@canary("_last_lr", "_schedulers")
def schedules() -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts: Any = [lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) for _ in range(2)]
    whole: Any = lr_scheduler.SequentialLR(optimizer, parts, [3])
    assert (whole._schedulers, whole._last_lr) == (parts, [0.1])


@canary("_init_lrs")
def rates_of_greedy() -> None:
    kind = pytest.importorskip("transformers.optimization").GreedyLR
    assert kind(SGD(nn.Linear(1, 1).parameters(), lr=0.1))._init_lrs == [0.1]


@contextmanager
def alone() -> Iterator[None]:
    before = sys.excepthook  # which torch replaces
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = before


@canary("_comm_hooks", "_register_comm_hook")
def hooks_of_ddp() -> None:
    seen = []

    def hook(state, bucket):
        seen.append(state)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with alone():
        model: Any = DistributedDataParallel(nn.Linear(1, 1))
        model.register_comm_hook("state", hook)
        assert model._comm_hooks == [(hook, "state")]
        model.__setstate__(model.__getstate__())
        torch.distributed._register_comm_hook(model.reducer, "state", hook)  # type: ignore[attr-defined]
        model(torch.ones(1, 1)).sum().backward()
        assert seen == ["state"]


@canary("_fsdp_param_group", "_get_fsdp_state", "_training_state")
def state_of_fsdp() -> None:
    with alone():
        model: Any = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
        group = model._get_fsdp_state()._fsdp_param_group
        model(torch.ones(1, 2))
        group._training_state = type(group._training_state).IDLE
        model.reshard()
        assert isinstance(model.weight, torch.distributed.tensor.DTensor)


@canary("_is_fsdp_managed_module")
def managed_by_fsdp() -> None:
    dynamo, flag = importlib.import_module("torch.distributed.fsdp._dynamo_utils"), "_is_fsdp_managed_module = True"
    assert flag in inspect.getsource(dynamo)


@canary("_dynamo", "_inductor")
def compilers() -> None:
    from torch._dynamo import lookup_backend
    from torch._dynamo.exc import InvalidBackend
    from torch._inductor import list_mode_options

    assert callable(lookup_backend("inductor"))
    with pytest.raises(InvalidBackend):
        lookup_backend("no such back-end")
    assert {"default", "reduce-overhead"} <= set(list_mode_options())


@canary("_from_accelerator", "_mixed_precision", "_set_sync_gradients", "_shared_state")
def states_of_accelerate() -> None:
    assert isinstance(PartialState._shared_state, dict)
    assert "_from_accelerator" in inspect.signature(AcceleratorState).parameters
    assert "self._mixed_precision" in inspect.getsource(AcceleratorState)
    state: Any = GradientState()
    state._set_sync_gradients(False)
    assert not GradientState().sync_gradients
    GradientState._shared_state.clear()


@canary(
    *("_attn_implementation", "_hf_peft_config_loaded", "_loss_function", "_keys_to_ignore_on_load_unexpected"),
    *("_keys_to_ignore_on_save", "_name_or_path", "_no_split_modules", "_pp_plan", "_tp_size"),
)
def models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes))
    assert (layer_hint(model), attention_of(model)) == (["LlamaDecoderLayer"], "sdpa")
    assert (model._hf_peft_config_loaded, model._tp_size) == (False, None)
    assert not model._keys_to_ignore_on_save
    assert not model._keys_to_ignore_on_load_unexpected
    assert "lm_head" in model._pp_plan
    model.loss_function = len
    assert model._loss_function is len
    assert type(model.config)(name_or_path="there")._name_or_path == "there"


@canary("_distributed", "_ex_iterable", "_fingerprint")
def tables_of_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"a": 1}, {"a": 2}])
    assert isinstance(table._fingerprint, str)
    stream = table.to_iterable_dataset(num_shards=2)
    assert hasattr(stream, "_ex_iterable")
    share = importlib.import_module("datasets.distributed").split_dataset_by_node(stream, rank=1, world_size=2)
    assert (share._distributed.rank, share._distributed.world_size) == (1, 2)


@canary(*FOREIGN["strategies/deepspeed/states.py"])
def swapping_of_deepspeed() -> None:
    source = inspect.getsource(pytest.importorskip("deepspeed.runtime.zero.stage3"))
    assert all(f"def {name}(" in source for name in FOREIGN["strategies/deepspeed/states.py"])


def test_every_private_name_has_a_canary() -> None:
    assert set(CANARIES) == NAMES


@pytest.mark.parametrize("check", dict.fromkeys(CANARIES.values()), ids=lambda check: check.__name__)
def test_private_names_do_what_we_rely_on(check: Callable[[], None]) -> None:
    check()


# What looks behind the language or another package's back, each in one file; the tests of that file are its canary.
TRICKS = {
    "_getframe(1).f_code": "core/lazy.py",  # `from package import name` alone may raise ImportError
    "gc.disable": "core/lazy.py",  # a pass over torch's objects takes as long as our imports
    "frame, level = sys._getframe": "core/log.py",  # Python before 3.12 has no skip_file_prefixes
    "f_locals": "extras/mistakes.py",  # an error in a dataset or a collator does not name the samples
    "_compiled_call_impl": "task/model_call.py",  # a compiled model has no other place for its call
    "pthread_kill": "preemption/signals.py",  # a blocking call of the main thread goes on otherwise
    "os._exit": "preemption/grace.py",  # a collective whose partner is gone never ends
    "_shared_state": "core/launcher.py",  # accelerate's state cannot be read without creating it
}


@pytest.mark.parametrize("trick", TRICKS)
def test_trick_stands_in_one_file(trick: str) -> None:
    files = [str(module.path.relative_to(PACKAGE)) for module in modules() if trick in module.path.read_text("utf-8")]
    assert files == [TRICKS[trick]]
