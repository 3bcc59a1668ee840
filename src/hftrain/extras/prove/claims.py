"""What is proved of a script: the trainings that it takes, and the claims about their numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        self.facts = self.ranks[0]
        self.steps = sorted(map(int, self.facts["samples"]))  # that it has done, from 1
        self.numbers: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self.apart: Difference | None = None
        for rank, path in enumerate(paths):
            for key, value in load_file(path.with_suffix(".safetensors")).items():
                kind, step, name = key.split("/", 2)
                first = self.numbers.setdefault((kind, int(step)), {}).setdefault(name, value)
                if self.apart is None and not torch.equal(first, value):
                    self.apart = Difference(int(step), f"{kind} {name}", f"of rank {rank} is not that of rank 0")

    def samples(self, step: int) -> Counter[str]:
        """Return how often each sample has been read in a step, on all data ranks together."""
        by_rank = {each["data_rank"]: each["samples"].get(str(step), []) for each in self.ranks}
        return Counter(chain(*by_rank.values()))


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
        if "loss" in kinds and one.samples(step) != two.samples(step):
            why = "are others: their order or augmentation depends on the process or batch"
            return Difference(step, "the samples", why)
        for kind in kinds:
            mine, other = (each.numbers.get((kind, step), {}) for each in (one, two))
            if kind in ("weights", "optimizer") and not (mine and other):  # kept of some steps and trainings only
                continue
            least = _PART * max(map(_size, other.values()), default=0.0)
            num_compared += len(mine)
            for name in mine | other:
                if how := _difference(mine.get(name), other.get(name), counts, bound, least):
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
    factors = {**counts, **{f"1 / {what}": 1 / number for what, number in counts.items()}}
    told = [what for what, number in factors.items() if number != 1 and math.isclose(ratio, number, rel_tol=1e-6)]
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
THEIRS = "transformers"  # the leg as the script says it, by transformers' Trainer
REFERENCE = "against"  # the leg of another strategy on as many processes
# Why numbers of other divisions differ though nothing is wrong.
_RANDOM = {
    "draws": "The model draws random numbers in a step, others in each division",
    "random_data": "Dataset or collator draw random numbers, others in each division",
}
_DIVIDED = (
    "; a mean of means, or a loss that depends on who shares the micro-batch, as contrastive ones and batch "
    "normalization do, is another loss in each division"
)
_NO_ITEMS, _NO_TOKENS = "The loss is a mean of each micro-batch, or of each process.", "No batch has tokens."
_EVALUATION: dict[str, Any] = {
    "kinds": ("metric", "predictions"),
    "bound": BOUNDS["metric"],
    "excuses": (*_RANDOM,),
    "missing": "The script has no evaluation set, or its evaluation failed.",
}


@dataclass(frozen=True)
class Claim:
    """A line of a certificate: what was to be proved; PASS, FAIL or "not here" with this script; what was seen."""

    name: str
    status: str
    found: str


def legs_on_mesh(strategy: str, **common: Any) -> list[Leg]:
    """Return the trainings on several processes; the strategy ``"own"`` is the script's."""
    mesh = Leg(name="mesh", strategy=strategy, evaluates=True, **common)
    return [mesh, replace(mesh, name="mesh resumed", resume="mesh", evaluates=False)]


