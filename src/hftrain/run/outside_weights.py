"""What training changes and the model's files do not hold, such as the weights of a loss.

A model that saves only its adapters may have other weights that train.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hftrain.checkpoint.adapters import missing_from_adapters, saves_adapters
from hftrain.checkpoint.layout import OUTSIDE_WEIGHTS
from hftrain.core.errors import CheckpointError
from hftrain.core.log import warn_once
from hftrain.core.types import Owns
from hftrain.step.averaging import average_gradients
from hftrain.step.stepper import Stepper
from hftrain.storage.tensors import load_tensors
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule


class OutsideWeights:
    """Save them with the optimizer, and keep them equal on all processes; an engine does both itself."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._is_engines = Owns.STEP in strategy.owns
        self._is_averaged = strategy.world_size > 1 and not self._is_engines
        # By their position in the optimizer, the indices of group and parameter, or by their name in the model.
        self._by_place: dict[str, torch.Tensor] = {}
        # The same list object for the whole run; a callback may add a group.
        self.parameters: list[torch.Tensor] = []

    @torch.no_grad()
    def find(self, optimizer: torch.optim.Optimizer, task: TaskModule) -> None:
        """Find the optimizer's parameters that the task does not contain; synchronise new ones. Collective."""
        own = set(map(id, task.parameters()))
        self._by_place = {
            f"{number}.{index}": parameter
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in own
        }
        known = set(map(id, self.parameters))
        self.parameters[:] = self._by_place.values()
        self._add_beside_adapters(self._strategy.unwrap(task.model))
        for parameter in self.parameters if self._is_averaged else ():
            if id(parameter) not in known:
                # As the model's wrapper does: the values of the main process.
                value = parameter.detach() if self._strategy.is_main else torch.zeros_like(parameter)
                parameter.copy_(self._strategy.reduce(value))

    def _add_beside_adapters(self, model: Any) -> None:
        """Add what a model that saves only its adapters leaves out; a strategy that splits it saves it in parts."""
        if self._strategy.shards_model or not saves_adapters(model):
            return
        beside = missing_from_adapters(model)
        self._by_place.update(beside)
        # PEFT's own, which end in the adapter's name or encode a prompt: its files hold what an adapter needs.
        own = re.compile(rf"prompt_encoder\.|.*\.({'|'.join(map(re.escape, model.peft_config))})$")
        if lost := [name for name in beside if not own.match(name)]:
            warn_once(
                f"The files of the adapters do not hold {', '.join(lost[:3])}{' and others' * (len(lost) > 3)}, which "
                "change in training. Checkpoints hold them for a resume, but save_model() does not: list their modules "
                "in modules_to_save of the adapter's configuration, or save them yourself."
            )

    def averaging(self, stepper: Stepper) -> Stepper:
        """Return a stepper that averages the gradients before it clips, if several processes have their own."""
        if not self._is_averaged:
            return stepper

        def clip() -> Any:
            self.average()
            return stepper.clip()

        return replace(stepper, clip=clip)

    def average(self) -> None:
        """Average the gradients over all processes. Collective."""
        average_gradients(self.parameters, self._strategy)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return them by their positions in the optimizer; None if there are none to save."""
        if not self._by_place or self._is_engines:
            return None
        return {name: value.detach() for name, value in self._by_place.items()}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore them from a checkpoint's folder.

        Raises:
            CheckpointError: The parameters in the file have other shapes.
        """
        path, own = folder / OUTSIDE_WEIGHTS, self.state_dict()
        if own is None:
            return
        if not path.exists():
            warn_once(
                f"The checkpoint does not hold {len(own)} parameters that the optimizer trains and the model's files "
                "do not have, such as the weights of a loss: they start from their initial values."
            )
            return
        saved = load_tensors(path)
        if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in own.items()}:
            raise CheckpointError(
                f"Cannot restore {path}:",
                "the optimizer's parameters outside the model are not those that were saved.",
                "Use the same loss and optimizer, or start a new run.",
                saved=sorted(saved),
                optimizer=sorted(own),
            )
        for name, parameter in own.items():
            parameter.copy_(saved[name])
