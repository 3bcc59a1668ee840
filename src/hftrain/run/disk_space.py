"""Disk space for a run's checkpoints: how much one needs, and the check before the first step."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.adapters import saves_adapters
from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.core.tree import map_tensors
from hftrain.run.parts import RunParts
from hftrain.storage.space import free_bytes, readable_bytes
from hftrain.storage.tensors import tensor_identity
from hftrain.strategies.base import Strategy
from hftrain.task.module import task_state

logger = get_logger(__name__)

# For files other than tensors (configurations, a vocabulary, the log history) and file system overhead.
_ALLOWANCE, _ALLOWANCE_BYTES = 1.01, 1 << 20


def checkpoint_bytes(parts: RunParts, *, is_first: bool = False) -> int:
    """Return the approximate bytes of a checkpoint on the disk of this process's committer. Collective; synchronises.

    Args:
        is_first: Whether to add the expected size of the optimizer's state, before its first step.
    """
    args, strategy, model, optimizer = parts.args, parts.strategy, parts.wrapped, parts.optimizer
    own = 0
    shards = strategy.model_shards(model)
    if shards is not None:
        own += tree_bytes(shards)
    elif args.should_save:
        own += _whole_bytes(strategy, model)
    if args.should_save:
        own += tree_bytes(task_state(parts.task))
    if not args.save_only_model:
        split = strategy.optimizer_shards(model, optimizer)
        if split is not None:
            own += tree_bytes(split[1])
        elif args.should_save:
            own += tree_bytes(optimizer.state_dict())
        if is_first and args.should_save:
            own += expected_state_bytes(optimizer)
    total = own
    if not args.save_on_each_node:
        total = int(strategy.reduce(torch.tensor(own, dtype=torch.int64, device=strategy.device), op="sum"))
    return int(total * _ALLOWANCE) + _ALLOWANCE_BYTES


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all tensors in a nested structure, each counted once; split tensors count in full."""
    sizes: dict[Any, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor_identity(tensor) or id(tensor)] = tensor.numel() * tensor.element_size()
        return tensor

    kept = map_tensors(tree, note)  # keeps all tensors alive, so that no identity is reused while counting
    del kept
    return sum(sizes.values())


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that the state of a torch optimizer will have after a step; 0 for other optimizers.

    Measured on a small parameter with the same settings.
    """
    if hasattr(optimizer, "members"):
        return sum(map(expected_state_bytes, optimizer.members.values()))
    if not type(optimizer).__module__.startswith("torch.optim.") or optimizer.state:
        return 0
    sample = nn.Parameter(torch.zeros(32, 32))
    sample.grad = torch.zeros_like(sample)
    # Some defaults are set by the class and are not arguments.
    names = optimizer.defaults.keys() & inspect.signature(type(optimizer)).parameters.keys()
    try:
        twin = type(optimizer)([sample], **{name: optimizer.defaults[name] for name in names})
        twin.step()
    except Exception as error:
        logger.info("The size of the state of %s is not known before its first step: %r", type(optimizer), error)
        return 0
    ratio = tree_bytes(dict(twin.state[sample])) / tree_bytes([sample])
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    return int(ratio * tree_bytes(trained))


def check_room(parts: RunParts) -> None:
    """Raise before the first step if another run uses the output folder, or no checkpoint fits. Collective.

    Leftovers of killed saves are deleted first, because they take space. A resumed run that already has a checkpoint
    there may continue, unless its policy is to stop when the disk is full.

    Raises:
        ConfigError: Another run saves to the folder, or there is not enough space for a checkpoint.
    """
    manager = parts.manager
    manager.claim()
    num_bytes, may_wait = checkpoint_bytes(parts, is_first=True), parts.save_policy.on_full_disk != "stop"
    is_enough, free = True, 0
    if manager.is_committer:
        free = free_bytes(manager.output_dir)
        logger.info("A checkpoint takes about %s; %s are free.", readable_bytes(num_bytes), readable_bytes(free))
        is_enough = free >= num_bytes or (may_wait and bool(manager.own_checkpoints()))
    if not manager.group.all_true(is_enough):
        found = f"{readable_bytes(free)} are free there" if manager.is_committer else "there is less room"
        raise ConfigError(
            f"Cannot save checkpoints to {manager.output_dir}.",
            f"One takes about {readable_bytes(num_bytes)}, and {found}.",
            "Give an output_dir with more room, or save less: save_only_model=True, or save_strategy='no'.",
        )


def _whole_bytes(strategy: Strategy, wrapped: nn.Module) -> int:
    """Return the bytes of a model that is saved whole, without its state dict, which may be collective."""
    model = strategy.unwrap(wrapped)
    parameters = list(model.parameters())
    if saves_adapters(model):
        return tree_bytes([parameter for parameter in parameters if parameter.requires_grad])
    # With torch's older FSDP wrapper, each process has a shard of about the same size; newer ones know the full size.
    is_in_pieces = strategy.shards_model and not any(hasattr(parameter, "placements") for parameter in parameters)
    return tree_bytes([*parameters, *model.buffers()]) * (strategy.world_size if is_in_pieces else 1)
