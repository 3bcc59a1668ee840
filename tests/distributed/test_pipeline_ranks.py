"""Pipelines give the losses, gradients, weights and predictions of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipelines import float64, make_model, train

from hftrain.strategies.mesh.pipeline import cut

pytestmark = pytest.mark.distributed
EXACT = {"rtol": 0.0, "atol": 1e-12}


def run_cases(cases: list[dict[str, Any]]) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    with float64():
        for case in cases:
            model = make_model(case["kind"])
            pipeline = cut(
                model, dist.group.WORLD, schedule=case["schedule"], num_micro_batches=case["num_micro_batches"]
            )
            found.append(train(pipeline, model, accumulation=case["accumulation"]))
    dist.destroy_process_group()
    return found


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), **EXACT
    )


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "plain"])
@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_trains_as_one_process(run_distributed: Callable[..., list[Any]], kind: str, stages: int) -> None:
    numbers = ((1, 1), (2, 2), (3, 1)) if stages == 2 else ((3, 1),)
    cases = [
        {"kind": kind, "schedule": schedule, "num_micro_batches": number, "accumulation": accumulation}
        for schedule in ("gpipe", "1f1b")
        for number, accumulation in numbers
    ]
    answers = run_distributed(run_cases, stages, cases=cases)
    for place, case in enumerate(cases):
        with float64():
            model = make_model(kind)
            alone = train(model, model, accumulation=case["accumulation"])
        seen: dict[str, list[Any]] = {}
        for answer in (ranks[place] for ranks in answers):
            assert answer["names"] == alone["names"]
            close(answer["losses"], alone["losses"])
            for value, expected in zip(answer["evaluated"], alone["evaluated"], strict=True):
                close(value, expected)
            for what in ("grads", "weights"):
                for name, value in answer[what].items():
                    close(value, alone[what][name])
                    seen.setdefault(f"{what} {name}", []).append(value)
        assert len(seen) == len(alone["grads"]) + len(alone["weights"])
        tied = [name for name, values in seen.items() if len(values) > 1]
        assert len(tied) == (2 if kind in ("tied", "gpt2") else 0)
        assert all(values[0] == other for values in map(seen.get, tied) for other in values[1:])
