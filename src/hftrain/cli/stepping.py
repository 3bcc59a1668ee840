"""Look at a step of a run: what it begins with, and its numbers; or do it with what another one began with."""

from __future__ import annotations

import bdb
import pdb
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.cli.rounding import Perturb
from hftrain.core.errors import check_known
from hftrain.core.seed import capture_rng, restore_rng
from hftrain.core.tree import map_tensors
from hftrain.extras.flight.fingerprint import of_tensor
from hftrain.extras.flight.observing import Observer, facts_of, in_backward, in_words
from hftrain.run.journal import environment


class StepObserver(Observer):
    """Note what a step begins with and its numbers, and end the run.

    Args:
        given: The state and the micro-batches that the step begins with, in place of the run's own.
        unit: By how much all weights are then moved, see `Perturb`; None: not at all.
        at: The name of a module in whose first call a debugger opens.

    Attributes:
        begin: The state before the step, and its micro-batches.
        rows: Its numbers in the order in which they come about: of each its name, fingerprint, norm and a sum.
    """

    def __init__(
        self, step: int, trainer: Any, given: Mapping[str, Any] | None = None, *, unit: float | None = None,
        at: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(step, Path())
        self.begin, self.rows = dict[str, Any](), list[list[Any]]()
        self._trainer, self._given, self._unit, self._at = trainer, given, unit, at
        self._losses, self._norm = list[float](), None

    def wrap_parts(self, parts: Any) -> Any:
        """Give the step its micro-batches, and note its losses and its norm."""
        parts, given = super().wrap_parts(parts), self._given
        take, train, clip = parts.hooks.get_batch_samples, parts.hooks.training_step, parts.stepper.clip
        if given is not None:
            parts.progress.step = parts.state.global_step = self.step - 1
            parts.state.epoch = given["epoch"]

        def take_given(batches: Any, number: int, device: Any) -> Any:
            own = batches if given is None else iter(map_tensors(given["batches"], torch.clone))
            return take(own, number if given is None else len(given["batches"]), device)

        def train_noted(model: Any, batch: Any, num_items: Any) -> Any:
            loss = train(model, batch, num_items)
            if self._is_on:
                self._losses.append(float(loss))
            return loss

        def clip_noted() -> Any:
            self._norm = clip()
            return self._norm

        hooks = replace(parts.hooks, get_batch_samples=take_given, training_step=train_noted)
        return replace(parts, hooks=hooks, stepper=replace(parts.stepper, clip=clip_noted))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the step begins with, or put it in."""
        super().on_step_begin(args, state, control, **kwargs)
        if self._is_on:
            if self._given is not None:
                self._put_in(self._given)
            self.begin = map_tensors(self._state(), lambda each: each.detach().to("cpu", copy=True))
            if self._at is not None:
                _debug(kwargs["model"], self._at)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the numbers, and end the run."""
        if self._is_on:
            self.begin["batches"], self.rows = self.batches, self._rows()
            self.close_run()
            control.should_training_stop = True
            control.should_log = control.should_evaluate = control.should_save = False

    def _state(self) -> dict[str, Any]:
        task, parts, around = self._trainer.task, self.parts, environment(self._trainer.strategy)
        return {
            "weights": weights_of(task),
            "trained": [name for name, each in task.named_parameters() if each.requires_grad],
            "evaluating": [name for name, each in task.named_modules() if not each.training],
            "optimizer": self._trainer.strategy.optimizer_state(parts.model, parts.optimizer),
            "scaler": self._trainer.precision.state_dict(), "random": capture_rng(), "epoch": parts.state.epoch,
            "around": {**around.pop("versions"), **around, "threads": torch.get_num_threads()},
        }  # fmt: skip

    @torch.no_grad()
    def _put_in(self, given: Mapping[str, Any]) -> None:
        task, parts = self._trainer.task, self.parts
        for name, each in weights_of(task).items():
            each.copy_(given["weights"][name])
        for name, module in task.named_modules():
            module.training = name not in given["evaluating"]
        if given["optimizer"] is not None:
            state = map_tensors(given["optimizer"], torch.clone)
            self._trainer.strategy.load_optimizer_state(parts.model, parts.optimizer, state)
        self._trainer.precision.load_state_dict(given["scaler"])
        if self._unit is not None:
            Perturb(self._unit).on_train_begin(None, None, None, model=task)
        restore_rng(given["random"])

    def _rows(self) -> list[list[Any]]:
        rows = list[list[Any]]()

        def add(name: str, value: Any) -> None:
            facts = value if isinstance(value, dict) else {"bits": repr(value), "norm": value, "sum": 0.0}
            rows.append([name, facts["bits"], facts.get("norm"), facts.get("sum")])

        for name, each in self.begin["weights"].items():
            rows.append([f"{name} before the step", of_tensor(each), None, None])  # only the bits count
        for number, loss in enumerate(self._losses, 1):
            for call in self._calls:
                for facts in call["outputs"] if call["micro_batch"] == number else ():
                    add(f"micro-batch {number}, output of {call['module']} ({call['type']})", facts)
            add(f"loss of micro-batch {number}", loss)
        for call in in_backward(self._calls):
            for facts in call["gradients"]:
                add(f"micro-batch {call['micro_batch']}, {in_words(call, call, is_backward=True)}", facts)
        add("gradient norm", None if self._norm is None else float(self._norm))
        is_known = (self._given or self.begin)["optimizer"] is not None
        for name, each in weights_of(self._trainer.task).items() if is_known else ():
            before, after = self.begin["weights"][name], each.detach().cpu()
            add(f"update of {name}", facts_of(after - before if after.is_floating_point() else after))
        return rows


def weights_of(task: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a task by name."""
    return {**dict(task.named_parameters()), **dict(task.named_buffers())}


def _debug(model: nn.Module, name: str) -> None:
    """Open a debugger in the first call of a module."""
    modules: dict[str, Any] = dict(model.named_modules())
    check_known(name, modules, f"Cannot stop at {name!r}.", "The model has no such module.")
    module, forward = modules[name], modules[name].forward

    def stop(*args: Any, **kwargs: Any) -> Any:
        module.forward = forward
        outputs = pdb.runcall(forward, *args, **kwargs)
        if outputs is None:  # the user has quit
            raise bdb.BdbQuit
        return outputs

    module.forward = stop
