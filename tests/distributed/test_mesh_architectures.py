"""On two processes, causal language models of many types: the numbers of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from support.meshes import PROOFS, prove

from hftrain import ConfigError
from hftrain.strategies.mesh.context import find_blocks
from hftrain.strategies.mesh.plans import find_plan, placings
from hftrain.strategies.mesh.sequence import find_layers

pytestmark = pytest.mark.distributed

# Attention with keys shared by all heads, weights read without a call, parameters between two splits, gates by head.
EVERYDAY = {"tp": ["minicpm3", "qwen3_next", "apertus", "laguna"], "pp": ["bert"]}


def run(mesh: str, kinds: list[str]) -> list[Any]:
    common = {"mesh": mesh, "steps": 2, "clip": 0.5, "padding": 0}
    return prove([{**common, "model": f"lm:{kind}"} for kind in kinds])


def check(run_distributed: Any, mesh: str, kinds: list[str]) -> None:
    for found in run_distributed(run, num_processes=2, mesh=mesh, kinds=kinds, timeout_s=1800):
        answers = dict(zip(kinds, found, strict=True))
        wrong = {
            kind: answer
            for kind, answer in answers.items()
            if isinstance(answer, str) or not all(value < 1e-12 for value in answer.values())
        }
        assert wrong == {}


@pytest.mark.parametrize("mesh", list(EVERYDAY))
def test_models_that_need_more_than_a_plan(run_distributed: Any, mesh: str) -> None:
    check(run_distributed, mesh, EVERYDAY[mesh])


@pytest.mark.guarantees
@pytest.mark.parametrize("mesh", list(PROOFS["architectures"]))
def test_every_type_of_model(run_distributed: Any, mesh: str) -> None:
    check(run_distributed, mesh, PROOFS["architectures"][mesh])


def test_blocks_that_end_with_the_whole_sequence_are_refused() -> None:
    from support.architectures import tiny

    model = tiny("qwen3_5_text")
    with pytest.raises(ConfigError, match=r"linear_attn does not end with parts of the sequence"):
        find_blocks(find_layers(model, None)[1], placings(model, find_plan(model, None), 2))
