"""What is proved of a script: the trainings that it takes, and the claims about their numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from hftrain.core.errors import listed
from hftrain.extras.prove.recording import FAULTS, FIRST_LABEL, STEPS, Leg

# By precision, relative to the largest number of a tensor, or to a part of the largest of its kind: rounding in another
# order. In float64, that of what a script computes in float32 whatever its inputs are; metrics are always such.
BOUNDS = {"fp64": 1e-6, "fp32": 1e-3, "metric": 1e-5}
_PART = 1e-4
# What comes about in a step, in this order.
STEP = ("loss", "gradient", "gradient norm", "weights", "optimizer", "learning rate")
# Of these, what transformers' Trainer shows.
SHOWN = tuple(kind for kind in STEP if kind != "gradient")
EVALUATION = ("metric", "predictions")


class Difference(NamedTuple):
    """The first number in which two trainings differ: its step, from 1, what it is, and how it differs."""

    step: int
    what: str
    how: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} {self.how}"


class Recording:
    """What a training has written down: tensors by kind, step and name, and the first one on which its ranks differ."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem.removeprefix("rank")))
        self.ranks: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        self.numbers: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self.apart: Difference | None = None
        for rank, path in enumerate(paths):
            for key, value in load_file(path.with_suffix(".safetensors")).items():
                kind, step, name = key.split("/", 2)
                first = self.numbers.setdefault((kind, int(step)), {}).setdefault(name, value)
                if self.apart is None and not torch.equal(first, value):
                    self.apart = Difference(int(step), f"{kind} {name}", f"of rank {rank} is not that of rank 0")

    def samples(self, step: int) -> list[list[str]]:
        """Return the samples that each data rank has read in a step, sorted."""
        found = {each["data_rank"]: each["samples"].get(str(step), []) for each in self.ranks}
        return [sorted(found[rank]) for rank in sorted(found)]

    @property
    def steps(self) -> list[int]:
        """The steps that it has done, from 1."""
        return sorted(map(int, self.ranks[0]["samples"]))


def compare(
    one: Recording, two: Recording, counts: Mapping[str, float], *, bound: float, kinds: Iterable[str] = STEP
) -> Difference | None:
    """Return in what a training differs first from another in the steps that both did; None if in nothing.

    `counts` are numbers by which a value may be wrong, by what they count. `bound` is relative; 0 compares to the bit.
    """
    if not (steps := [step for step in one.steps if step in two.steps]):
        return Difference(0, "no step", "was done by both")
    num_compared = 0
    for step in steps:
        if "loss" in kinds and sorted(chain(*one.samples(step))) != sorted(chain(*two.samples(step))):
            return Difference(
                step, "the samples", "are others: their order or augmentation depends on the process or batch"
            )
        for kind in kinds:
            mine, other = (each.numbers.get((kind, step), {}) for each in (one, two))
            if kind in ("weights", "optimizer") and not (mine and other):  # kept of some steps and trainings only
                continue
            largest = max((_size(each) for each in other.values()), default=0.0)
            num_compared += len(mine)
            for name in [*mine, *(other.keys() - mine.keys())]:
                if how := _difference(mine.get(name), other.get(name), counts, bound, _PART * largest):
                    return Difference(step, f"{kind} {name}".strip(), how)
    return None if num_compared else Difference(steps[0], "no number", "was written down by both")


