"""Muon: which matrices it takes, and that its updates are torch's, and that they go on after a resume."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.optimizer_runs import Words
from support.resuming import assert_same
from torch import nn

from hftrain import ConfigError, Muon, StrategyError
from hftrain.optim.extras.muon import find_hidden
from hftrain.optim.optimizers import OptimizerConfig, build_optimizer

HIDDEN = ["block.attn.weight", "block.mlp.0.weight", "block.mlp.2.weight"]


def names(model: nn.Module, found: Any) -> list[str]:
    known = {id(matrix) for matrix in found}
    return [name for name, parameter in model.named_parameters() if id(parameter) in known]


class Causal(nn.Module):
    """A model in the way of transformers: its head says that it is one, and may share the embedding's matrix."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.embed, self.hidden = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.pos = nn.Parameter(torch.zeros(3, 4))
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head


@pytest.mark.parametrize("is_tied", [False, True])
def test_find_hidden_leaves_out_embeddings_and_output(is_tied: bool) -> None:
    model = Words()
    assert names(model, find_hidden(model)) == HIDDEN
    causal = Causal(is_tied=is_tied)
    assert names(causal, find_hidden(causal)) == ["hidden.weight"]


def test_find_hidden_of_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=4)
    for kind, extra in ((transformers.GPT2LMHeadModel, {}), (transformers.GPT2ForSequenceClassification, {})):
        model = kind(config, **extra)
        found = names(model, find_hidden(model))
        assert [name.rsplit(".", 2)[1] for name in found] == ["c_attn", "c_proj", "c_fc", "c_proj"]


def test_find_hidden_refuses_a_model_without_any() -> None:
    with pytest.raises(ConfigError, match="optim_target_modules"):
        find_hidden(nn.Linear(4, 4))


def test_flattened_matrices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(16))
    with pytest.raises(StrategyError, match="flattened"):
        find_hidden(model)
    matrix = nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([matrix], targets=[matrix])
    optimizer.param_groups[0]["params"] = [flat := nn.Parameter(torch.ones(16))]
    flat.grad = torch.ones(16)
    with pytest.raises(StrategyError, match="flattened"):
        optimizer.step()


@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"ns_steps": 0}, {"adjust_lr_fn": "other"}])
def test_options_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Muon([nn.Parameter(torch.ones(2, 2))], **settings)


def test_targets_are_matrices() -> None:
    vector = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="matrices"):
        Muon([vector], targets=[vector])


def test_choice_is_logged_and_can_be_made_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    model = Words()
    with caplog.at_level(logging.INFO, logger="hftrain"):
        build_optimizer(OptimizerConfig(name="muon"), model)
    assert f"orthogonalises {', '.join(HIDDEN)}. AdamW trains embed.weight" in caplog.text
    made = build_optimizer(OptimizerConfig(name="muon", target_modules=["attn", "head"]), model)
    assert names(model, made.param_groups[-1]["params"]) == ["block.attn.weight", "head.weight"]


def test_rates_and_decays_of_their_own() -> None:
    config = OptimizerConfig(name="muon", weight_decay=0.1, options="muon_lr=0.02, muon_weight_decay=0.3")
    made = build_optimizer(config, Words())
    shown = [(group["use_muon"], group["lr"], group["weight_decay"]) for group in made.param_groups]
    assert shown == [(False, 5e-5, 0.1), (False, 5e-5, 0.0), (True, 0.02, 0.3)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch's own is compared")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("nesterov", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_updates_are_those_of_torch(adjust: str, nesterov: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = Words().to(dtype), Words().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    hidden = find_hidden(ours)
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": adjust}
    rest = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
    made = Muon(
        ours.parameters(), targets=hidden, muon_lr=0.02, muon_weight_decay=0.2,
        **{**{k: v for k, v in options.items() if k != "lr"}, **rest},
    )  # fmt: skip
    known = set(HIDDEN)
    pairs = dict(theirs.named_parameters())
    peers = (
        torch.optim.Muon([p for n, p in pairs.items() if n in known], weight_decay=0.2, **options),
        torch.optim.AdamW([p for n, p in pairs.items() if n not in known], **rest),
    )
    for _ in range(5):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for each in (made, *peers):
            each.step()
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_group_that_is_added_later_is_adamws() -> None:
    optimizer = Muon([nn.Parameter(torch.ones(2, 2))])
    optimizer.add_param_group({"params": [late := nn.Parameter(torch.ones(2))]})
    late.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[late].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_targets_are_among_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="targets"):
        Muon(model.named_parameters(), targets=[model[0].weight])  # type: ignore[arg-type]
