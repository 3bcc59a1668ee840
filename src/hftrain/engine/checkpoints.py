"""The checkpoints of an `Engine`: what is set up, sharded and registered."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hftrain.checkpoint.fitting import check_equal, check_resumable, restoring
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import read_manifest, rng_name
from hftrain.checkpoint.state_files import (
    Entry,
    Registry,
    Scope,
    as_it_is,
    capture_own,
    capture_shards,
    load_own,
    readers_of,
    restore_schedule,
    training_entries,
)
from hftrain.checkpoint.weights import load_weights, save_weights
from hftrain.checkpoint.writer import check_shared_folder
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.core.seed import restore_rng
from hftrain.core.types import Owns
from hftrain.engine.batches import ShardedBatches
from hftrain.precision.base import Precision
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
        manager, strategy, module = self._claim("save()"), self._strategy, self._strategy.unwrap(model)
        registry = self._registry(model, optimizer)
        weights = {} if strategy.model_shards(model) is not None else strategy.model_state(model)
        shared = [partial(save_weights, module, state_dict=weights), *registry.capture(as_it_is)]
        per_rank = [*capture_shards(strategy, model, optimizer), capture_own(registry.own_state(), strategy)]
        path = manager.save(step, [*per_rank, *(shared if manager.is_committer else ())], facts=registry.facts())
        manager.rotate()
        return path

    def load(self, model: nn.Module, optimizer: Optimizer, path: str | Path) -> int:
        """Restore a checkpoint and return its step. Collective."""
        folder = self._find(path)
        if folder is None:
            return 0
        manager, strategy, module = self._claim("load()"), self._strategy, self._strategy.unwrap(model)
        manifest = read_manifest(folder)
        if "batches" not in manifest.facts:
            reason, remedy = "A Trainer saved it.", "Resume it with that Trainer, or read its model.safetensors."
            raise CheckpointError(f"Cannot load {folder} into an Engine:", reason, remedy)
        with restoring(folder):
            registry, saved = self._registry(model, optimizer, folder), manifest.facts["geometry"]
            check_equal(saved, self._required_facts(optimizer), step=manifest.step)
            check_resumable(saved, self._geometry(), is_within_epoch=False, step=manifest.step)
            load_weights(module, folder, strategy=strategy)
            registry.load(Scope.WHOLE, lambda *_: folder)
            states = load_own(folder, strategy, saved)
            registry.load(Scope.RANK, states.get)
            restore_rng(states)
        manager.follow(manifest)
        return manifest.step

    def _registry(self, model: nn.Module, optimizer: Optimizer, folder: Path = Path()) -> Registry:
        """Return what a checkpoint holds besides the weights, to be saved, or to be loaded from a folder."""
        path = folder / rng_name(rank=self._strategy.rank, world_size=self._strategy.world_size)
        training_parts = self._strategy, model, optimizer, self._precision

        def position() -> dict[str, Any]:
            geometry = {**self._required_facts(optimizer), **self._geometry()}
            return {"geometry": geometry, "batches": [batches.facts() for batches in self.batches]}

        def read_precision(folder: Path) -> str:
            return str(read_manifest(folder).facts["geometry"]["precision"])

        def load_objects(states: dict[str, Any]) -> None:
            for name, stateful in self.objects.items():
                if isinstance(stateful, LRScheduler):
                    restore_schedule(path, stateful, states[name])
                else:
                    stateful.load_state_dict(states[name])

        def objects() -> dict[str, Any]:
            return {name: stateful.state_dict() for name, stateful in self.objects.items()}

        def load_batches(states: list[dict[str, Any]]) -> None:
            manifest = read_manifest(folder)
            for batches, facts, state in zip(self.batches, manifest.facts["batches"], states, strict=True):
                batches.restore(facts, state, step=manifest.step)

        return Registry(
            {
                "position": Entry(Scope.MANIFEST, position),
                **training_entries(*training_parts, read_precision=read_precision),
                "objects": Entry(Scope.RANK, objects, load_objects),
                "batches": Entry(Scope.RANK, lambda: [batches.own_state() for batches in self.batches], load_batches),
            }
        )

    def _find(self, path: str | Path) -> Path | None:
        """Return the checkpoint to load; the main process verifies it. Collective."""
        manager, folder, error = self._claim("load()"), None, None
        if self._strategy.is_main:
            try:
                folder = manager.latest() if path == "auto" else Path(path)
                if path != "auto" and manager.open(Path(path)) is None:
                    raise CheckpointError(f"{path} has no manifest. Load a checkpoint that Engine.save() wrote.")
            except CheckpointError as problem:
                error = problem
        name, reason = self._strategy.broadcast_object([folder and str(folder), error and str(error)])
        if reason:
            raise CheckpointError(reason) from error
        return name and Path(name)

    def _required_facts(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the facts that a checkpoint must match."""
        return {"optimizer": type(optimizer).__name__, "registered": [*self.objects], "shards": len(self.batches)}

    def _geometry(self) -> dict[str, Any]:
        policy = self._precision.policy
        dtype = None if Owns.CASTING in self._strategy.owns else str(policy.param_dtype)
        world = {"world_size": self._strategy.data.world_size, "readers": readers_of(self._strategy)}
        return {**world, "precision": policy.name, "weights_dtype": dtype}

    def _claim(self, call: str) -> CheckpointManager:
        manager = self._manager
        if manager is None:
            raise refused(call, "There is no folder for checkpoints.", "Pass Engine(output_dir=...).")
        if not self._is_claimed:
            check_shared_folder(manager.output_dir, self._strategy, on_each_node=manager.on_each_node)
            manager.claim()
            self._is_claimed = True
        return manager


def refused(call: str, reason: str, remedy: str) -> ConfigError:
    """Return the error for a call that cannot be done."""
    return ConfigError(f"Cannot call Engine.{call}:", reason, remedy)
