"""Several named optimizers that a run treats as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError

_NAME_KEY, _COUNT_KEY = "optimizer", "num_updates"


class Optimizers(Optimizer):
    """Step several optimizers together; its groups and states are theirs.

    Each group records the name of its optimizer and, as ``num_updates``, how often it has stepped; so do checkpoints.

    Args:
        members: Optimizers by name, whose parameters are disjoint.

    Raises:
        ConfigError: Two of them hold the same parameter.
    """

    schedules: Any = None

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        self.members = dict(members)
        # The norms of the gradients in the last step, before clipping, of those that stepped.
        self.norms: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._is_made = False
        holders: dict[int, str] = {}
        for name, member in self.members.items():
            for group in member.param_groups:
                group.setdefault(_COUNT_KEY, 0)
                group[_NAME_KEY] = name
                for parameter in group["params"]:
                    if (other := holders.setdefault(id(parameter), name)) != name:
                        raise ConfigError(
                            f"Cannot step {other!r} and {name!r} in one run:",
                            f"both optimizers hold the same parameter of shape {list(parameter.shape)}.",
                            "Give each parameter to one optimizer.",
                        )
        super().__init__([p for group in self.param_groups for p in group["params"]], {})
        self._is_made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, always in the same list."""
        self._groups[:] = chain.from_iterable(member.param_groups for member in self.members.values())
        return self._groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        """Do nothing: torch's constructor assigns, and the groups are the members'."""

    @property
    def state(self) -> Any:
        """The states of all optimizers by parameter, in a new dict: reading must not add to a member's."""
        return {key: value for member in self.members.values() for key, value in member.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Do nothing; see `param_groups`."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: a group belongs to one of the optimizers."""
        if self._is_made:
            raise ConfigError(
                "Cannot add a group to several optimizers.",
                f"It would belong to one of {', '.join(self.members)}.",
                "Make all groups in configure_optimizers(); freeze their parameters until they shall train.",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all."""
        for member in self.members.values():
            member.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Step each optimizer, and count it."""
        for member in self.members.values():
            member.step(closure)
            for group in member.param_groups:
                group[_COUNT_KEY] += 1

    def measure(self) -> None:
        """Note the norm of each one's gradients; collective if they are sharded."""
        for name, member in self.members.items():
            self.norms[name] = gradient_norm(p for group in member.param_groups for p in group["params"])

    def logs(self) -> dict[str, float]:
        """Return the last norm and the number of updates of each, by name; synchronises."""
        counts = {f"num_updates/{name}": member.param_groups[0][_COUNT_KEY] for name, member in self.members.items()}
        norms = {f"grad_norm/{name}": float(self.norms[name]) for name in self.members if name in self.norms}
        return {**norms, **counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all in torch's form; parameters are numbered through."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for name, member in self.members.items():
            saved, start = member.state_dict(), sum(len(group["params"]) for group in groups)
            if not {"state", "param_groups"} <= saved.keys():
                raise ConfigError(
                    f"Cannot save the optimizer {name!r}:",
                    f"{type(member).__name__}.state_dict() has another form than torch's.",
                    "Use it as the only optimizer, or keep it from the checkpoint with save_only_model=True.",
                )
            state.update({start + key: value for key, value in saved["state"].items()})
            groups += [{**group, "params": [start + key for key in group["params"]]} for group in saved["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of all.

        Raises:
            ValueError: They are of other optimizers, or in another order.
        """
        saved = [group.get(_NAME_KEY) for group in state_dict["param_groups"]]
        expected = [group[_NAME_KEY] for group in self.param_groups]
        if saved != expected:
            raise ValueError(f"it has groups of the optimizers {saved}, and the run has {expected}, in this order")
        start = 0
        for name, member in self.members.items():
            groups = [group for group in state_dict["param_groups"] if group[_NAME_KEY] == name]
            num = sum(len(group["params"]) for group in groups)
            states = {key: value for key, value in state_dict["state"].items() if start <= key < start + num}
            member.load_state_dict({"state": states, "param_groups": groups})
            start += num


def gradient_norm(parameters: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the norm of the gradients of parameters, over all shards; collective if they are sharded."""
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    # Of a DTensor, which is not imported here because that takes long.
    whole: torch.Tensor = getattr(norm, "full_tensor", lambda: norm)()
    return whole
