"""What holds in every sound run, checked while a flight log is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch

from hftrain.core.errors import HFTrainError, listed
from hftrain.core.log import warn_once
from hftrain.extras.flight.observing import own_part

_NUM_SNAPSHOTS = 3
_UNUSED = "Nothing that was trained on uses them; freeze them with requires_grad_(False) if that is right."
_DIFFERENT_SAMPLES = (
    "Processes that hold parts of one model read different samples in step {}: the gradients are those of no batch."
)
_DIFFERENT_WEIGHTS = (
    "The processes have different weights after step {}, which replicas never have: a parameter was changed on one of "
    "them only, or they have the parameters in another order."
)
_UNCHANGED = "The optimizer does not have them, their rate is 0, or their dtype is too coarse for such updates."


class _Step(NamedTuple):
    weights: str | None
    data: tuple[int, Any]  # the epoch, and the samples of each micro-batch


class _Report(NamedTuple):
    """What one process knows of the steps since the last check; processes with one reader get the same samples."""

    problems: list[tuple[str, str]]
    steps: Mapping[int, _Step]
    reader: int


class Invariants:
    """Check a run every few steps, and warn about what does not hold, or stop the run.

    Replicas have equal weights; trained parameters change, unless their gradient is zero; processes that hold parts of
    one model read the same samples, and others different ones.

    Args:
        trained: The trained parameters with their names; empty if their values are not at hand.
        is_replicated: Whether all processes have the same weights.
    """

    def __init__(
        self, strategy: Any, parts: Any, trained: Sequence[tuple[str, torch.Tensor]], *, settings: Any,
        is_replicated: bool,
    ) -> None:  # fmt: skip
        self._strategy, self._parts, self._settings = strategy, parts, settings
        # Other stages of a pipeline look at what they hold.
        self._trained = [(name, parameter) for name, parameter in trained if not parameter.is_meta]
        self._is_replicated = is_replicated
        self._snapshots: list[tuple[int, Any]] = []
        self._reported: set[str] = set()

    def _is_due(self) -> bool:
        """Whether this step is the last one whose numbers are ready at the next check."""
        return bool((self._parts.progress.step + 2) % self._settings.flush_every == 0)

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """Before an update, note at times one weight of each parameter: that with the largest gradient at first."""
        groups = self._parts.optimizer.param_groups
        if not self._trained or not self._is_due() or all(group.get("lr") == 0 for group in groups):
            return
        first_snapshot = self._snapshots[0][1] if self._snapshots else {}
        snapshot: dict[str, Any] = {}
        for name, parameter in self._trained:
            weights, gradient = own_part(parameter).reshape(-1), parameter.grad
            if not weights.numel() or not parameter.requires_grad or (gradient is not None and gradient.is_sparse):
                continue
            if gradient is None:
                snapshot[name] = None
            elif first_snapshot.get(name) is not None:
                position = first_snapshot[name][0]
                snapshot[name] = position, weights.take(position).clone()
            else:
                magnitudes = own_part(gradient).reshape(-1).abs()
                position = magnitudes.argmax()
                snapshot[name] = position, weights.take(position).clone(), magnitudes.take(position) > 0
        if any(weight is not None for weight in snapshot.values()):  # else they are updated in the backward pass
            self._snapshots.append((self._parts.progress.step + 1, snapshot))

    def check(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Check the steps since the last time. Collective.

        Raises:
            HFTrainError: Something does not hold, and the run is to be stopped.
        """
        steps = {line["step"]: _Step(line["weights"], (line["epoch"], line["samples"])) for line in lines}
        own = list(self._find_broken_parameters()), [*steps.items()], self._strategy.data.rank
        gathered = self._strategy.gather_object(own) if self._strategy.world_size > 1 else [own]
        reports = [
            _Report(problems, {step: _Step(*fields) for step, fields in items}, reader)
            for problems, items, reader in gathered
        ]
        common = sorted(set(steps).intersection(*(report.steps for report in reports)))
        problems = [problem for report in reports for problem in report.problems]
        readers: dict[int, _Report] = {}
        for report in reports:
            first = readers.setdefault(report.reader, report)
            for step in common:
                if first.steps[step].data != report.steps[step].data:
                    problems.append(("readers", _DIFFERENT_SAMPLES.format(step)))
                if self._is_replicated and reports[0].steps[step].weights != report.steps[step].weights:
                    problems.append(("replicas", _DIFFERENT_WEIGHTS.format(step)))
        samples = {
            step: [[*chain(*filter(None, report.steps[step].data[1]))] for report in readers.values()]
            for step in common
        }
        problems += _find_equal_readers(samples)
        for kind, text in problems:
            if kind not in self._reported:
                self._reported.add(kind)
                self._report(text)

    def _report(self, text: str) -> None:
        if self._settings.on_broken == "stop":
            raise HFTrainError(text, "FlightLog(on_broken='stop') ends the run.", "Correct it, or leave on_broken out.")
        warn_once(text)

    def _find_broken_parameters(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong once three steps were noted: one alone may be an update that was skipped."""
        if len(self._snapshots) < _NUM_SNAPSHOTS:
            return
        (_, first_snapshot), *_ = self._snapshots
        steps = ", ".join(str(step) for step, _ in self._snapshots)
        weights = {name: [snapshot.get(name, ()) for _, snapshot in self._snapshots] for name in first_snapshot}
        missing = [name for name, history in weights.items() if not any(snapshot is not None for snapshot in history)]
        unchanged = [name for name, history in weights.items() if all(history) and _is_unchanged(history)]
        self._trained, self._snapshots = [], []
        if missing:
            text = f"Trained parameters had no gradient in the steps {steps}: {listed(missing, 5)}."
            yield "gradient", f"{text} {_UNUSED}"
        if unchanged:
            text = f"Trained parameters did not change between the steps {steps}: {listed(unchanged, 5)}."
            yield "weights", f"{text} {_UNCHANGED}"


def _find_equal_readers(samples: Mapping[int, Sequence[Sequence[Any]]]) -> Iterator[tuple[str, str]]:
    """Find two readers that got the same samples in all these steps; data of one sample proves nothing."""
    by_reader = list(zip(*samples.values(), strict=True))
    for reader, other in combinations(range(len(by_reader)), 2):
        distinct = set(map(str, chain.from_iterable(by_reader[reader])))
        if len(samples) > 1 and len(distinct) > 1 and by_reader[reader] == by_reader[other]:
            steps = f"{min(samples)} to {max(samples)}"
            text = f"The processes {reader} and {other} read the same samples in the steps {steps}"
            yield "copies", f"{text}: the data is not split among them."
            return


def _is_unchanged(history: Sequence[Any]) -> bool:
    """Whether a weight whose gradient was not zero was the same each time."""
    (_, first_weight, has_gradient), *later = history
    return bool(torch.stack([has_gradient, *(first_weight == entry[1] for entry in later)]).all())
