"""Dropout on tensor ranks: recomputed forward passes draw the same numbers, however torch recomputes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.meshes import make

from hftrain import set_seed
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

DOUBLE = PrecisionPolicy(
    name="exact", param_dtype=torch.float64, compute_dtype=torch.float64, reduce_dtype=torch.float64
)
RATES = {
    "llama": {"attention_dropout": 0.3},
    "lora": {"attention_dropout": 0.3, "lora_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.2, "embd_pdrop": 0.1},
}
WAYS: dict[str, Any] = {"kept": None, "reentrant": {"use_reentrant": True}, "early stop": {"use_reentrant": False}}


def gradients(sequence_parallel: bool) -> dict[str, dict[str, float]]:
    """Return how far gradients with recomputed layers are from those without, largest first, by model and way."""
    torch.distributed.init_process_group("gloo")
    answers: dict[str, dict[str, float]] = {}
    for name, rates in RATES.items():
        found: dict[str, dict[str, torch.Tensor]] = {}
        for way, options in WAYS.items():
            strategy = create_strategy("tp", use_cpu=True, sequence_parallel=sequence_parallel)
            strategy.launch()
            model = make(name, num_hidden_layers=3, **rates) if name != "gpt2" else make(name, **rates)
            model.train()
            if options is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
                if name == "lora":
                    model.enable_input_require_grads()
            model, optimizer = strategy.setup(model, lambda model: torch.optim.SGD(model.parameters(), 0.1), DOUBLE)
            set_seed(3)
            ids = torch.randint(1, 31, (2, 10))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            named = strategy.unwrap(model).named_parameters()
            found[way] = {key: p.grad.full_tensor() for key, p in named if p.grad is not None}  # type: ignore[attr-defined]
            optimizer.step()  # checks that the ranks have the same gradients of what each holds whole
            strategy.close()
        answers[name] = {
            way: max(float((grad - found["kept"][key]).abs().max()) for key, grad in found[way].items())
            for way in WAYS
            if way != "kept"
        }
    torch.distributed.destroy_process_group()
    return answers


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_layers_draw_the_same_numbers(run_distributed: Any, sequence_parallel: bool) -> None:
    for answer in run_distributed(gradients, num_processes=2, sequence_parallel=sequence_parallel):
        assert {name for name, ways in answer.items() for value in ways.values() if not value < 1e-12} == set(), answer
