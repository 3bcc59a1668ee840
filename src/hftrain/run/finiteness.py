"""Go back to a checkpoint in a running training, such as if its state is not finite at a save."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from hftrain.checkpoint.fitting import restoring
from hftrain.checkpoint.manifest import checkpoint_name, read_manifest
from hftrain.checkpoint.rotation import finite_of, last_finite_name
from hftrain.checkpoint.writer import saves_at_all
from hftrain.core.errors import NonFiniteError, explain, listed
from hftrain.core.log import get_logger, warn_once
from hftrain.core.seed import preserved_rng
from hftrain.run.checkpoint_objects import CheckpointObjects
from hftrain.run.parts import RunParts

_MAX_RESTORES = 3
# Set by schedules and callbacks in an optimizer's groups: the position of a run, not what it has learned.
_SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "weight_decay", "max_lr", "min_lr")

logger = get_logger(__name__)


class Rewind:
    """Go back to what the run had learned at a checkpoint; its position in the plan and the data goes on."""

    def __init__(self, parts: RunParts, objects: CheckpointObjects) -> None:
        self._parts, self._objects = parts, objects

    def between_steps(self, finish_writes: Callable[[], None]) -> Callable[[], Path | None] | None:
        """Return the function for a loop; None if no checkpoint of this run can be loaded while it trains."""
        parts = self._parts
        has_whole = saves_at_all(parts.args, parts.save_policy) and not parts.args.save_only_model
        if not (has_whole and parts.strategy.restores_in_a_run):
            return None

        def rewind() -> Path | None:
            finish_writes()
            return self()

        return rewind

    def __call__(self) -> Path | None:
        """Load weights, optimizers and loss scale from the run's newest finite checkpoint that was planned; collective.

        Returns:
            The checkpoint; None if there is none yet, and nothing was changed.
        """
        parts, strategy = self._parts, self._parts.strategy
        can_restore = finite_of(parts.manager.run_id)
        newest = parts.manager.latest(lambda each: each.is_planned and can_restore(each)) if strategy.is_main else None
        folder = parts.output.share(newest, is_on_each_node=parts.args.save_on_each_node)
        if folder is None:
            return None
        was_trained = {id(p): p.requires_grad for p in parts.model.parameters()}
        parts.trained.go_back(read_manifest(folder).facts)
        self._objects.go_back(folder)
        with preserved_rng(), self._schedules_go_on(), restoring(folder):
            parts.hooks.load_from_checkpoint(str(folder))
            parts.hooks.load_optimizer_and_scheduler(str(folder))
        optimized_ids, frozen_names = self._objects.parameter_ids(), []
        for name, parameter in parts.model.named_parameters():
            # Whether a parameter trains that an optimizer still has is the position of the run, like its rate.
            if id(parameter) in optimized_ids:
                parameter.requires_grad_(was_trained[id(parameter)])
            elif was_trained[id(parameter)] and not parameter.requires_grad:
                frozen_names.append(name)
        if strategy.is_main:
            logger.warning(
                "Restored weights and optimizer from %s at step %d. The run continues with the next batches.%s",
                *(folder.name, parts.state.global_step),
                f" Frozen again, as in that checkpoint: {', '.join(frozen_names)}." if frozen_names else "",
            )
        return folder

    @contextmanager
    def _schedules_go_on(self) -> Iterator[None]:
        """Restore the current state of schedules after optimizers and schedules were loaded."""
        saved_objects, schedule = self._objects.saved_objects(), self._parts.trainer.lr_scheduler
        optimizers = [each for each in saved_objects if isinstance(each, torch.optim.Optimizer)]
        settings_of_groups = [
            [{name: copy.deepcopy(group[name]) for name in _SCHEDULED if name in group} for group in each.param_groups]
            for each in optimizers
        ]
        schedules: list[Any] = [each for each in saved_objects if isinstance(each, LRScheduler)]
        schedules += [] if schedule is None else [schedule]
        states = [copy.deepcopy(each.state_dict()) for each in schedules]
        yield
        for optimizer, saved_groups in zip(optimizers, settings_of_groups, strict=True):
            for group, settings in zip(optimizer.param_groups, saved_groups, strict=True):
                group.update(settings)
        for schedule, state in zip(schedules, states, strict=True):
            schedule.load_state_dict(state)


class Finiteness:
    """Check weights and losses once per save, and act as the policy says. Steps cost nothing.

    Losses count unless the precision is fp16, whose scaler skips the updates of losses that overflow.
    """

    def __init__(self, parts: RunParts, rewind: Rewind) -> None:
        self._parts, self._rewind = parts, rewind
        self._policy = parts.save_policy.on_nonfinite
        self._is_finite = True
        # The steps of this session at whose saves a weight or loss was not finite.
        self.found_steps: list[int] = []
        # Losses until the last planned save, and those since then that are not finite, over all processes.
        self._num_losses = self._num_open_losses = self._num_restores = 0
        if self._policy != "warn" and not saves_at_all(parts.args, parts.save_policy) and parts.strategy.is_main:
            warn_once(
                f"SavePolicy(on_nonfinite={self._policy!r}) acts at saves, and save_strategy='no' plans none. Set "
                "save_strategy, or every_s."
            )
        # The step of the last check, and of the last one that found everything finite.
        self._checked_step = self._finite_step = parts.progress.step

    def state_dict(self) -> dict[str, Any]:
        """Return the facts for the manifest."""
        facts = {"is_finite": self._is_finite, "restored_in_a_row": self._num_restores}
        return facts | ({"nonfinite_losses": self._num_open_losses} if self._num_open_losses else {})

    def load_state_dict(self, facts: Mapping[str, Any]) -> None:
        """Restore the facts of a manifest."""
        self._num_restores, self._num_open_losses = facts.get("restored_in_a_row", 0), facts.get("nonfinite_losses", 0)

    def begin(self) -> None:
        """Exclude the losses that the checkpoint's save has already checked, unless it was not planned."""
        self._num_losses = self._parts.losses.total_nonfinite() - self._num_open_losses * self._parts.strategy.is_main

    def check(self, *, is_planned: bool) -> None:
        """Check weights and losses, and warn, stop, or restore the last finite checkpoint; collective.

        Args:
            is_planned: Whether an uninterrupted run saves here, too. Only such a save goes back.

        Raises:
            NonFiniteError: On all processes, if the policy is to stop, or there is nothing to restore.
        """
        parts, strategy, step = self._parts, self._parts.strategy, self._parts.state.global_step
        weight_names, num_losses = self._nonfinite_names(), parts.losses.total_nonfinite() - self._num_losses
        self._num_losses += num_losses * is_planned
        self._num_open_losses = 0
        has_losses = bool(num_losses) and parts.precision.policy.name != "fp16"
        was_finite, self._is_finite = self._is_finite, strategy.all_true(not weight_names and not has_losses)
        is_later, self._checked_step = step > self._checked_step, step
        if self._is_finite:
            self._num_restores = 0 if is_later and is_planned else self._num_restores
            self._finite_step = step
            return
        self.found_steps.append(step)
        findings = strategy.gather_object([weight_names, num_losses])
        description = _describe(findings, since=self._finite_step)
        if self._policy == "warn":
            if was_finite and strategy.is_main:
                logger.warning("%s Said once until a save is finite again.", self._explain_warning(step, description))
        elif self._policy == "stop":
            raise self._make_error(step, description, "SavePolicy(on_nonfinite='stop') saves no such state.")
        elif is_planned:
            self._restore(step, description)
        else:
            self._num_open_losses = sum(number for _, number in findings)

    def _explain_warning(self, step: int, description: str) -> str:
        name = self._last_finite_name()
        reason = f"{name} is the last finite checkpoint, and stays." if name else "No checkpoint before it is finite."
        remedy = (
            "Resume from a finite checkpoint with a lower learning_rate or max_grad_norm; "
            "SavePolicy(on_nonfinite='stop') ends such a run, and 'restore' resumes it from the last finite one."
        )
        return explain(f"{checkpoint_name(step)} is not finite: {description}.", reason, remedy)

    def _make_error(self, step: int, description: str, reason: str) -> NonFiniteError:
        name = self._parts.strategy.broadcast_object(self._last_finite_name() if self._parts.strategy.is_main else None)
        start = f"Resume from {name}, the last finite one, with" if name else "Start again with"
        remedy = f"{start} a lower learning_rate or max_grad_norm" + (
            ", or let SavePolicy(on_nonfinite='restore') skip the batches." if self._policy == "stop" else "."
        )
        return NonFiniteError(f"Cannot save step {step}: {description}.", reason, remedy)

    def _last_finite_name(self) -> str | None:
        manifests = {path.name: read_manifest(path) for path in self._parts.manager.own_checkpoints()}
        return next(iter(last_finite_name(manifests)), None)

    def _restore(self, step: int, description: str) -> None:
        """Go back to the last finite checkpoint; the run continues with the next batches. Collective."""
        if self._num_restores == _MAX_RESTORES:
            raise self._make_error(step, description, f"Restoring {_MAX_RESTORES} times in a row has not helped.")
        if self._rewind() is None:
            raise self._make_error(step, description, "There is no finite checkpoint to restore.")
        if self._parts.strategy.is_main:
            logger.warning("%s saves the restored state, because it had %s.", checkpoint_name(step), description)
        self._is_finite = True
        self._num_restores += 1

    # -- checking ------------------------------------------------------------------------------------------------

    def _nonfinite_names(self) -> list[str]:
        """Return the names of weights that are not finite in this process's part; synchronises."""
        task, model = self._parts.task, self._parts.model
        parameters = (parameter for group in self._parts.optimizer.param_groups for parameter in group["params"])
        named_parameters = ((f"outside weight {index}", parameter) for index, parameter in enumerate(parameters))
        return nonfinite_names(chain(_named_tensors(model), _named_tensors(task), named_parameters))


