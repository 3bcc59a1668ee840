"""The checkpoints of an `Engine`: what is set up, sharded and registered."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hftrain.checkpoint import state_files
from hftrain.checkpoint.fitting import check_state, restoring
from hftrain.checkpoint.layout import OPTIMIZER, SCALER, rng_name
from hftrain.checkpoint.manager import CheckpointManager, Writer
from hftrain.checkpoint.manifest import read_manifest
from hftrain.checkpoint.shape import check_geometry, check_shape
from hftrain.checkpoint.shared_folder import check_shared_folder
from hftrain.checkpoint.weights import load_weights, save_weights
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.core.seed import capture_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns
from hftrain.engine.batches import ShardedBatches
from hftrain.optim.schedules import refresh_rate
from hftrain.precision.base import Precision
from hftrain.storage.tensors import save_containers
from hftrain.strategies.base import Strategy


class EngineCheckpoints:
    """Save and load checkpoints of a hand-written loop.

    Args:
        folder: Where they are; None for no checkpoints.
        save_total_limit: How many to keep; None keeps all.

    Attributes:
        objects: The registered objects by name.
        batches: The loaders whose position is saved.
    """

    def __init__(
        self, strategy: Strategy, precision: Precision, folder: Path | None, save_total_limit: int | None
    ) -> None:
        self._strategy, self._precision = strategy, precision
        self.objects: dict[str, Any] = {}
        self.batches: list[ShardedBatches] = []
        self._is_claimed = False
        self._manager: CheckpointManager | None = None
        if folder is not None:
            self._manager = CheckpointManager(folder, group=strategy, save_total_limit=save_total_limit)

    def close(self) -> None:
        """Close the loaders and release the folder; safe to call twice."""
        for batches in self.batches:
            batches.close()
        if self._manager is not None:
            self._manager.lock.release()

    def save(self, model: nn.Module, optimizer: Optimizer, step: int) -> Path:
        """Save a checkpoint, and delete old ones. Collective."""
        manager, strategy, scaler = self._claimed("save()"), self._strategy, self._precision.state_dict()
        bare, optimizer_state = strategy.unwrap(model), state_files.whole_state(strategy, model, optimizer)
        weights = {} if strategy.model_shards(model) is not None else strategy.model_state(model)
        own = {
            **capture_rng(),
            "batches": [batches.own_state() for batches in self.batches],
            "objects": {name: each.state_dict() for name, each in self.objects.items()},
        }
        own = map_tensors(own, torch.Tensor.cpu)
        main: list[Writer] = [
            lambda folder: save_weights(bare, folder, state_dict=weights),
            lambda folder: save_containers(optimizer_state, folder / OPTIMIZER),
        ]
        if scaler:
            main.append(lambda folder: save_containers(scaler, folder / SCALER))
        each = [
            *state_files.shard_writers(strategy, model, optimizer),
            lambda folder: state_files.save_rng(own, folder, rank=strategy.rank, world_size=strategy.world_size),
        ]
        geometry = {**self._kind(optimizer), **self._shape()}
        facts = {"geometry": geometry, "batches": [batches.facts() for batches in self.batches]}
        path = manager.save(step, main=main, each=each, facts=facts)
        manager.rotate()
        return path

    def load(self, model: nn.Module, optimizer: Optimizer, path: str | Path) -> int:
        """Restore a checkpoint and return its step. Collective."""
        folder = self._find(path)
        if folder is None:
            return 0
        manager, strategy, bare = self._claimed("load()"), self._strategy, self._strategy.unwrap(model)
        manifest = read_manifest(folder)
        if "batches" not in manifest.facts:
            reason, remedy = "A Trainer saved it.", "Resume it with that Trainer, or read its model.safetensors."
            raise CheckpointError(f"Cannot load {folder} into an Engine:", reason, remedy)
        with restoring(folder):
            saved, facts = manifest.facts["geometry"], manifest.facts["batches"]
            check_geometry(saved, self._kind(optimizer), step=manifest.step)
            check_shape(saved, self._shape(), is_within_epoch=False, step=manifest.step)
            load_weights(bare, folder, strategy=strategy)
            check = partial(
                state_files.check_engine, path=folder / OPTIMIZER, is_deepspeed=strategy.name == "deepspeed"
            )
            state_files.restore_optimizer(folder, strategy, model, optimizer, check=check)
            if saved["precision"] == self._precision.policy.name:
                state_files.restore_scaler(folder, self._precision)
            rank, world_size = strategy.rank, strategy.world_size
            own = state_files.load_own(folder, strategy, saved)
            for name, each in self.objects.items():
                _restore(folder / rng_name(rank=rank, world_size=world_size), each, own["objects"][name])
            for batches, known, state in zip(self.batches, facts, own["batches"], strict=True):
                batches.restore(known, state, step=manifest.step)
            restore_rng(own)
        manager.follow(manifest)
        return manifest.step

    def _find(self, path: str | Path) -> Path | None:
        """Return the checkpoint to load; the main process verifies it. Collective."""
        manager, found, error = self._claimed("load()"), None, None
        if self._strategy.is_main:
            try:
                found = manager.latest() if path == "auto" else Path(path)
                if path != "auto" and manager.open(Path(path)) is None:
                    raise CheckpointError(f"{path} has no manifest. Load a checkpoint that Engine.save() wrote.")
            except CheckpointError as problem:
                error = problem
        name, reason = self._strategy.broadcast_object([found and str(found), error and str(error)])
        if reason:
            raise CheckpointError(reason) from error
        return name and Path(name)

    def _kind(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the facts that a checkpoint must match."""
        return {"optimizer": type(optimizer).__name__, "registered": [*self.objects], "shards": len(self.batches)}

    def _shape(self) -> dict[str, Any]:
        policy = self._precision.policy
        dtype = None if Owns.CASTING in self._strategy.owns else str(policy.param_dtype)
        place = {"world_size": self._strategy.data.world_size, "readers": state_files.readers_of(self._strategy)}
        return {**place, "precision": policy.name, "weights_dtype": dtype}

    def _claimed(self, call: str) -> CheckpointManager:
        manager = self._manager
        if manager is None:
            raise refused(call, "There is no folder for checkpoints.", "Pass Engine(output_dir=...).")
        if not self._is_claimed:
            check_shared_folder(manager.output_dir, self._strategy, on_each_node=manager.on_each_node)
            manager.claim()
            self._is_claimed = True
        return manager


def _restore(path: Path, stateful: Any, state: dict[str, Any]) -> None:
    """Load a registered object's state; a schedule's state is validated first because its form is known."""
    if isinstance(stateful, LRScheduler):
        check_state(path, state, stateful, own=stateful.state_dict())
    stateful.load_state_dict(state)
    if isinstance(stateful, LRScheduler):
        refresh_rate(stateful)


def refused(call: str, reason: str, remedy: str) -> ConfigError:
    """Return the error for a call that cannot be done."""
    return ConfigError(f"Cannot call Engine.{call}:", reason, remedy)
