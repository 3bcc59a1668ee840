"""What is proved of a script: the trainings that it takes, and the claims about their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hftrain.extras.prove.comparing import EVALUATION, Difference, Recording, compare
from hftrain.extras.prove.faults import FAULTS
from hftrain.extras.prove.recording import STEPS, Leg

# A unit in the last place of 1 in bfloat16. Rounding may move a training ten times as far as such a change does.
_UNIT, _FACTOR, _LEAST = 2.0**-8, 10, 1e-4


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


def legs_alone(*, is_full: bool, data_ranks: int, batch: int, accumulation: int) -> list[Leg]:
    """Return the trainings of one process: the step of the mesh, other divisions of it, precisions and faults.

    Args:
        is_full: Whether the model keeps its size.
        data_ranks: How many processes of the mesh read samples of their own.
        batch: The samples of their micro-batches.
        accumulation: The micro-batches of a step on each of them.
    """
    one = Leg(name="one", accumulation=accumulation * data_ranks, evaluates=True, is_full=is_full)
    quiet, total = replace(one, evaluates=False), batch * accumulation * data_ranks
    total = total if total % 4 == 0 else 4
    own = replace(quiet, name="own", precision="own", accumulation=accumulation, drops=True)
    fp32 = replace(quiet, name="fp32", precision="fp32")
    return [
        one,
        replace(quiet, name="mesh's checkpoint", resume="mesh"),
        replace(one, name="whole", batch=total, accumulation=1, eval_batch=8),
        replace(one, name="divided", batch=total // 4, accumulation=4, eval_batch=1),
        own,
        replace(own, name="own resumed", resume="own"),
        fp32,
        replace(fp32, name="fp32 perturbed", unit=_UNIT),
        replace(fp32, name="bf16", precision="bf16"),
        *(replace(quiet, name=fault, fault=fault, steps=1) for fault in FAULTS),
    ]


class Proof:
    """The claims about the recorded trainings of a script.

    Args:
        folder: Holds a folder for each leg.
        many: How the processes are called in the claims.
    """

    def __init__(self, folder: Path, many: str) -> None:
        self._folder, self._many = folder, many
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
        proofs: dict[str, Callable[[], Difference | str | None]] = {
            "five steps change the weights": self._moves,
            f"{self._many}: five steps as in one": partial(self._compare, "mesh", "one"),
            f"{self._many}: the same weights on each": lambda: self.recording("mesh").apart,
            f"{self._many}: each reads its own samples": self._shares,
            f"{self._many}: evaluation and predictions": partial(self._evaluations, "mesh", "one"),
            f"{self._many}: resumed there": partial(self._compare, "mesh resumed", "mesh"),
            f"{self._many}: resumed in one process": partial(self._compare, "mesh's checkpoint", "one"),
            "one micro-batch as four": partial(self._compare, "divided", "whole"),
            "evaluation in batches of 1 and 8": partial(self._evaluations, "divided", "whole"),
            "resumed, with dropout, to the bit": partial(self._compare, "own resumed", "own", bound=0.0),
            "bf16 as fp32, up to rounding": self._rounding,
        }
        for name, proof in proofs.items():
            try:
                found = proof()
            except LookupError as error:
                found = Difference(0, "it", f"could not be run: {error}")
            status = "not here" if isinstance(found, str) else "FAIL" if found else "PASS"
            yield Claim(name, status, str(found or ""))
        for fault in FAULTS:
            seen = self._seen(fault)
            yield Claim(f"would see: {fault}", "PASS" if isinstance(seen, Difference) else "not here", str(seen))

    def _moves(self) -> Difference | None:
        return (
            Difference(STEPS, "weights", "are all as at the beginning") if not self._unmoved(is_still=False) else None
        )

    def _unmoved(self, *, is_still: bool = True) -> list[str]:
        """Return the names of the parameters that five steps do not change, or of those that they do."""
        first, last = (self.recording("one").numbers.get(("weights", step), {}) for step in (0, STEPS))
        return [name for name in first if torch.equal(first[name], last.get(name, first[name])) == is_still]

    def _compare(self, one: str, two: str, **options: Any) -> Difference | None:
        facts = self.recording("mesh").ranks[0]
        counts = {"the number of processes": facts["processes"], "the number of data ranks": facts["data_ranks"]}
        counts["the number of micro-batches"] = facts["accumulation"] * facts["data_ranks"] if one == "mesh" else 4
        return compare(self.recording(one), self.recording(two), counts, **options)

    def _evaluations(self, one: str, two: str) -> Difference | str | None:
        if ("metric", STEPS) not in self.recording(two).numbers:
            return "The script has no evaluation set."
        return self._compare(one, two, kinds=EVALUATION)

    def _shares(self) -> Difference | str | None:
        mesh = self.recording("mesh")
        if mesh.ranks[0]["data_ranks"] == 1:
            return "All of them read the same samples, because they share one model."
        for step in mesh.steps:
            if common := set.intersection(*map(set, mesh.samples(step))):
                return Difference(step, f"{len(common)} samples", "are read by every process")
        return None

    def _rounding(self) -> Difference | None:
        fp32, moved, bf16 = (self.recording(name) for name in ("fp32", "fp32 perturbed", "bf16"))
        limit = {"loss": _LEAST, "gradient norm": _LEAST}
        for step in fp32.steps:
            for kind in limit:
                values = [each.numbers.get((kind, step), {}).get("") for each in (fp32, moved, bf16)]
                if any(each is None for each in values):
                    continue
                exact, other, rounded = map(float, values)  # type: ignore[arg-type]
                limit[kind] = max(limit[kind], _FACTOR * abs(other - exact) / abs(exact or 1))
                if not abs(rounded - exact) <= limit[kind] * abs(exact or 1):
                    how = f"is {rounded:.6g}, and {exact:.6g} in fp32: rounding explains a share of {limit[kind]:.1e}"
                    return Difference(step, kind, how)
        return None

    def _seen(self, fault: str) -> Difference | str:
        """Return in what a training with a planted fault differs, or why that cannot be seen."""
        try:
            return compare(self.recording(fault), self.recording("one"), {}) or "It changes nothing in the first step."
        except LookupError as error:
            return str(error)

    def limits(self) -> list[str]:
        """Return what the proof does not cover, in sentences."""
        one = self.recording("one")
        found = list(dict.fromkeys(note for leg in ("mesh", "one") for note in self.recording(leg).ranks[0]["notes"]))
        if still := self._unmoved():
            shown = ", ".join(still[:5]) + (f" and {len(still) - 5} more" if len(still) > 5 else "")
            found.append(f"Not proved, because five steps do not change them: {shown}.")
        if not one.ranks[0]["has_padding"]:
            found.append("No batch has padding, so masks were not proved.")
        return found