def _size(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _difference(
    value: torch.Tensor | None, expected: torch.Tensor | None, counts: Mapping[str, float], bound: float, least: float
) -> str | None:
    """Return how a value differs from the expected one, in words; None if it does not."""
    if value is None or expected is None:
        return "is in one training only"
    if value.shape != expected.shape:
        return f"has the shape {[*value.shape]}, not {[*expected.shape]}"
    if torch.equal(value, expected) or (value.isnan().all() and expected.isnan().all()):
        return None
    if bound and _size(value - expected) <= bound * max(_size(expected), least):
        return None
    square = float((expected * expected).sum())
    ratio = float((value * expected).sum()) / square if square else math.nan
    told = [what for what, number in counts.items() if number != 1 and math.isclose(ratio, number, rel_tol=1e-6)]
    told += [
        f"1 / {what}"
        for what, number in counts.items()
        if number != 1 and math.isclose(ratio * number, 1, rel_tol=1e-6)
    ]
    reason = f" ({told[0]})" if told else ""
    if value.numel() == 1:
        return f"is {float(value):.9g}, not {float(expected):.9g}" + (f": {ratio:.6g} times{reason}" if told else "")
    if abs(ratio - 1) > 1e-3 and _size(value - ratio * expected) <= bound * _size(value):
        return f"is {ratio:.6g} times what it should be{reason}"
    return f"differs by {float((value - expected).norm()) / math.sqrt(square) if square else math.inf:.1e} of its norm"


# A unit in the last place of 1 in bfloat16. Rounding may move a training ten times as far as such a change does.
_UNIT, _FACTOR, _LEAST = 2.0**-8, 10, 1e-3
# What hftrain says of a setting that it does not support.
_REFUSALS = ("CheckpointError", "ConfigError", "StrategyError", "TaskError")
_FOUR = "one micro-batch as four"
THEIRS = "transformers"  # the leg as the script says it, by transformers' Trainer
# Why numbers of other divisions differ though nothing is wrong.
_RANDOM = {
    "draws": "The model draws random numbers in a step, others in each division",
    "random_data": "Dataset or collator draw random numbers, others in each division",
}
_DIVIDED = (
    "; a mean of means, or a loss that depends on who shares the micro-batch, as contrastive ones and batch "
    "normalization do, is another loss in each division"
)


@dataclass(frozen=True)
class Claim:
    """A line of a certificate: what was to be proved; PASS, FAIL or "not here" with this script; what was seen."""

    name: str
    status: str
    found: str


def legs_on_mesh(strategy: str, *, precision: str, is_full: bool) -> list[Leg]:
    """Return the trainings on several processes; the strategy ``"own"`` is the script's."""
    name = None if strategy == "own" else strategy
    mesh = Leg(name="mesh", strategy=name, precision=precision, evaluates=True, is_full=is_full)
    return [mesh, replace(mesh, name="mesh resumed", resume="mesh", evaluates=False)]


def legs_alone(*, precision: str, is_full: bool, data_ranks: int, batch: int, accumulation: int) -> list[Leg]:
    """Return the trainings of one process: the step of the mesh's data ranks, divided otherwise, resumed, faulty."""
    one = Leg(name="one", precision=precision, accumulation=accumulation * data_ranks, evaluates=True, is_full=is_full)
    quiet, total = replace(one, evaluates=False), batch * accumulation * data_ranks
    total = total if total % 4 == 0 else 4
    own = replace(quiet, name="own", precision="own", accumulation=accumulation, drops=True)
    fp32 = replace(quiet, name="fp32", precision="fp32")
    written = replace(own, name="as written", precision="fp32", drops=False)
    return [
        one,
        replace(quiet, name="mesh's checkpoint", resume="mesh"),
        replace(quiet, name="whole", batch=total, accumulation=1),
        replace(quiet, name="divided", batch=total // 4, accumulation=4),
        replace(one, name="evaluated in eights", eval_batch=8, steps=1),
        replace(one, name="evaluated singly", eval_batch=1, steps=1),
        own,
        replace(own, name="own resumed", resume="own"),
        fp32,
        replace(fp32, name="fp32 perturbed", unit=_UNIT),
        replace(fp32, name="bf16", precision="bf16"),
        written,
        *(replace(quiet, name=fault, fault=fault, steps=1) for fault in FAULTS),
    ]


class Proof:
    """The claims about the trainings of a script, recorded in a folder for each; `many` names the processes."""

    def __init__(self, folder: Path, many: str, precision: str) -> None:
        self._folder, self._many, self._bound = folder, many, BOUNDS[precision]
        self._read: dict[str, Recording] = {}

    def error(self, name: str) -> str:
        """Return why a leg did not come to its end; empty if it did."""
        errors = sorted((self._folder / name).glob("error-rank*.txt"))
        unfinished = "" if (self._folder / name / "rank0.json").exists() else "Its training did not end."
        return errors[0].read_text(encoding="utf-8") if errors else unfinished

    def recording(self, name: str) -> Recording:
        """Return a leg's numbers; `LookupError` with the reason if it did not come to its end."""
        if name not in self._read:
            if error := self.error(name):
                raise LookupError(error)
            self._read[name] = Recording(self._folder / name)
        return self._read[name]

    def claims(self) -> Iterator[Claim]:
        """Yield the claims, in the order of a certificate."""
        proofs: dict[str, Callable[[], Difference | str | None]] = {
            "five steps change the weights": self._moves,
            f"{self._many}: five steps as in one": partial(self._compare, "mesh", "one"),
            f"{self._many}: the same weights on each": lambda: self.recording("mesh").apart,
            f"{self._many}: each reads its own samples": self._shares,
            f"{self._many}: evaluation and predictions": partial(self._evaluations, "mesh", "one"),
            f"{self._many}: resumed there": partial(self._compare, "mesh resumed", "mesh"),
            f"{self._many}: resumed in one process": partial(self._compare, "mesh's checkpoint", "one"),
            _FOUR: partial(self._compare, "divided", "whole"),
            "evaluation in batches of 1 and 8": partial(self._evaluations, "evaluated singly", "evaluated in eights"),
            "resumed, with dropout, to the bit": partial(self._compare, "own resumed", "own", bound=0.0),
            "bf16 as fp32, up to rounding": self._rounding,
        }
        if self.recording("one").ranks[0]["shifted"]:
            proofs["labels are shifted once"] = self._shifts
        if (self._folder / THEIRS).exists():
            options: dict[str, Any] = {"kinds": SHOWN, "bound": BOUNDS["fp32"]}
            proofs["as transformers' Trainer"] = partial(self._compare, THEIRS, "as written", **options)
        for name, proof in proofs.items():
            try:
                found = proof()
            except LookupError as error:
                is_refused = str(error).partition(":")[0] in _REFUSALS
                found = str(error) if is_refused else Difference(0, "it", f"could not be run: {error}")
            status = "not here" if isinstance(found, str) else "FAIL" if found else "PASS"
            is_unexplained = isinstance(found, Difference) and found.what != "the samples" and "times" not in found.how
            why = _DIVIDED if name == _FOUR and is_unexplained else ""
            yield Claim(name, status, f"{found or ''}{why}")
        for fault in [each for each in FAULTS if each != FIRST_LABEL]:
            seen = self._seen(fault)
            yield Claim(
                f"would see on one side: {fault}",
                "PASS" if isinstance(seen, Difference) else "not here",
                str(seen),
            )

    def _moves(self) -> Difference | None:
        one = self.recording("one")
        driven = {
            name for step in one.steps for name, each in one.numbers.get(("gradient", step), {}).items() if each.any()
        }
        if lost := [name for name in self._unmoved() if name in driven]:
            how = "are as at the beginning, in spite of their gradients: build the optimizer when the model is complete"
            return Difference(STEPS, f"weights {listed(lost, most=5)}", how)
        return None if driven else Difference(STEPS, "gradients", "are 0 or missing in all steps")

    def _unmoved(self) -> list[str]:
        """Return the names of the parameters that five steps do not change."""
        first, last = (self.recording("one").numbers.get(("weights", step), {}) for step in (0, STEPS))
        return [name for name in first if torch.equal(first[name], last.get(name, first[name]))]

    def _shifts(self) -> Difference | None:
        if isinstance(self._seen(FIRST_LABEL), Difference):
            return None
        return Difference(1, "labels", "are the next tokens already, and the model shifts them again")

    def _compare(self, one: str, two: str, **options: Any) -> Difference | str | None:
        facts = self.recording("mesh").ranks[0]
        counts = {"the number of processes": facts["processes"], "the number of data ranks": facts["data_ranks"]}
        counts["the number of micro-batches"] = facts["accumulation"] * facts["data_ranks"] if one == "mesh" else 4
        found = compare(self.recording(one), self.recording(two), counts, **{"bound": self._bound, **options})
        # What a step draws is the same in the same micro-batch, see `Recorder`.
        is_drawn_alike = one in ("mesh", "mesh's checkpoint") and options.get("kinds") is not EVALUATION
        causes = [what for what in _RANDOM if self.recording("one").ranks[0][what]]
        told = next((_RANDOM[what] for what in causes if what != "draws" or not is_drawn_alike), "")
        is_same = one in ("own resumed", "mesh resumed", THEIRS)  # where the same numbers are drawn
        return f"{told}: {found}." if found and told and not is_same else found

    def _evaluations(self, one: str, two: str) -> Difference | str | None:
        if not any(kind == "metric" for kind, _ in self.recording(two).numbers):
            return "The script has no evaluation set, or its evaluation failed."
        bound = max(self._bound, BOUNDS["metric"])
        return self._compare(one, two, kinds=EVALUATION, bound=bound)

    def _shares(self) -> Difference | str | None:
        mesh = self.recording("mesh")
        if mesh.ranks[0]["data_ranks"] == 1:
            return "All of them read the same samples, because they share one model."
        if mesh.ranks[0]["random_data"]:
            return f"{_RANDOM['random_data']}."
        for step in mesh.steps:
            read, expected = Counter(chain(*mesh.samples(step))), Counter(chain(*self.recording("one").samples(step)))
            if surplus := read - expected:
                return Difference(step, f"samples: {len(surplus)}", "are read by several processes")
        return None

    def _rounding(self) -> Difference | str | None:
        fp32, moved, bf16 = (self.recording(name) for name in ("fp32", "fp32 perturbed", "bf16"))
        limit = dict.fromkeys(("loss", "gradient norm"), _LEAST)
        size = dict.fromkeys(limit, 0.0)
        for step in fp32.steps:
            for kind in limit:
                values = [each.numbers.get((kind, step), {}).get("") for each in (fp32, moved, bf16)]
                if any(each is None for each in values):
                    continue
                exact, other, rounded = map(float, values)  # type: ignore[arg-type]
                size[kind] = max(size[kind], abs(exact))  # a gradient that vanishes is a difference of large ones
                limit[kind] = max(limit[kind], _FACTOR * abs(other - exact) / size[kind])
                if not abs(rounded - exact) <= limit[kind] * size[kind]:
                    how = f"is {rounded:.6g}, and {exact:.6g} in fp32: rounding explains {limit[kind] * size[kind]:.1e}"
                    return Difference(step, kind, how)
        return None if any(size.values()) else "No loss was logged."

    def _seen(self, fault: str) -> Difference | str:
        """Return in what a training with a planted fault differs, or why that cannot be seen."""
        try:
            found = compare(self.recording(fault), self.recording("one"), {}, bound=self._bound)
            return found or "It changes nothing in the first step."
        except LookupError as error:
            return str(error)

    def limits(self) -> list[str]:
        """Return what the proof does not cover, in sentences."""
        one = self.recording("one")
        found = ["hftrain's Trainer was compared with itself: what both sides do wrong is not seen."]
        found += dict.fromkeys(note for leg in ("mesh", "one") for note in self.recording(leg).ranks[0]["notes"])
        if still := self._unmoved():
            found.append(f"Not proved, because five steps do not change them: {listed(still, most=5)}.")
        if not one.ranks[0]["has_padding"]:
            found.append("No batch has padding, so masks were not proved.")
        return found
