"""Parameters that start to train during a run: unfrozen, or added to the optimizer as a new group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.core.errors import CheckpointError
from hftrain.core.types import Owns
from hftrain.optim.added_groups import admit_group, dismiss_groups
from hftrain.optim.fused import can_fuse
from hftrain.run.parts import Ready, RunParts


class Unfreezing:
    """Apply the schedule to added groups, and record changes since the start in checkpoints, by parameter name.

    The optimizer's `add_param_group` is wrapped until `close`, except for an engine's.
    """

    def __init__(self, parts: RunParts, ready: Ready) -> None:
        self._trainer, self._ready, self._model, self._optimizer = parts.trainer, ready, ready.model, ready.optimizer
        self._num_groups = len(ready.optimizer.param_groups)
        self._is_on = Owns.STEP not in parts.strategy.owns
        self._before = {name: p.requires_grad for name, p in ready.model.named_parameters()}
        if self._is_on:
            ready.optimizer.add_param_group = self._add  # type: ignore[method-assign]

    def _add(self, param_group: dict[str, Any]) -> None:
        type(self._optimizer).add_param_group(self._optimizer, param_group)
        *earlier, group = self._optimizer.param_groups
        if all(p.grad is None for each in earlier for p in each["params"]):
            # Between two steps, gradients can only be of earlier steps: of parameters that the model did not have.
            for parameter in group["params"]:
                parameter.grad = None
        if earlier[0].get("fused") and can_fuse(type(self._optimizer), group, self._model, group["params"]):
            group["fused"] = True
        admit_group(self._trainer.lr_scheduler, group)
        self._ready.outside.find(self._optimizer, self._ready.task)

    def state_dict(self) -> dict[str, Any]:
        """Return facts for the manifest: parameters whose `requires_grad` has changed, and the added groups."""
        if not self._is_on:
            return {}
        names = {id(p): name for name, p in self._model.named_parameters()}
        changed = {
            name: p.requires_grad
            for name, p in self._model.named_parameters()
            if p.requires_grad != self._before.get(name, p.requires_grad)
        }
        groups = self._optimizer.param_groups[self._num_groups :]
        added = [[names.get(id(p)) for p in group["params"]] for group in groups]
        facts = {"requires_grad": changed, "added_groups": added, "num_groups": self._num_groups if added else 0}
        return {name: value for name, value in facts.items() if value}

    def load_state_dict(self, facts: Mapping[str, Any]) -> None:
        """Repeat the changes of `state_dict`, so that the optimizer's state fits; existing groups are skipped.

        Raises:
            CheckpointError: A group has parameters that cannot be found by name.
        """
        parameters = dict(self._model.named_parameters())
        for name, requires_grad in facts.get("requires_grad", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(requires_grad)
        for number, names in enumerate(facts.get("added_groups", []), start=facts.get("num_groups", 0)):
            if number < len(self._optimizer.param_groups):
                continue
            missing = [str(name) for name in names if name not in parameters]
            if missing:
                raise CheckpointError(
                    "A run was resumed that had added a group of parameters to its optimizer.",
                    f"Some are not in the model under the name they had ({', '.join(missing[:3])}).",
                    "Add the group before the run begins: override create_optimizer, or pass optimizers=(...).",
                )
            self._optimizer.add_param_group({"params": [parameters[name] for name in names]})

    def go_back(self, facts: Mapping[str, Any]) -> list[str]:
        """Undo the changes since a checkpoint of this run, so that its optimizer's state fits.

        Args:
            facts: The checkpoint's, from its manifest.

        Returns:
            The names of the parameters that are no longer trained.
        """
        if not self._is_on:
            return []
        trained = [name for name, p in self._model.named_parameters() if p.requires_grad]
        num_groups = facts.get("num_groups", self._num_groups) + len(facts.get("added_groups", []))
        dismiss_groups(self._optimizer, [self._trainer.lr_scheduler], num=num_groups)
        self._ready.outside.find(self._optimizer, self._ready.task)
        self.load_state_dict({**facts, "requires_grad": self._before | facts.get("requires_grad", {})})
        parameters = dict(self._model.named_parameters())
        return [name for name in trained if not parameters[name].requires_grad]

    def close(self) -> None:
        """Restore the optimizer's `add_param_group`; safe to call twice."""
        vars(self._optimizer).pop("add_param_group", None)
