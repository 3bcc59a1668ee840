"""Which parameters a run trains: those outside of the model, and those that are unfrozen or added while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.checkpoint.manifest import OUTSIDE_WEIGHTS
from hftrain.checkpoint.weights import missing_from_adapters, saves_adapters
from hftrain.core.errors import CheckpointError, ConfigError, listed
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.types import Owns
from hftrain.optim.fused import can_fuse
from hftrain.step.stepper import Stepper, average_gradients
from hftrain.storage.shards import load_tensors
from hftrain.strategies.base import Strategy
from hftrain.task.module import TaskModule


class TrainedParameters:
    """Save what trains and the model's files do not hold, keep it equal on all processes, and follow changes.

    The model's files do not hold the weights of a loss, say, and those of an adapter leave out other weights that
    train. An engine that steps itself does all of this.

    Attributes:
        outside: What the model's files do not hold; the same list for the whole run.
    """

    def __init__(self, strategy: Strategy, task: TaskModule, read_schedule: Callable[[], Any]) -> None:
        self._strategy, self._task, self._read_schedule = strategy, task, read_schedule
        self._is_engine_owned = Owns.STEP in strategy.owns
        self._is_averaged = strategy.world_size > 1 and not self._is_engine_owned
        # By their position in the optimizer, the indices of group and parameter, or by their name in the model.
        self._outside_by_key: dict[str, torch.Tensor] = {}
        self.outside: list[torch.Tensor] = []

    # -- outside of the model ------------------------------------------------------------------------------------

    @torch.no_grad()
    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the optimizer's parameters that the task does not contain; synchronise new ones. Collective."""
        task_ids = set(map(id, self._task.parameters()))
        self._outside_by_key = {
            f"{group_index}.{index}": parameter
            for group_index, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in task_ids
        }
        former_ids = set(map(id, self.outside))
        self.outside[:] = self._outside_by_key.values()
        self._outside_by_key = {} if self._is_engine_owned else self._outside_by_key
        self._add_missing_from_adapters(self._strategy.unwrap(self._task.model))
        for parameter in self.outside if self._is_averaged else ():
            if id(parameter) not in former_ids:
                # As the model's wrapper does: the values of the main process.
                value = parameter.detach() if self._strategy.is_main else torch.zeros_like(parameter)
                parameter.copy_(self._strategy.reduce(value))

    @contextmanager
    def splitting(self, model: nn.Module, *, saves: bool) -> Iterator[None]:
        """Raise if a strategy that splits a model in the context then saves its adapters alone, and more of it trains.

        In pieces, it saves all of it.
        """
        is_unsplit = not any(hasattr(each, "placements") for each in model.parameters())
        is_checked = self._strategy.shards_model and self._strategy.is_main and is_unsplit and saves_adapters(model)
        unsaved_names = list(missing_from_adapters(model)) if is_checked and saves else []
        yield
        if self._is_engine_owned and any(hasattr(each, "ds_tensor") for each in model.parameters()):  # by ZeRO-3
            unsaved_names, self._outside_by_key = list(self._outside_by_key) if saves else [], {}
        if unsaved_names and self._strategy.model_shards(model) is None:
            raise ConfigError(
                f"Cannot save {listed(unsaved_names)}, which train next to adapters:",
                f"with full state dicts, strategy={self._strategy.name!r} saves the adapters alone, so a resumed run "
                "would start the others again.",
                "List their modules in modules_to_save of the adapter's configuration, or save in pieces: with FSDP "
                'state_dict_type="SHARDED_STATE_DICT", without stage3_gather_16bit_weights_on_model_save in ZeRO-3.',
            )

    def _add_missing_from_adapters(self, model: Any) -> None:
        """Add what a model that saves only its adapters leaves out; see `splitting` for one that is split."""
        if self._strategy.shards_model or not saves_adapters(model):
            return
        missing_parameters = missing_from_adapters(model)
        self._outside_by_key.update(missing_parameters)
        # PEFT's own, which end in the adapter's name or encode a prompt: its files hold what an adapter needs.
        adapter_pattern = re.compile(rf"prompt_encoder\.|.*\.({'|'.join(map(re.escape, model.peft_config))})$")
        if names := [name for name in missing_parameters if not adapter_pattern.match(name)]:
            warn_once(
                f"The files of the adapters do not hold {', '.join(names[:3])}{' and others' * (len(names) > 3)}, "
                "which change in training. Checkpoints hold them for a resume, but save_model() does not: list "
                "their modules in modules_to_save of the adapter's configuration, or save them yourself."
            )

    def averaging(self, stepper: Stepper) -> Stepper:
        """Return a stepper that averages the gradients before it clips, if several processes have their own."""
        if not self._is_averaged:
            return stepper

        def clip() -> Any:
            average_gradients(self.outside, self._strategy)
            return stepper.clip()

        return replace(stepper, clip=clip)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return those outside by their positions in the optimizer; None if there are none to save."""
        return {name: value.detach() for name, value in self._outside_by_key.items()} or None

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore those outside from a checkpoint's folder."""
        path, parameters = folder / OUTSIDE_WEIGHTS, self.state_dict()
        if parameters is None:
            return
        if not path.exists():
            warn_once(
                f"The checkpoint does not hold {len(parameters)} parameters that the optimizer trains and the model's "
                "files do not have, such as the weights of a loss: they start from their initial values."
            )
            return
        saved_tensors = load_tensors(path)
        saved_shapes = {name: value.shape for name, value in saved_tensors.items()}
        if saved_shapes != {name: value.shape for name, value in parameters.items()}:
            raise CheckpointError(
                f"Cannot restore {path}:",
                "the optimizer's parameters outside the model are not those that were saved.",
                "Use the same loss and optimizer, or start a new run.",
                saved=sorted(saved_tensors),
                optimizer=sorted(parameters),
            )
        for name, parameter in parameters.items():
            parameter.copy_(saved_tensors[name])

    # -- unfrozen or added during the run --------------------------------------------------------------------------

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Apply the schedule to groups that are added from now on; wraps `add_param_group` until `close`."""
        self._model, self._optimizer, self._num_groups = model, optimizer, len(optimizer.param_groups)
        self._initial_requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        if not self._is_engine_owned:
            optimizer.add_param_group = self._add_group  # type: ignore[method-assign]

    def _add_group(self, param_group: dict[str, Any]) -> None:
        type(self._optimizer).add_param_group(self._optimizer, param_group)
        *former_groups, group = self._optimizer.param_groups
        if all(p.grad is None for former_group in former_groups for p in former_group["params"]):
            # Between two steps, gradients can only be of earlier steps: of parameters that the model did not have.
            for parameter in group["params"]:
                parameter.grad = None
        if former_groups[0].get("fused") and can_fuse(type(self._optimizer), group, self._model, group["params"]):
            group["fused"] = True
        extra("added_groups").admit_group(self._read_schedule(), group)
        self.find(self._optimizer)

    def changes(self) -> dict[str, Any]:
        """Return facts for the manifest: parameters whose `requires_grad` has changed, and the added groups."""
        if self._is_engine_owned:
            return {}
        parameters, initial = dict(self._model.named_parameters()), self._initial_requires_grad
        names_by_id = {id(parameter): name for name, parameter in parameters.items()}
        requires_grad = {name: parameter.requires_grad for name, parameter in parameters.items()}
        changed = {name: trains for name, trains in requires_grad.items() if trains != initial.get(name, trains)}
        groups = self._optimizer.param_groups[self._num_groups :]
        names = [[names_by_id.get(id(parameter)) for parameter in group["params"]] for group in groups]
        facts = {"requires_grad": changed, "added_groups": names, "num_groups": self._num_groups if names else 0}
        return {name: value for name, value in facts.items() if value}

    def repeat(self, facts: Mapping[str, Any]) -> None:
        """Repeat the changes that a manifest records, so that the optimizer's state fits; skip existing groups."""
        parameters = dict(self._model.named_parameters())
        for name, requires_grad in facts.get("requires_grad", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(requires_grad)
        num_existing = max(0, len(self._optimizer.param_groups) - facts.get("num_groups", 0))
        for names in facts.get("added_groups", [])[num_existing:]:
            if missing_names := [str(name) for name in names if name not in parameters]:
                raise CheckpointError(
                    "A run was resumed that had added a group of parameters to its optimizer.",
                    f"Some are not in the model under the name they had ({', '.join(missing_names[:3])}).",
                    "Add the group before the run begins: override create_optimizer, or pass optimizers=(...).",
                )
            self._optimizer.add_param_group({"params": [parameters[name] for name in names]})

    def go_back(self, facts: Mapping[str, Any]) -> None:
        """Undo the changes since a checkpoint of this run, with these facts, so that its optimizer's state fits."""
        if self._is_engine_owned:
            return
        num_groups = facts.get("num_groups", self._num_groups) + len(facts.get("added_groups", []))
        extra("added_groups").dismiss_groups(self._optimizer, [self._read_schedule()], num=num_groups)
        self.find(self._optimizer)
        self.repeat({**facts, "requires_grad": self._initial_requires_grad | facts.get("requires_grad", {})})

    def close(self) -> None:
        """Restore the optimizer's `add_param_group`; safe to call twice."""
        vars(self._optimizer).pop("add_param_group", None)
