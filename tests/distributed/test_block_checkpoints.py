"""Tensors split over several dimensions of a mesh: saved once per block, loaded on any other mesh, read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import launch
from support.hub_models import make_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hftrain.checkpoint.manifest import OPTIMIZER
from hftrain.checkpoint.state_files import capture_shards, restore_optimizer, whole_state
from hftrain.checkpoint.weights import load_weights, save_weights
from hftrain.storage import shards
from hftrain.storage.shards import find_shards, load_tensors
from hftrain.storage.tensors import save_containers
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.single import SingleDeviceStrategy

pytestmark = pytest.mark.distributed


class Uneven(nn.Module):
    """Sizes that no mesh divides, fewer rows than processes, tied weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)
        self.one, self.few = nn.Linear(5, 1), nn.Linear(3, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.stack = nn.Parameter(torch.randn(3, 5, 4))
        self.register_buffer("shift", torch.randn(4))


PLAN: dict[str, Placement] = {
    "embed.weight": Shard(0), "up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1),
    "few.weight": Shard(0), "stack": Shard(2),
}  # fmt: skip
# Replicas, shards and tensor-parallel parts.
MESHES: dict[int, list[tuple[int, int, int]]] = {
    2: [(1, 2, 1), (1, 1, 2)],
    4: [(1, 2, 2), (2, 1, 2), (1, 4, 1)],
}


def split(model: nn.Module, sizes: tuple[int, int, int]) -> None:
    """Place a model's parameters on a mesh; tied ones stay the same."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    tp: DeviceMesh = mesh["tp"]
    new = {
        id(p): nn.Parameter(distribute_tensor(p.detach(), tp, [PLAN.get(name, Replicate())]))
        for name, p in model.named_parameters()
    }
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, new[id(p)])
    fully_shard(model, mesh=mesh["replicate", "shard"] if sizes[0] > 1 else mesh["shard"])


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, parameter.numel()).reshape(parameter.shape)


def make(sizes: tuple[int, int, int] | None, *, seed: int = 0, num_steps: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Uneven()
    if sizes is not None:
        split(model, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        whole = gradient(p)
        if isinstance(p, DTensor):
            whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        p.grad = whole
    optimizer.step()


def save(folder: Path, strategy: Any, model: nn.Module, optimizer: Any) -> None:
    folder.mkdir(exist_ok=True)
    for write in capture_shards(strategy, model, optimizer):
        write(folder)
    state = whole_state(strategy, model, optimizer)
    if strategy.is_main:
        save_containers(state, folder / OPTIMIZER)
        if strategy.model_shards(model) is None:
            save_weights(model, folder)
    strategy.barrier()


def tensors_of(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    states = {f"{i}.{key}": value for i, each in optimizer.state_dict()["state"].items() for key, value in each.items()}
    return {**model.state_dict(), **states}


def check(model: nn.Module, optimizer: Any, expected: dict[str, torch.Tensor], *, is_whole: bool = True) -> None:
    """Compare bits: of the whole tensors, or of this process's blocks, as torch cuts them."""
    found = tensors_of(model, optimizer)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if not isinstance(value, DTensor):
            assert torch.equal(value, expected[name]), name
        elif is_whole:
            assert torch.equal(value.full_tensor(), expected[name]), name
        else:
            like = distribute_tensor(expected[name], value.device_mesh, value.placements, src_data_rank=None)
            assert torch.equal(value.to_local(), like.to_local()), name


def trained(num_steps: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in tensors_of(*make(None, num_steps=num_steps)).items()}


def reload(folder: str) -> None:
    """Load some of the checkpoints in a folder on each mesh, and save them again."""
    strategy = FSDPStrategy(use_cpu=True)
    strategy.launch()
    expected, after = trained(2), trained(3)
    sources = sorted(Path(folder).iterdir())
    strategy.barrier()
    for sizes in MESHES[strategy.world_size]:
        own = Path(folder) / f"{strategy.world_size}: {'x'.join(map(str, sizes))}"
        for source in {sources[0]: 0, sources[-1]: 0, own: 0}:
            model, optimizer = make(sizes, seed=1)
            load_weights(model, source, strategy=strategy)
            restore_optimizer(source, strategy, model, optimizer)
            check(model, optimizer, expected, is_whole=source == own)
            assert model.head.weight is model.embed.weight
            if source == sources[-1]:
                save(own, strategy, model, optimizer)
        step(model, optimizer)
        check(model, optimizer, after, is_whole=False)
        sources.append(own)
    strategy.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one process, and those of all meshes, each saved from the one before."""
    found = tmp_path_factory.mktemp("meshes")
    save(found / "1", SingleDeviceStrategy(use_cpu=True), *make(None, num_steps=2))
    for number in (4, 2):
        place = tmp_path_factory.mktemp("processes")
        ended = launch(reload, place, num_processes=number, kwargs={"folder": str(found)}, timeout_s=300, forks=True)
        assert ended.returncode == 0, ended.output
    return found


NAMES = [f"{number}: {'x'.join(map(str, sizes))}" for number, each in MESHES.items() for sizes in each]


@pytest.mark.parametrize("name", NAMES)
def test_any_mesh_loads_what_any_other_has_saved(folder: Path, name: str) -> None:
    model, optimizer = make(None, seed=1)
    load_weights(model, folder / name)
    restore_optimizer(folder / name, SingleDeviceStrategy(use_cpu=True), model, optimizer)
    check(model, optimizer, trained(2))
    step(model, optimizer)
    check(model, optimizer, trained(3))


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_written_once(folder: Path, name: str) -> None:
    model, optimizer = make(None, num_steps=1)
    split_states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    for stem, whole in (("model_shard", model.state_dict().values()), ("optimizer_shard", split_states)):
        files = [load_tensors(path) for path in find_shards(folder / name, stem=stem)]
        written = sum(value.numel() for file in files for value in file.values())
        assert written == sum(value.numel() for value in whole)


# -- a transformers model ----------------------------------------------------------------------------------------------


def load_llama(folder: str, is_tied: bool) -> dict[str, Any]:
    """Load one file onto a 2 x 2 mesh from the meta device, and write one file again."""
    strategy = FSDPStrategy(use_cpu=True)
    strategy.launch()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    config = make_model("llama", tie_word_embeddings=is_tied).config
    with torch.device("meta"):
        model = type(make_model("llama"))(config)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"self_attn.{name}_proj": columns for name in "qv"} | {"self_attn.o_proj": rows, "mlp.down_proj": rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {**plan, "mlp.gate_proj": columns, "mlp.up_proj": columns})
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    model.to_empty(device="cpu")
    model.tie_weights()
    read: list[int] = []
    plain = shards.StoredBlock.read

    def count(block: shards.StoredBlock, starts: list[int], stops: list[int]) -> torch.Tensor:
        found = plain(block, starts, stops)
        read.append(found.nbytes)
        return found

    shards.StoredBlock.read = count  # type: ignore[method-assign]
    load_weights(model, Path(folder) / "whole", strategy=strategy)
    state = strategy.model_state(model)
    if strategy.is_main:
        save_weights(model, Path(folder) / "again", state_dict=state)
    held = sum(p.to_local().nbytes for p in model.state_dict().values() if isinstance(p, DTensor))
    each = {name: tensor.flatten().tolist() for name, tensor in strategy.full_tensors(model)}
    strategy.close()
    return {"read": sum(read), "held": held, "each": each}


@pytest.mark.interop
@pytest.mark.parametrize("is_tied", [True, False])
def test_llama_goes_from_one_file_to_a_mesh_in_parts_and_back(
    tmp_path: Path, run_distributed: Any, is_tied: bool
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    again.mkdir()
    model = make_model("llama", tie_word_embeddings=is_tied)
    model.save_pretrained(whole)
    answers = run_distributed(load_llama, num_processes=4, folder=str(tmp_path), is_tied=is_tied)
    expected = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    size = sum(value.nbytes for value in model.state_dict().values())
    for answer in answers:
        assert answer["each"] == expected
        assert answer["read"] == answer["held"] < 0.6 * size
    back = type(model).from_pretrained(again)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    assert load_tensors(again / "model.safetensors").keys() == load_tensors(whole / "model.safetensors").keys()
