"""What is proved of a script: the trainings that it takes, and the claims about their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hftrain.extras.prove.comparing import BOUND, Difference, Recording, compare, compare_evaluations
from hftrain.extras.prove.faults import FAULTS
from hftrain.extras.prove.recording import SAVED_STEP, STEPS, Leg

_RESUMED = range(SAVED_STEP + 1, STEPS + 1)
# A unit in the last place of 1 in bfloat16. Rounding may move a training ten times as far as such a change does.
BF16_UNIT, _FACTOR, _LEAST = 2.0**-8, 10, 1e-4


@dataclass(frozen=True)
class Claim:
    """One line of a certificate.

    Args:
        name: What was to be proved.
        status: ``"PASS"``, ``"FAIL"``, or ``"not here"`` if it cannot be proved with this script.
        found: What was seen.
    """

    name: str
    status: str
    found: str


def legs_on_mesh(strategy: str | None, *, is_full: bool) -> list[Leg]:
    """Return the trainings on several processes."""
    mesh = Leg(name="mesh", strategy=strategy, evaluates=True, is_full=is_full)
    return [mesh, replace(mesh, name="mesh resumed", resume="mesh", evaluates=False)]


def legs_alone(mesh: Leg, *, data_ranks: int, batch: int, accumulation: int) -> list[Leg]:
    """Return the trainings of one process: the step of the mesh, other divisions of it, precisions and faults.

    Args:
        mesh: The training on several processes.
        data_ranks: How many of them read samples of their own.
        batch: The samples of its micro-batches.
        accumulation: The micro-batches of its step on each data rank.
    """
    one = replace(mesh, name="one", strategy="single", accumulation=accumulation * data_ranks)
    quiet, total = replace(one, evaluates=False), batch * accumulation * data_ranks
    total = total if total % 4 == 0 else 4
    own = replace(quiet, precision="own", accumulation=accumulation, drops=True, name="own")
    fp32 = replace(quiet, precision="fp32", name="fp32")
    return [
        one,
        replace(quiet, name="mesh's checkpoint", resume="mesh"),
        replace(one, name="whole", batch=total, accumulation=1, eval_batch=8),
        replace(one, name="divided", batch=total // 4, accumulation=4, eval_batch=1),
        own,
        replace(own, name="own resumed", resume="own"),
        fp32,
        replace(fp32, name="fp32 perturbed", unit=BF16_UNIT),
        replace(fp32, name="bf16", precision="bf16"),
        *(replace(quiet, name=fault, fault=fault, steps=1) for fault in FAULTS),
    ]


class Proof:
    """The claims about the recorded trainings of a script.

    Args:
        folder: Holds a folder for each leg.
        strategy: The name of the strategy, for the lines.
        processes: How many there were.
    """

    def __init__(self, folder: Path, *, strategy: str, processes: int) -> None:
        self._folder, self._strategy, self._processes = folder, strategy, processes
        self._read: dict[str, Recording] = {}

    def recording(self, name: str) -> Recording:
        """Return a leg's numbers; `LookupError` with the reason if it did not come to its end."""
        if name not in self._read:
            errors = sorted((self._folder / name).glob("error-rank*.txt"))
            if errors or not (self._folder / name / "rank0.json").exists():
                raise LookupError(errors[0].read_text(encoding="utf-8") if errors else "Its training did not end.")
            self._read[name] = Recording(self._folder / name)
        return self._read[name]

    def claims(self) -> Iterator[Claim]:
        """Yield the claims, in the order of a certificate."""
        many = f"{self._strategy} on {self._processes} processes"
        proofs: list[tuple[str, Callable[[], Difference | str | None]]] = [
            (f"{many}: five steps as in one", self._mesh),
            (f"{many}: the same weights on each", lambda: self.recording("mesh").apart),
            (f"{many}: each reads its own samples", self._shares),
            (f"{many}: evaluation and predictions", lambda: self._evaluations("mesh", "one")),
            (f"{many}: resumed there", lambda: self._pair("mesh resumed", "mesh", steps=_RESUMED)),
            (f"{many}: resumed in one process", lambda: self._pair("mesh's checkpoint", "one", steps=_RESUMED)),
            ("one micro-batch as four", lambda: self._pair("divided", "whole")),
            ("evaluation in batches of 1 and 8", lambda: self._evaluations("divided", "whole")),
            ("resumed, with dropout, to the bit", lambda: self._pair("own resumed", "own", bound=0, steps=_RESUMED)),
            ("bf16 as fp32, up to rounding", self._rounding),
        ]
        for name, proof in proofs:
            try:
                found = proof()
            except LookupError as error:
                yield Claim(name, "FAIL", f"could not be run: {error}")
                continue
            if isinstance(found, str):
                yield Claim(name, "not here", found)
            else:
                yield Claim(name, "FAIL" if found else "PASS", str(found or ""))
        yield from self._seen()

    def _counts(self) -> dict[str, float]:
        facts = self.recording("mesh").facts
        names = ("processes", "data_ranks", "accumulation")
        return {f"number of {name.replace('_', ' ')}": float(facts[name]) for name in names}

    def _pair(
        self, one: str, two: str, *, bound: float = BOUND, steps: range | None = None
    ) -> Difference | None:
        counts = {"number of micro-batches": 4.0} if one == "divided" else self._counts()
        return compare(self.recording(one), self.recording(two), counts, bound=bound, steps=steps)

    def _mesh(self) -> Difference | None:
        mesh, one = self.recording("mesh"), self.recording("one")
        counts = {**self._counts(), "number of micro-batches": float(one.facts["accumulation"])}
        return compare(mesh, one, counts)

    def _evaluations(self, one: str, two: str) -> Difference | str | None:
        if "metrics" not in self.recording(two).facts:
            return "The script has no evaluation set."
        return compare_evaluations(self.recording(one), self.recording(two), self._counts())

    def _shares(self) -> Difference | str | None:
        mesh = self.recording("mesh")
        if mesh.facts["data_ranks"] == 1:
            return "All of them read the same samples, because they share one model."
        for step in mesh.steps:
            by_rank = {each["data_rank"]: each["steps"][str(step)]["samples"] for each in mesh.ranks}
            shares = [{sample for batch in batches for sample in batch} for batches in by_rank.values()]
            if common := set.intersection(*shares):
                return Difference(step, f"{len(common)} samples", "are read by every process")
        return None

    def _rounding(self) -> Difference | None:
        fp32, moved, bf16 = (self.recording(name).steps for name in ("fp32", "fp32 perturbed", "bf16"))
        limits = {"loss": _LEAST, "grad_norm": _LEAST}
        for step in sorted(fp32):
            for name, limit in limits.items():
                exact, other, rounded = (steps[step].get(name) for steps in (fp32, moved, bf16))
                if exact is None or other is None or rounded is None:
                    continue
                limits[name] = max(limit, _FACTOR * abs(other - exact) / max(abs(exact), abs(other)))
                distance = abs(rounded - exact) / max(abs(exact), abs(rounded))
                if not distance <= limits[name]:
                    found = f"is {rounded:.4g} in bf16 and {exact:.4g} in fp32: rounding explains {limits[name]:.1e}"
                    return Difference(step, f"the {name}", found)
        return None

    def _seen(self) -> Iterator[Claim]:
        """Yield whether the proof would see faults that were planted."""
        one = self.recording("one")
        for fault in FAULTS:
            try:
                difference = compare(self.recording(fault), one, {}, steps=range(1, 2))
            except LookupError as error:
                yield Claim(f"would see: {fault}", "not here", str(error))
                continue
            status = "PASS" if difference else "not here"
            yield Claim(f"would see: {fault}", status, str(difference or "changes nothing in this script's first step"))

    def limits(self) -> list[str]:
        """Return what the proof does not cover, in sentences."""
        one = self.recording("one")
        found = list(dict.fromkeys([*self.recording("mesh").facts["notes"], *one.facts["notes"]]))
        gradients = _largest(one, "gradient")
        weights = {name for kind, _, name in one.tensors if kind == "weights"}
        if still := sorted(name for name in weights if not gradients.get(name)):
            found.append(f"Not proved, because their gradients are 0 in all steps: {_listed(still)}.")
        if fixed := sorted(name for name in weights - set(still) if _is_fixed(one, name)):
            found.append(f"Not proved, because five steps do not move them: {_listed(fixed)}.")
        if not one.facts.get("has_padding"):
            found.append("No batch has padding, so masks were not proved.")
        return found


def _largest(recording: Recording, kind: str) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for (of, _, name), each in recording.tensors.items():
        if of == kind and each.numel():
            found[name] = max(found.get(name, 0.0), float(each.abs().max()))
    return found


def _is_fixed(recording: Recording, name: str) -> bool:
    ends: list[Any] = [recording.tensors.get(("weights", step, name)) for step in (0, STEPS)]
    return all(isinstance(each, torch.Tensor) for each in ends) and torch.equal(*ends)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