def legs_alone(batch: int, micro_batches: int, **common: Any) -> list[Leg]:
    """Return the trainings of one process: the step of the mesh's data ranks, divided otherwise, resumed, faulty."""
    total = batch * micro_batches if batch * micro_batches % 4 == 0 else 4
    one = Leg(name="one", micro_batches=micro_batches, evaluates=True, **common)
    quiet = replace(one, evaluates=False)
    own = replace(quiet, name="own", precision="own", micro_batches=None, drops=True)
    fp32 = replace(quiet, name="fp32", precision="fp32")
    return [
        one,
        replace(quiet, name="mesh's checkpoint", resume="mesh"),
        replace(quiet, name="whole", micro_batches=1, settings={"per_device_train_batch_size": total}),
        replace(quiet, name="divided", micro_batches=4, settings={"per_device_train_batch_size": total // 4}),
        replace(one, name="in eights", settings={"per_device_eval_batch_size": 8, "max_steps": 1}),
        replace(one, name="in ones", settings={"per_device_eval_batch_size": 1, "max_steps": 1}),
        own,
        replace(own, name="own resumed", resume="own"),
        fp32,
        replace(fp32, name="fp32 perturbed", unit=_UNIT),
        replace(fp32, name="bf16", precision="bf16"),
        replace(own, name="as written", precision="fp32", drops=False),
        *(replace(quiet, name=fault, fault=fault, settings={"max_steps": 1}) for fault in FAULTS),
    ]


class Proof:
    """The claims about the trainings of a script, recorded in a folder for each.

    Args:
        many: What the processes are called.
        against: The strategy with which they are compared; ``"single"``: one process.
    """

    def __init__(self, folder: Path, many: str, against: str, precision: str) -> None:
        self.folder, self._many, self._against, self._precision = folder, many, against, precision
        self._bound = BOUNDS[precision]
        self._read: dict[str, Recording] = {}

    def recording(self, name: str) -> Recording:
        """Return a leg's numbers; `LookupError` with the reason if it did not come to its end."""
        if name not in self._read:
            errors = sorted((self.folder / name).glob("error-rank*.txt"))
            if errors or not (self.folder / name / "rank0.json").exists():
                raise LookupError(errors[0].read_text(encoding="utf-8") if errors else "Its training did not end.")
            self._read[name] = Recording(self.folder / name)
        return self._read[name]

    def claims(self) -> Iterator[Claim]:
        """Yield the claims, in the order of a certificate."""
        many, other = self._many, "one" if self._against == "single" else self._against
        mesh = partial(self._compare, "mesh", "one" if self._against == "single" else REFERENCE)
        excused: dict[str, Any] = {"excuses": ("random_data",)}
        proofs: dict[str, Callable[[], Difference | str | None]] = {
            "five steps change the weights": self._moves,
            f"{many}: item counts as in {other}": partial(mesh, **excused, kinds=["item count"], missing=_NO_ITEMS),
            f"{many}: token counts as in {other}": partial(mesh, **excused, kinds=["token count"], missing=_NO_TOKENS),
            f"{many}: five steps as in {other}": partial(mesh, **excused),
            f"{many}: the same weights on each": lambda: self.recording("mesh").apart,
            f"{many}: each reads its own samples": self._shares,
            f"{many}: evaluation and predictions": partial(mesh, **_EVALUATION),
            f"{many}: resumed there": partial(self._compare, "mesh resumed", "mesh"),
            f"{many}: resumed in one process": partial(self._compare, "mesh's checkpoint", "one", **excused),
            "one micro-batch as four": partial(self._compare, "divided", "whole", excuses=(*_RANDOM,), why=_DIVIDED),
            "evaluation in batches of 1 and 8": partial(self._compare, "in ones", "in eights", **_EVALUATION),
            "resumed, with dropout, to the bit": partial(self._compare, "own resumed", "own", bound=0.0),
            "bf16 as fp32, up to rounding": self._rounding,
        }
        if self.recording("one").facts["shifted"]:
            proofs["labels are shifted once"] = self._shifts
        if (self.folder / THEIRS).exists():
            shown = [kind for kind in STEP if kind != "gradient"]  # by transformers' Trainer
            theirs = partial(self._compare, THEIRS, "as written", kinds=shown, bound=BOUNDS["fp32"])
            proofs["as transformers' Trainer"] = theirs
        for name, proof in proofs.items():
            try:
                found = proof()
            except LookupError as error:
                is_refused = str(error).partition(":")[0] in _REFUSALS
                found = str(error) if is_refused else Difference(0, "it", f"could not be run: {error}")
            yield Claim(name, "not here" if isinstance(found, str) else "FAIL" if found else "PASS", str(found or ""))
        for fault in [each for each in FAULTS if each != FIRST_LABEL]:
            seen = self._seen(fault)
            status = "PASS" if isinstance(seen, Difference) else "not here"
            yield Claim(f"would see on one side: {fault}", status, str(seen))

    def _compare(
        self, one: str, two: str, *, kinds: Sequence[str] = STEP, bound: float | None = None,
        excuses: Sequence[str] = (), missing: str = "", why: str = "",
    ) -> Difference | str | None:  # fmt: skip
        """Return in what a leg differs from another; text if random numbers explain that: `excuses` says which may.

        `missing` is returned if neither leg has a number; `why` is added to a difference without a factor.
        """
        facts = self.recording(one).facts
        counts = {"the number of processes": facts["processes"], "the number of data ranks": facts["data_ranks"]}
        counts["the number of micro-batches"] = facts["accumulation"] * facts["data_ranks"]
        bound = self._bound if bound is None else bound and max(bound, self._bound)
        found = compare(self.recording(one), self.recording(two), counts, bound=bound, kinds=kinds)
        if not found:
            return None
        if missing and found.what == "no number":
            return missing
        if told := [_RANDOM[what] for what in excuses if self.recording("one").facts[what]]:
            return f"{told[0]}: {found}."
        is_explained = found.what == "the samples" or "times" in found.how
        return found if is_explained else Difference(found.step, found.what, found.how + why)

    def _moves(self) -> Difference | None:
        one = self.recording("one")
        gradients = [one.numbers.get(("gradient", step), {}) for step in one.steps]
        driven = {name for each in gradients for name, gradient in each.items() if gradient.any()}
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

    def _shares(self) -> Difference | str | None:
        mesh, one = self.recording("mesh"), self.recording("one")
        if mesh.facts["data_ranks"] == 1:
            return "All of them read the same samples, because they share one model."
        if mesh.facts["random_data"]:
            return f"{_RANDOM['random_data']}."
        for step in mesh.steps:
            if surplus := mesh.samples(step) - one.samples(step):
                return Difference(step, f"samples: {len(surplus)}", "are read by several processes")
        return None

    def _rounding(self) -> Difference | str | None:
        legs, is_logged = [self.recording(name) for name in ("fp32", "fp32 perturbed", "bf16")], False
        for kind in ("loss", "gradient norm"):
            size, limit = 0.0, _LEAST
            for step in legs[0].steps:
                values = [each.numbers.get((kind, step), {}).get("") for each in legs]
                if any(each is None for each in values):
                    continue
                exact, other, rounded = map(float, values)  # type: ignore[arg-type]
                size = max(size, abs(exact))  # a gradient that vanishes is a difference of large ones
                is_logged |= size > 0
                limit = max(limit, _FACTOR * abs(other - exact) / size if size else 0.0)
                if not abs(rounded - exact) <= limit * size:
                    how = f"is {rounded:.6g}, and {exact:.6g} in fp32: rounding explains {limit * size:.1e}"
                    return Difference(step, kind, how)
        return None if is_logged else "No loss was logged."

    def _seen(self, fault: str) -> Difference | str:
        """Return in what a training with a planted fault differs, or why that cannot be seen."""
        try:
            found = compare(self.recording(fault), self.recording("one"), {}, bound=self._bound)
            return found or "It changes nothing in the first step."
        except LookupError as error:
            return str(error)

    def limits(self) -> list[str]:
        """Return what the proof does not cover, in sentences."""
        found = ["hftrain's Trainer was compared with itself: what both sides do wrong is not seen."]
        found += dict.fromkeys(note for leg in ("mesh", "one") for note in self.recording(leg).facts["notes"])
        if still := self._unmoved():
            found.append(f"Not proved, because five steps do not change them: {listed(still, most=5)}.")
        if not self.recording("one").facts["has_padding"]:
            found.append("No batch has padding, so masks were not proved.")
        if self._precision == "fp32":
            found.append("In float32, to a thousandth, because it cannot be in float64.")
        return found