@torch.no_grad()
def nonfinite_names(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of tensors with NaN, or with infinity if they are trained; one pass, synchronises.

    Tensors that are not trained, such as an attention mask, may contain infinity on purpose. A tensor counts under its
    first name; of a split tensor, this process's part is checked.
    """
    groups: dict[Any, list[tuple[str, bool, torch.Tensor]]] = defaultdict(list)
    seen_ids: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) not in seen_ids:
            seen_ids.add(id(tensor))
            part = _own_part(tensor)
            if part is not None:
                groups[part.device, part.dtype].append((name, tensor.requires_grad, part))
    names = []
    for group in groups.values():
        # The largest magnitude cannot overflow, unlike a sum, and it preserves NaN and infinity.
        norms = torch.stack([torch.linalg.vector_norm(part, math.inf) for *_, part in group]).tolist()
        names += [
            name
            for (name, is_trained, _), norm in zip(group, norms, strict=True)
            if norm != norm or (is_trained and math.isinf(norm))
        ]
    return names


def _own_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this process's part of a tensor; None if it has no floating-point numbers that can be checked."""
    if is_lazy(tensor):
        return None
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor).detach()  # a tensor split by ZeRO-3 is empty itself
    part = part.to_local() if hasattr(part, "to_local") else part
    is_plain = type(part) in (torch.Tensor, nn.Parameter) and part.layout is torch.strided and not part.is_meta
    has_numbers = (part.is_floating_point() and part.itemsize > 1) or part.is_complex()
    return part if is_plain and has_numbers and part.numel() else None


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _describe(findings: list[Any], *, since: int) -> str:
    """Describe what all processes have found."""
    names = list(dict.fromkeys(chain.from_iterable(weight_names for weight_names, _ in findings)))
    num_losses = sum(count for _, count in findings)
    parts = [f"NaN or infinity in {listed(names)}"] if names else []
    parts += [f"{num_losses} loss{'es' * (num_losses != 1)}"] if num_losses else []
    return f"{' and '.join(parts)}, after step {since}"
