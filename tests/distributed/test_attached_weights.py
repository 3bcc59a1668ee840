"""Weights that each process reads from files for a model on the meta device: those of `from_pretrained`, to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_models import make_rows
from support.memory import Peak
from support.tiny import make_arguments
from torch import nn

from hftrain import Trainer, TrainerCallback, attach_weights
from hftrain.core.launcher import read_launch
from hftrain.core.types import PrecisionPolicy
from hftrain.storage import shards
from hftrain.storage.tensors import save_tensors
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"fsdp": {}},
    2: {"fsdp": {}, "tp": {}, "pp": {}},
    4: {"fsdp_tp": {"tp_size": 2}, "hsdp": {"dp_replicate": 2, "dp_shard": 2}, "fsdp_pp": {"pp_size": 2}},
}


class Start(TrainerCallback):
    """Note the weights and buffers with which a training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        whole = self.strategy.full_tensors(model)
        self.found = [
            {name: value.flatten().tolist() for name, value in whole},
            {name: buffer.tolist() for name, buffer in model.named_buffers()},
            model.lm_head.weight is model.model.embed_tokens.weight,
            sum(_read),
        ]


# The bytes of each block that was read.
_read: list[int] = []


def count(block: shards.StoredBlock, starts: list[int], stops: list[int]) -> torch.Tensor:
    found = _plain(block, starts, stops)
    _read.append(found.nbytes)
    return found


_plain = shards.StoredBlock.read


def make_llama(is_tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 28, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=is_tied))


def build(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return attach_weights(model, folder)


def train(root: Path, model: Any, strategy: Any) -> list[Any]:
    """Train for two steps; return what the training began with, and the losses."""
    start = Start()
    start.strategy = strategy
    _read.clear()
    size = 4 // strategy.data.world_size
    args = make_arguments(root / "out", per_device_train_batch_size=size, max_steps=2, save_strategy="no")
    trainer = Trainer(model, args, train_dataset=make_rows("llama"), strategy=strategy, callbacks=[start])
    trainer.train()
    strategy.close()
    return [*start.found, [line["loss"] for line in trainer.state.log_history if "loss" in line]]


def each_mesh(root: str) -> dict[str, list[Any]]:
    shards.StoredBlock.read = count  # type: ignore[method-assign, assignment]
    answers = {}
    for name, options in MESHES[read_launch().world_size].items():
        for is_tied in (True, False):
            strategy = create_strategy(name, use_cpu=True, **options)
            answers[f"{name} {is_tied}"] = train(Path(root), build(Path(root) / f"tied {is_tied}"), strategy)
    return answers


@pytest.mark.interop
@pytest.mark.parametrize("number", [1, 2, 4])
def test_weights_and_steps_are_those_of_from_pretrained(tmp_path: Path, run_distributed: Any, number: int) -> None:
    expected, sizes = {}, {}
    for is_tied in (True, False):
        model, folder = make_llama(is_tied), tmp_path / f"tied {is_tied}"
        # One file with ties; an index and several files without.
        model.save_pretrained(folder, max_shard_size="1GB" if is_tied else "10KB")
        assert (folder / "model.safetensors.index.json").exists() != is_tied
        sizes[is_tied] = sum(parameter.nbytes for parameter in model.parameters())
        whole = create_strategy("single", use_cpu=True)
        expected[is_tied] = train(tmp_path, type(model).from_pretrained(folder), whole)
        assert expected[is_tied][2] == is_tied
    for answer in run_distributed(each_mesh, num_processes=number, root=str(tmp_path)):
        for name in MESHES[number]:
            for is_tied, (*begun, _, losses) in expected.items():
                *found, num_read, own = answer[f"{name} {is_tied}"]
                assert found == begun
                assert own == pytest.approx(losses, abs=1e-5)
                assert num_read < (0.7 if number > 1 else 1.01) * sizes[is_tied]


# -- memory ------------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 2304, 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x).tanh()


class Deep(nn.Sequential):
    _no_split_modules = ("Block",)

    def __init__(self, width: int) -> None:
        super().__init__(*(Block(width) for _ in range(DEPTH)))


def grow(root: str, strategy: str, options: dict[str, Any]) -> list[int]:
    """Return by how much this process's own memory grew at most, what it then holds, and the largest block."""
    grown, held = 0, [0]
    kinds = dict.fromkeys(("param_dtype", "compute_dtype", "reduce_dtype"), torch.float32)
    # A small model first, with which everything is imported.
    for width in (64, WIDTH):
        made = create_strategy(strategy, use_cpu=True, **options)
        made.launch()
        with torch.device("meta"):
            model = attach_weights(Deep(width), Path(root) / str(width))
        with Peak(daemon=True) as peak:
            made.setup(model, lambda bare: torch.optim.SGD(bare.parameters()), PrecisionPolicy(name="fp32", **kinds))
        held = [p.to_local().nbytes for p in model.parameters() if not p.is_meta]
        grown = peak.most - peak.first
        made.barrier()
        made.close()
    return [grown, sum(held), max(held)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("number", "strategy", "options"),
    [(2, "fsdp", {}), (2, "pp", {}), (4, "fsdp", {}), (4, "fsdp_pp", {"pp_size": 2})],
)
def test_memory_grows_by_what_a_process_holds(
    tmp_path: Path, run_distributed: Any, number: int, strategy: str, options: dict[str, Any]
) -> None:
    for width in (64, WIDTH):
        with torch.device("meta"):
            shapes = Deep(width).state_dict()
        tensors = {name: torch.full(each.shape, 0.5) for name, each in shapes.items()}
        (tmp_path / str(width)).mkdir()
        save_tensors(tensors, tmp_path / str(width) / "model.safetensors")
    whole = sum(each.nbytes for each in tensors.values())
    answers = run_distributed(grow, num_processes=number, root=str(tmp_path), strategy=strategy, options=options)
    for grown, held, block in answers:
        assert held == whole / number
        assert grown < held + block + 8e6 < whole, (grown, held, block)
