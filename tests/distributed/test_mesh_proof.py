"""On meshes of every kind: loss, gradients, norm, weights and AdamW's state of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from support.meshes import PROOFS, prove

pytestmark = pytest.mark.distributed

MESHES, MODELS = PROOFS["meshes"], PROOFS["models"]
REFUSED = {
    (mesh, model): each["says"] for each in PROOFS["refused"] for mesh in each["meshes"] for model in each["models"]
}


def run(cases: list[dict[str, Any]]) -> list[Any]:
    """Prove cases of one number of processes, in its ranks."""
    return prove(cases)


def check(run_distributed: Any, cases: list[dict[str, Any]], tolerance: float = 1e-12) -> None:
    (num_processes,) = {MESHES[case["mesh"]]["processes"] for case in cases}
    wrong = {}
    for found in run_distributed(run, num_processes=num_processes, cases=cases, timeout_s=1800):
        for case, answer in zip(cases, found, strict=True):
            says = REFUSED.get((case["mesh"], case["model"]))
            if isinstance(answer, str) or says:
                holds = says is not None and isinstance(answer, str) and says in answer
            else:
                holds = all(value < tolerance for value in answer.values())
            if not holds:
                wrong[str(case)] = answer
    assert wrong == {}


def of_meshes(num_processes: int) -> list[str]:
    return [name for name, mesh in MESHES.items() if mesh["processes"] == num_processes]


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_every_mesh_computes_what_one_process_does(run_distributed: Any, num_processes: int) -> None:
    common = {"model": "llama", "accumulation": 3, "clip": 0.5, "padding": 30}
    check(run_distributed, [{"mesh": mesh, **common} for mesh in of_meshes(num_processes)])


@pytest.mark.parametrize(("mesh", "models"), [("tp", list(MODELS)), ("cp", list(MODELS))])
def test_every_model_computes_what_one_process_does(run_distributed: Any, mesh: str, models: list[str]) -> None:
    check(run_distributed, [{"mesh": mesh, "model": model, "clip": 0.5, "tied": True} for model in models])


@pytest.mark.guarantees
@pytest.mark.parametrize("mesh", list(MESHES))
def test_every_model_on_every_mesh(run_distributed: Any, mesh: str) -> None:
    kinds: list[dict[str, Any]] = [
        *(
            {"tied": tied, "accumulation": accumulation, "clip": clip, "padding": padding}
            for tied, accumulation, clip, padding in (
                (False, 1, None, None), (True, 3, 0.5, 0), (True, 1, 0.5, 30), (False, 3, None, 30),
            )
        ),
        {"labels": "whole", "length": 11},
        {"vocab_size": 31},
    ]  # fmt: skip
    check(run_distributed, [{"mesh": mesh, "model": model, **kind} for model in MODELS for kind in kinds])
