"""What holds in every sound run, checked while a flight log is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from hftrain.core.errors import HFTrainError, listed
from hftrain.core.log import warn_once
from hftrain.core.types import Owns
from hftrain.data.datasets import has_length
from hftrain.data.samplers import (
    EpochShuffleSampler,
    EvenedSampler,
    GlobalShuffleSampler,
    RankBatches,
    samplers_of,
)
from hftrain.extras.flight.observing import own_part
from hftrain.extras.flight.samples import open_batches_of

# Samplers that draw each sample once in a pass, and what shares their samples and fills up the last batches.
_ONCE = (SequentialSampler, RandomSampler, EpochShuffleSampler, GlobalShuffleSampler)
_AROUND = (BatchSampler, RankBatches, EvenedSampler)
_NUM_LOOKS = 3
_TOLERANCE = 1e-3
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

    Replicas have equal weights; trained parameters change; gradients are clipped; processes that hold parts of one
    model read the same samples, and others different ones; no sample is read twice in a pass, apart from its last step,
    which may be filled up. Each is checked only where it must hold: not of samplers that may repeat, nor of parameters
    whose gradient is zero.

    Args:
        trained: The trained parameters with their names; empty if their values are not at hand.
        is_replicated: Whether all processes have the same weights.
    """

    def __init__(
        self, strategy: Any, parts: Any, trained: Sequence[tuple[str, torch.Tensor]], *, args: Any, settings: Any,
        is_replicated: bool,
    ) -> None:  # fmt: skip
        self._strategy, self._parts, self._args, self._settings = strategy, parts, args, settings
        # Other stages of a pipeline look at what they hold.
        self._trained = [(name, each) for name, each in trained if not each.is_meta]
        self._is_replicated = is_replicated
        self._clips = Owns.CLIP not in strategy.owns
        self._looks: list[tuple[int, Any]] = []
        self._norms: list[tuple[int, Any]] = []
        self._reads = Reads()
        self._told: set[str] = set()

    def _is_due(self, times: int = 1) -> bool:
        """Whether this step is the last one whose numbers are ready at the next check, or at one of so many checks."""
        step: int = self._parts.progress.step
        every: int = self._settings.flush_every * times
        return (step + 2) % every == 0

    def clip(self) -> Any:
        """Clip the gradients, and note at the first check and each tenth one what their norm is after that."""
        stepper, limit = self._parts.stepper, self._args.max_grad_norm
        is_first = self._parts.progress.step + 2 == self._settings.flush_every
        if not (self._clips and limit and limit > 0 and (is_first or self._is_due(10))):
            return stepper.clip()
        before = self._norm()
        norm = stepper.clip()
        if before is not None and isinstance(norm, torch.Tensor):
            self._norms = [(self._parts.progress.step + 1, torch.stack([before, norm.to(before), self._norm()]))]
        return norm

    @torch.no_grad()
    def _norm(self) -> Any:
        groups = self._parts.optimizer.param_groups
        found = [each.grad for group in groups for each in group["params"] if each.grad is not None]
        if not found or any(hasattr(each, "full_tensor") for each in found[1:]) != hasattr(found[0], "full_tensor"):
            return None
        norm: Any = get_total_norm(found)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

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
        broken = [*self._broken_norms(), *self._broken_parameters()]
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
        found += self._reads.broken(
            self._parts.feed, {step: [each[step][1:] for each in firsts.values()] for step in common}
        )
        for kind, text in found:
            if kind not in self._told:
                self._told.add(kind)
                self._tell(text)

    def _tell(self, text: str) -> None:
        if self._settings.on_broken == "stop":
            raise HFTrainError(text, "FlightLog(on_broken='stop') ends the run.", "Correct it, or leave on_broken out.")
        warn_once(text)

    def _broken_norms(self) -> Iterator[tuple[str, str]]:
        for step, norms in self._norms:
            before, told, after = norms.tolist()
            limit, rounded = self._args.max_grad_norm, max(_TOLERANCE, 4 * torch.finfo(norms.dtype).eps)
            # Where another norm was clipped, or scaled gradients, nothing is known about this one.
            is_known = math.isfinite(before) and abs(before - told) <= rounded * told
            if is_known and limit and after > limit * (1 + rounded):
                yield "norm", f"The gradient norm after clipping was {after:.4g} in step {step}, above {limit}."
        self._norms = []

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


class Reads:
    """Which sample was read when in a pass."""

    def __init__(self) -> None:
        self._opening: Any = None
        self._when: Any = None
        self._held: tuple[int, Any] | None = None

    def broken(self, feed: Any, steps: Mapping[int, Sequence[Any]]) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with the samples of steps: by step, for each process the pass and its micro-batches."""
        rows = {
            step: [[sample for batch in samples for sample in batch or ()] for _, samples in each]
            for step, each in steps.items()
        }
        yield from _copies(rows)
        for step, each in steps.items():
            if (feed.num_opened, each[0][0]) != self._opening:
                self._opening, self._held = (feed.num_opened, each[0][0]), None
                num = len(feed.loader.dataset) if draws_once(feed.loader) else 0
                self._when = np.zeros(num, np.int32)
            # The last step of a pass is never looked at: it may be filled up from the start.
            if self._held is not None and len(self._when):
                yield from self._repeats(*self._held)
            self._held = step, rows[step]

    def _repeats(self, step: int, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, str]]:
        for sample in chain.from_iterable(rows):
            if self._when[sample]:
                steps = f"the steps {self._when[sample]} and {step}" if self._when[sample] != step else f"step {step}"
                text = f"Sample {sample} was read twice in a pass, in {steps}, although"
                yield "repeat", f"{text} its sampler draws each sample once."
                return
            self._when[sample] = step


def draws_once(loader: Any) -> bool:
    """Return whether a loader of map-style data is known to draw each sample once in a pass."""
    noted = open_batches_of(loader)
    if noted is None or noted.replaces or not has_length(loader.dataset):
        return False
    samplers = samplers_of(noted)
    last, num = samplers[-1], len(loader.dataset)
    is_plain = _draws_once(last) and not getattr(last, "replacement", False)
    return is_plain and len(last) <= num and all(type(part) in _AROUND or _draws_once(part) for part in samplers)


def _draws_once(sampler: Any) -> bool:
    # Not of a subclass, which may draw in another way.
    return type(sampler) in _ONCE or "draws_once" in vars(type(sampler))


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
