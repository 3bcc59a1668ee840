from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.pipelines import Plain, make_model
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.strategies.mesh.cutting import divide


def test_cut_puts_embeddings_first_and_norm_and_head_last() -> None:
    pytest.importorskip("transformers")
    cut = divide(make_model("llama"), 2)
    assert cut.parts == {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1}
    assert cut.layers == "model.layers"
    assert cut.bounds == (0, 2, 4)
    assert cut.owners["model.layers.1.mlp.up_proj.weight"] == (0,)
    assert cut.owners["lm_head.weight"] == (1,)


def test_cut_follows_the_order_of_registration_without_a_plan() -> None:
    pytest.importorskip("transformers")
    cut = divide(make_model("gpt2"), 4)
    assert cut.parts == {"transformer.wte": 0, "transformer.wpe": 0, "transformer.ln_f": 3, "lm_head": 3}
    assert cut.bounds == (0, 1, 2, 3, 4)


def test_tied_weights_belong_to_both_ends() -> None:
    pytest.importorskip("transformers")
    cut = divide(make_model("tied"), 4)
    assert cut.owners["lm_head.weight"] == cut.owners["model.embed_tokens.weight"] == (0, 3)


def test_cut_balances_parameters() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    assert divide(model, 2).bounds == (0, 1, 4)


def test_declared_order_wins() -> None:
    class Late(Plain):
        def __init__(self) -> None:
            super().__init__()
            blocks = self.blocks
            del self.blocks
            self.blocks = blocks

    assert divide(Late(), 2).parts == {"embed": 0, "shift": 0, "head": 0}
    Late.pipeline_parts = ["embed", "shift", "blocks", "head"]
    assert divide(Late(), 2).parts == {"embed": 0, "shift": 0, "head": 1}


class Loose(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Pair(Plain):
    """An encoder-decoder, as transformers' configs tell."""

    config = SimpleNamespace(is_encoder_decoder=True)


@pytest.mark.parametrize(
    ("model", "stages", "reason"),
    [
        (nn.Linear(2, 2), 2, "no list of layers"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 3, "It has 2 layers"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2, "1 normalizes each micro-batch"),
        (Loose(), 2, "The parameter scale belongs to no part"),
        (Pair(), 2, "Each layer of its decoder needs what the encoder computes"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model: nn.Module, stages: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        divide(model, stages)
