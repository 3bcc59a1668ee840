"""Look at every module in one step of a training."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.tree import map_tensors, tensors_of
from hftrain.extras.flight.fingerprint import tensor_fingerprint


class Observer(TrainerCallback):
    """End a run after a step, and write down what each module computed in it.

    `folder` gets, for each process, ``modules-rank0.json``, a list of the calls of modules in order (with fingerprints
    of inputs, outputs and the gradients of outputs, the largest magnitude and the norm of each, and whether all are
    finite), after them the parameters with their gradients, as each backward pass left them and as the update got them,
    and ``batches-rank0.pt``, the micro-batches.

    Args:
        step: The step, from 1.
    """

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder
        self._handles: list[Any] = []
        self._is_on = False
        self._calls: list[dict[str, Any]] = []
        # The micro-batches on the CPU, the item count that each was given, and its loss.
        self.batches: list[Any] = []
        self.num_items: list[Any] = []
        self.losses: list[Any] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def wrap_stepper(self, stepper: Any, **_: Any) -> Any:
        """Look at the gradients after each backward pass."""

        def backward(loss: torch.Tensor, **options: Any) -> None:
            stepper.backward(loss, **options)
            self._look_at_gradients()

        return replace(stepper, backward=backward)

    def wrap_parts(self, parts: Any) -> Any:
        """Keep the batches of the step, and look at the gradients that make the update."""
        self.parts, training_step, update = parts, parts.hooks.training_step, parts.stepper.step

        def update_observed() -> Any:
            self._look_at_gradients()
            return update()

        def step(model: Any, batch: Any, num_items: Any) -> Any:
            if self._is_on:
                self.batches.append(map_tensors(batch, lambda tensor: tensor.detach().cpu().clone()))
                self.num_items.append(num_items)
            loss = training_step(model, batch, num_items)
            self.losses += [loss] if self._is_on else []
            return loss

        save_nothing = partial(setattr, parts.control, "should_save", False)
        hooks = replace(parts.hooks, training_step=step, save=save_nothing)
        return replace(parts, hooks=hooks, stepper=replace(parts.stepper, step=update_observed))

    def _look_at_gradients(self) -> None:
        if self._is_on:
            empty: dict[str, Any] = {"type": "Parameter", "settings": "", "inputs": [], "outputs": []}
            for name, parameter in reversed(self._parameters):
                if parameter.grad is not None:
                    call = {"module": name, "micro_batch": len(self.batches), **empty}
                    self._calls.append({**call, "gradients": [facts_of(parameter.grad)]})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self._is_on = True
            self._parameters = list(kwargs["model"].named_parameters())
            for name, module in kwargs["model"].named_modules():
                self._handles.append(module.register_forward_hook(self._watcher(name), with_kwargs=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the step, and end the run."""
        if state.global_step == self.step:
            self.close_run()
            self.folder.mkdir(parents=True, exist_ok=True)
            rank = args.process_index
            (self.folder / f"modules-rank{rank}.json").write_text(json.dumps(self._calls, indent=1), encoding="utf-8")
            torch.save(self.batches, self.folder / f"batches-rank{rank}.pt")
            control.should_training_stop = True

    def close_run(self) -> None:
        """Stop looking."""
        self._is_on = False
        while self._handles:
            self._handles.pop().remove()

    def _watcher(self, name: str) -> Any:
        def watch(module: nn.Module, inputs: Any, options: Any, outputs: Any) -> None:
            call: dict[str, Any] = {
                "module": name or "(the model)",
                "micro_batch": len(self.batches),
                "type": type(module).__name__,
                "settings": module.extra_repr(),
                "inputs": [facts_of(tensor) for tensor in tensors_of([inputs, options])],
                "outputs": [facts_of(tensor) for tensor in tensors_of(outputs)],
                "gradients": [],
            }
            self._calls.append(call)
            for tensor in tensors_of(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(partial(_append_facts, call["gradients"]))  # type: ignore[no-untyped-call]

        return watch


def _append_facts(entries: list[dict[str, Any]], gradient: torch.Tensor | None) -> None:
    if gradient is not None:  # which compiled code calls hooks with
        entries.append(facts_of(gradient))


def own_part(tensor: Any) -> torch.Tensor:
    """Return this process's part of a tensor, detached and dense."""
    local: torch.Tensor = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local.to_dense() if local.is_sparse else local


def facts_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's shape and fingerprint, and if it has floats their largest magnitude, norm and a sum."""
    tensor = own_part(tensor)
    facts: dict[str, Any] = {"shape": list(tensor.shape), "bits": tensor_fingerprint(tensor)}
    if tensor.is_floating_point() and tensor.numel():
        flat = tensor.detach().float().nan_to_num(0.0, 0.0, 0.0).reshape(-1)  # masks hold infinities on purpose
        norm, waves = float(torch.linalg.vector_norm(flat)), torch.arange(len(flat), device=flat.device).cos()
        facts |= {"max": float(tensor.abs().max()), "norm": norm, "is_finite": bool(tensor.isfinite().all())}
        facts["sum"] = float(flat @ waves)  # of what is finite, which depends on the order of the elements
    return facts


def in_backward(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what has gradients in the order in which they come about: first those of outputs."""
    outputs = [call for call in calls if call["type"] != "Parameter"]
    return [*reversed(outputs), *(call for call in calls if call["type"] == "Parameter")]


def first_not_finite(calls: list[dict[str, Any]]) -> str | None:
    """Return which module made the first value that is not finite, in words; None if all are finite."""
    for call in calls:
        outputs, inputs = ([facts.get("is_finite", True) for facts in call[name]] for name in ("outputs", "inputs"))
        if all(inputs) and not all(outputs):
            return f"forward, {call['module']} ({call['type']})"
    for call in in_backward(calls):
        if not all(facts.get("is_finite", True) for facts in call["gradients"]):
            return in_words(call, call, is_backward=True)
    return None


Calls = list[dict[str, Any]]


class _Difference(NamedTuple):
    """The order of these is that in which differences come about: forward before backward, then by position."""

    is_backward: bool
    position: int
    words: str


def first_difference(mine: list[Calls], other: list[Calls]) -> str | None:
    """Return the first module of two observed steps whose outputs or gradients differ, in words; None if there is none.

    Forward, the first call in the order in which calls end, so a module comes before those that contain it. Backward,
    the last such call, whose gradient comes first. Named are the ranks, if not all differ in it.

    Args:
        mine: The calls of each process.
        other: Those of the other run, in as many processes.
    """
    differences = [_first_difference(*calls) for calls in zip(mine, other, strict=True)]
    first = min((difference for difference in differences if difference is not None), default=None)
    if first is None:
        return None
    ranks = [str(rank) for rank, each in enumerate(differences) if each is not None and each[:2] == first[:2]]
    is_everywhere = len(ranks) == len(differences)
    return first.words if is_everywhere else f"{first.words}, on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} only"


def _first_difference(calls: Calls, other_calls: Calls) -> _Difference | None:
    """Compare the calls of one process in both runs, forward in order, then backward."""
    for position, (call, other_call) in enumerate(zip(calls, other_calls, strict=False)):
        if (call["module"], call["type"]) != (other_call["module"], other_call["type"]):
            called = " and ".join(f"{each['module']} ({each['type']})" for each in (call, other_call))
            return _Difference(False, position, f"forward, {called} are called")
        if call["outputs"] != other_call["outputs"]:
            return _Difference(False, position, in_words(call, other_call))
    if len(calls) != len(other_calls):
        return _Difference(False, len(calls), f"forward, {len(calls)} and {len(other_calls)} calls of modules")
    for position, (call, other_call) in enumerate(zip(in_backward(calls), in_backward(other_calls), strict=True)):
        if call["gradients"] != other_call["gradients"]:
            return _Difference(True, position, in_words(innermost(call, calls), other_call, is_backward=True))
    return None


def innermost(call: dict[str, Any], calls: Calls) -> dict[str, Any]:
    """Return the first call with the same tensors: a module that returns what an inner one does ends later."""
    tensors = call["outputs"], call["gradients"]
    return next(inner for inner in calls if (inner["outputs"], inner["gradients"]) == tensors)


def in_words(call: dict[str, Any], other_call: dict[str, Any], *, is_backward: bool = False) -> str:
    """Return which call it is, and what differs in another run's call of the same module."""
    name = f"{call['module']} ({call['type']})"
    if is_backward:
        return f"backward, the gradient of {'the output of ' * (call['type'] != 'Parameter')}{name}"
    what = "" if call["settings"] == other_call["settings"] else f": {call['settings']} and {other_call['settings']}"
    return f"forward, {name}{what or (': its inputs differ already' if call['inputs'] != other_call['inputs'] else '')}"
