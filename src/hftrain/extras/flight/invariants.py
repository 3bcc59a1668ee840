"""What holds in every sound run, checked while a flight log is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import torch

from hftrain.core.errors import HFTrainError, listed
from hftrain.core.log import warn_once
from hftrain.extras.flight.observing import own_part

_NUM_LOOKS = 3
_UNUSED = "Nothing that was trained on uses them; freeze them with requires_grad_(False) if that is right."
_APART = (
    "Processes that hold parts of one model read different samples in step {}: the gradients are those of no batch."
)
_UNEQUAL = (
    "The processes have different weights after step {}, which replicas never have: a parameter was changed on one of "
    "them only, or they have the parameters in another order."
)
_STILL = "The optimizer does not have them, their rate is 0, or their dtype is too coarse for such updates."


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
        self._trained = [(name, each) for name, each in trained if not each.is_meta]
        self._is_replicated = is_replicated
        self._looks: list[tuple[int, Any]] = []
        self._told: set[str] = set()

    def _is_due(self) -> bool:
        """Whether this step is the last one whose numbers are ready at the next check."""
        return bool((self._parts.progress.step + 2) % self._settings.flush_every == 0)

    @torch.no_grad()
    def look(self) -> None:
        """Before an update, note at times one weight of each parameter: that with the largest gradient at first."""
        groups = self._parts.optimizer.param_groups
        if not self._trained or not self._is_due() or all(group.get("lr") == 0 for group in groups):
            return
        first = self._looks[0][1] if self._looks else {}
        found: dict[str, Any] = {}
        for name, parameter in self._trained:
            weights, gradient = own_part(parameter).reshape(-1), parameter.grad
            if not weights.numel() or not parameter.requires_grad or (gradient is not None and gradient.is_sparse):
                continue
            if gradient is None:
                found[name] = None
            elif first.get(name) is not None:
                place = first[name][0]
                found[name] = place, weights.take(place).clone()
            else:
                sizes = own_part(gradient).reshape(-1).abs()
                place = sizes.argmax()
                found[name] = place, weights.take(place).clone(), sizes.take(place) > 0
        if any(each is not None for each in found.values()):  # else they are updated in the backward pass
            self._looks.append((self._parts.progress.step + 1, found))

    def check(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Check the steps since the last time. Collective.

        Raises:
            HFTrainError: Something does not hold, and the run is to be stopped.
        """
        broken = list(self._broken_parameters())
        steps = [(line["step"], [line["weights"], line["epoch"], line["samples"]]) for line in lines]
        own = broken, steps, self._strategy.data.rank
        told = self._strategy.gather_object(own) if self._strategy.world_size > 1 else [own]
        found, ranks = [each for one, *_ in told for each in one], [dict(each) for _, each, _ in told]
        common = sorted(set(ranks[0]).intersection(*ranks))
        if self._is_replicated:
            unequal = (step for step in common if len({each[step][0] for each in ranks}) > 1)
            found += [("replicas", _UNEQUAL.format(step)) for step in unequal]
        firsts: dict[int, Any] = {}
        for samples, (*_, reader) in zip(ranks, told, strict=True):
            first = firsts.setdefault(reader, samples)
            found += [("readers", _APART.format(step)) for step in common if first[step][1:] != samples[step][1:]]
        batches = {step: [each[step][2] for each in firsts.values()] for step in common}
        found += _copies({step: [[*chain(*filter(None, each))] for each in ranks] for step, ranks in batches.items()})
        for kind, text in found:
            if kind not in self._told:
                self._told.add(kind)
                self._tell(text)

    def _tell(self, text: str) -> None:
        if self._settings.on_broken == "stop":
            raise HFTrainError(text, "FlightLog(on_broken='stop') ends the run.", "Correct it, or leave on_broken out.")
        warn_once(text)

    def _broken_parameters(self) -> Iterator[tuple[str, str]]:
        if len(self._looks) < _NUM_LOOKS:
            return
        (_, first), *_ = self._looks
        when = ", ".join(str(step) for step, _ in self._looks)
        found = {name: [look.get(name, ()) for _, look in self._looks] for name in first}
        without = [name for name, each in found.items() if not any(look is not None for look in each)]
        still = [name for name, each in found.items() if all(each) and _is_still(each)]
        self._trained, self._looks = [], []
        if without:
            yield "gradient", f"Trained parameters had no gradient in the steps {when}: {listed(without, 5)}. {_UNUSED}"
        if still:
            yield "weights", f"Trained parameters did not change between the steps {when}: {listed(still, 5)}. {_STILL}"


def _copies(rows: Mapping[int, Sequence[Sequence[Any]]]) -> Iterator[tuple[str, str]]:
    """Find processes that read the same samples in all these steps."""
    by_rank = list(zip(*rows.values(), strict=True))
    for one, other in combinations(range(len(by_rank)), 2):
        mine = list(chain.from_iterable(by_rank[one]))
        if len(rows) > 1 and len(set(map(str, mine))) > 1 and by_rank[one] == by_rank[other]:
            text = f"The processes {one} and {other} read the same samples in the steps {min(rows)} to {max(rows)}"
            yield "copies", f"{text}: the data is not split among them."
            return


def _is_still(looks: Sequence[Any]) -> bool:
    """Whether a weight whose gradient was not zero was the same each time."""
    (_, first, is_reached), *others = looks
    return bool(torch.stack([is_reached, *(first == each[1] for each in others)]).all())
