"""Distances that are more than rounding, and the perturbation that tells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.cli.rounding import Perturb, first_apart, first_module_apart


def ledger(*steps: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    base = {"samples": [[1, 2]], "losses": [1.0], "items": None, "norm": 2.0, "rate": 0.1, "skipped": False}
    return {number: [{**base, **each}] for number, each in enumerate(steps, 1)}


def test_loss_and_norm_may_differ_by_ten_times_the_largest_distance_so_far() -> None:
    base, perturbed = ledger({}, {}, {}), ledger({}, {"losses": [1.001]}, {"norm": 2.01})
    assert first_apart(base, ledger({}, {"losses": [1.009]}, {"losses": [1.009], "norm": 2.09}), perturbed)[0] is None
    assert first_apart(base, ledger({"losses": [1.009]}, {}, {}), perturbed) == (1, ["loss"], "loss 1.0 and 1.009")
    assert first_apart(base, ledger({}, {}, {"losses": [1.02]}), perturbed)[:2] == (3, ["loss"])
    assert first_apart(base, ledger({}, {}, {"norm": 2.3}), perturbed)[:2] == (3, ["norm"])
    assert first_apart(base, ledger({}, {}, {"norm": 1.98}), ledger({}, {}, {}))[:2] == (3, ["norm"])
    assert first_apart(base, ledger({"norm": 2.0 + 1e-5}), perturbed)[0] is None
    assert first_apart(base, ledger({"losses": [math.nan]}), perturbed)[:2] == (1, ["loss"])
    assert first_apart(ledger({"losses": [math.nan]}), ledger({"losses": [math.nan]}), perturbed)[0] is None


@pytest.mark.parametrize(("name", "value"), [("rate", 0.1 + 1e-9), ("skipped", True), ("samples", [[1, 3]])])
def test_other_values_are_compared_exactly(name: str, value: Any) -> None:
    base = ledger({"items": 4})
    assert first_apart(base, ledger({"items": 4, name: value}), base)[1] == [name]
    assert first_apart(base, ledger({"items": 5}), base)[1] == ["items"]
    assert first_apart(base, ledger({"samples": [None]}), base)[0] is None  # one does not know them


def test_samples_and_losses_are_those_of_all_processes() -> None:
    base = ledger({"samples": [[1, 2], [3, 4]], "losses": [0.5, 0.5]})
    line = base[1][0]
    split = {1: [{**line, "samples": [[4, 1]], "losses": [0.8]}, {**line, "samples": [[2, 3]], "losses": [1.2]}]}
    assert first_apart(base, split, base)[0] is None
    split[1][1]["samples"] = [[2, 2]]
    assert first_apart(base, split, base)[1] == ["samples"]


def call(norm: float, *, module: str = "a", micro_batch: int = 0, size: int = 4, gradient: float = 1.0) -> Any:
    facts = {"shape": [size], "norm": norm}
    return {
        "module": module, "micro_batch": micro_batch, "type": "Linear", "settings": "", "inputs": [],
        "outputs": [facts], "gradients": [{**facts, "norm": gradient}],
    }  # fmt: skip


def test_modules_are_compared_over_processes_and_micro_batches() -> None:
    base = [[call(5.0, size=8)]]

    def apart(other: Any, perturbed: Any = base, *, has_backward: bool = False) -> str | None:
        return first_module_apart([base, other, perturbed], has_backward=has_backward)

    assert apart([[call(3.0)], [call(4.0)]]) is None
    assert apart([[call(3.0), call(4.0, micro_batch=1)]]) is None
    assert apart([[call(3.0)], [call(4.1)]]) == "forward, a (Linear)"
    assert apart([[call(3.0)], [call(4.1)]], [[call(5.02, size=8)]]) is None
    assert apart([[call(7.0)]]) is None  # another number of elements
    assert apart([[call(5.0, size=8, module="b")]]) == "a (Linear) is called in one run only"
    other = [[call(5.0, size=8, gradient=1.5)]]
    assert apart(other) is None
    assert apart(other, has_backward=True) == "backward, the gradient of the output of a (Linear)"


@pytest.mark.parametrize(("unit", "dtype"), [(0.0, torch.float32), (2.0**-7, torch.float32), (0.0, torch.bfloat16)])
def test_every_trained_parameter_moves_by_one_unit_in_the_last_place(unit: float, dtype: torch.dtype) -> None:
    model = nn.Linear(40, 40).to(dtype)
    model.bias.requires_grad_(False)
    with torch.no_grad():
        model.weight[0] = 0
        model.weight[1] = 3.0
    before, frozen = model.weight.detach().clone(), model.bias.clone()
    Perturb(unit).on_train_begin(None, None, None, model=model)
    moved = (model.weight.detach() - before).float()
    eps = unit or torch.finfo(dtype).eps
    assert set((moved[1] / (2 * eps)).tolist()) == {-1.0, 1.0}
    assert not moved[0].any()
    relative = (moved[2:] / before[2:].float()).abs()
    assert eps / 2 * 0.99 <= float(relative.min())
    assert float(relative.max()) <= eps * 1.01
    assert torch.equal(model.bias, frozen)
