"""Meshes of 8, 64 and 512 processes, as one process of each sees them: the others are a fake process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hftrain import ConfigError, Trainer, TrainingArguments
from hftrain.cli.plan import read_model, weightless
from hftrain.core.errors import StrategyError
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.lockstep import described
from hftrain.strategies.mesh.cutting import divide
from hftrain.strategies.mesh.layout import Layout
from hftrain.strategies.mesh.proposal import Model, measure, trace
from hftrain.strategies.mesh.stages import Links
from hftrain.strategies.mesh.strategy import MeshStrategy
from hftrain.strategies.registry import create_strategy

fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
tf = pytest.importorskip("transformers")
# What torch says of logits that tensor ranks put together, which nobody changes in place.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")

LENGTH, SAMPLES, WORDS = 32, 4, 96
FP32 = PrecisionPolicy(name="fp32", param_dtype=torch.float32, compute_dtype=torch.float32, reduce_dtype=torch.float32)
# Strategy, options, and the layout that they lead to with 8 processes a machine.
CASES: list[tuple[str, dict[str, Any], Layout]] = [
    ("fsdp_tp", {"tp_size": 2}, Layout(dp_shard=4, tp=2)),
    ("hsdp_tp", {"tp_size": 2, "dp_replicate": 2}, Layout(dp_replicate=2, dp_shard=2, tp=2)),
    ("tp_cp", {"tp_size": 2}, Layout(cp=4, tp=2)),
    ("fsdp_pp", {"pp_size": 4}, Layout(pp=4, dp_shard=2)),
    ("mesh", {"pp_size": 2, "tp_size": 2}, Layout(pp=2, dp_shard=2, tp=2)),
    ("fsdp_tp", {"tp_size": 8}, Layout(dp_shard=8, tp=8)),
    ("hsdp_tp", {"tp_size": 4}, Layout(dp_replicate=8, dp_shard=2, tp=4)),
    ("hsdp_tp", {"tp_size": 8}, Layout(dp_replicate=8, tp=8)),
    ("tp_cp", {"tp_size": 4}, Layout(cp=16, tp=4)),
    ("mesh", {"pp_size": 4, "tp_size": 4, "dp_replicate": 2}, Layout(pp=4, dp_replicate=2, dp_shard=2, tp=4)),
    ("fsdp_tp", {"tp_size": 8}, Layout(dp_shard=64, tp=8)),
    ("hsdp_tp", {"tp_size": 2}, Layout(dp_replicate=128, dp_shard=4, tp=2)),
    ("mesh", {"dp_replicate": 4, "cp_size": 2, "tp_size": 8}, Layout(dp_replicate=4, dp_shard=8, cp=2, tp=8)),
    ("mesh", {"pp_size": 4, "tp_size": 8}, Layout(pp=4, dp_shard=16, tp=8)),
]


def make_model(**changes: Any) -> Any:
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, **changes}))


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the model as `hftrain plan` reads it."""
    folder = str(tmp_path_factory.mktemp("plan"))
    args = TrainingArguments(folder, use_cpu=True, report_to="none", per_device_train_batch_size=SAMPLES)
    rows = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)}] * 8
    with weightless():
        return read_model(Trainer(make_model(), args, train_dataset=rows))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context in which this process is one of many, whose collectives bring what it sends itself."""

    @contextmanager
    def started(name: str, size: int, rank: int, **options: Any) -> Iterator[MeshStrategy]:
        for key, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": 8}.items():
            monkeypatch.setenv(key, str(value))
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=size)
        try:
            # Nothing comes from rank 0: the weights are those of the same seed.
            strategy = create_strategy(name, use_cpu=True, sync_module_states=False, **options)
            assert isinstance(strategy, MeshStrategy)
            strategy.launch()
            yield strategy
            strategy.close()
        finally:
            dist.destroy_process_group()

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there
    # Sums of what the ranks compute lack what the other ranks would add.
    monkeypatch.setattr("hftrain.strategies.mesh.strategy.prove_blocks", lambda *_: None)
    # What the other stages of a pipeline tell.
    like = torch.empty(1, LENGTH, 64, device="meta")
    loss = described({"loss": torch.zeros((), requires_grad=True)})
    exchange = Links.exchange

    def filled(links: Links, sends: Any, receives: Any) -> list[torch.Tensor]:
        return [x.fill_(0.1) for x in exchange(links, sends, receives)]

    monkeypatch.setattr(Links, "exchange", filled)
    monkeypatch.setattr(Links, "hear", lambda links, device: like)
    monkeypatch.setattr(Links, "broadcast_object", lambda links, value, device: loss)
    return started


def block(shape: torch.Size, dim: int | None, layout: Layout, rank: int) -> tuple[slice, ...]:
    """Return what a rank holds: its tensor rank's part along `dim`, of which shards have rows of equal number."""
    at = layout.coordinate(rank)
    spans = [[0, size] for size in shape]
    if dim is not None:
        size = shape[dim] // layout.tp
        spans[dim] = [at["tp"] * size, (at["tp"] + 1) * size]
    first, end = spans[0]
    rows = -(-(end - first) // layout.shard_size)
    place = at["dp_shard"] * layout.cp + at["cp"]
    spans[0] = [min(first + place * rows, end), min(first + (place + 1) * rows, end)]
    return tuple(slice(*span) for span in spans)


def local(tensor: Any) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


@pytest.mark.parametrize(("name", "options", "layout"), CASES, ids=lambda each: str(each) if each else "")
def test_ranks_hold_every_parameter_once_and_as_much_as_is_planned(
    start: Any, planned: Model, name: str, options: dict[str, Any], layout: Layout
) -> None:
    whole = dict(make_model().named_parameters())
    owners = divide(make_model(), layout.pp).owners
    size = layout.size
    largest = []
    for rank in range(8) if size == 8 else (0, size // 2 + 5, size - 1):
        with start(name, size, rank, **options) as strategy:
            assert strategy.layout == layout
            at = layout.coordinate(rank)
            same_data = {"dp_replicate", "dp_shard"}
            apart = [other for other in range(size) if differs(layout, rank, other) <= same_data]
            assert dist.get_process_group_ranks(strategy.data.group) == apart
            assert (strategy.data.rank, strategy.data.world_size) == (apart.index(rank), layout.data_size)

            model = make_model()
            wrapped, optimizer = strategy.setup(model, lambda split: torch.optim.AdamW(split.parameters()), FP32)
            held = {key: each for key, each in model.named_parameters() if at["pp"] in owners[key]}
            dims = {key: each.placements[-1].dim if isinstance(each.placements[-1], Shard) else None
                    for key, each in held.items()} if layout.tp > 1 else dict.fromkeys(held)  # fmt: skip
            for key, parameter in model.named_parameters():
                if key not in held:
                    assert parameter.is_meta
                    continue
                assert parameter.shape == whole[key].shape
                assert torch.equal(local(parameter), whole[key][block(parameter.shape, dims[key], layout, rank)])
                counts = torch.zeros(parameter.shape)
                for other in range(size):
                    if layout.coordinate(other)["pp"] == at["pp"]:
                        counts[block(parameter.shape, dims[key], layout, other)] += 1
                copies = layout.dp_replicate * (layout.tp if dims[key] is None else 1)
                assert (counts == copies).all()

            ids = torch.randint(0, WORDS, (SAMPLES, LENGTH))
            wrapped(input_ids=ids, labels=ids)["loss"].backward()
            assert all(local(each.grad).shape == local(each).shape for each in held.values())
            gradients = sum(local(each.grad).nbytes for each in held.values())
            assert optimizer is not None
            optimizer.step()
            states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
            assert any(not torch.equal(local(p), whole[k][block(p.shape, dims[k], layout, rank)])
                       for k, p in held.items())  # fmt: skip
            own = (sum(local(each).nbytes for each in held.values()), gradients)
            largest.append((*own, sum(local(each).nbytes for each in states)))
    if layout.pp == 1:
        plan = measure(
            planned,
            name,
            options,
            layout=layout,
            machine=8,
            setting=(SAMPLES, False, False),
            saved=trace(planned, layout.tp),
        )
        parameters, gradients, state = map(max, zip(*largest, strict=True))
        assert (plan.parameters, plan.gradients) == (parameters, gradients)
        assert plan.optimizer == pytest.approx(state, rel=0.01)


def differs(layout: Layout, rank: int, other: int) -> set[str]:
    """Return the dimensions in which two ranks have different places."""
    first, second = layout.coordinate(rank), layout.coordinate(other)
    return {dim for dim in first if first[dim] != second[dim]}


def test_gradients_that_are_nan_are_not_taken_for_a_wrong_plan(start: Any) -> None:
    model = make_model()
    with start("fsdp_tp", 8, 0, tp_size=2) as strategy:
        wrapped, optimizer = strategy.setup(model, lambda split: torch.optim.AdamW(split.parameters()), FP32)
        wrapped(input_ids=torch.zeros(1, 8, dtype=torch.long))["logits"].mul(torch.nan).sum().backward()
        assert local(model.model.norm.weight.grad).isnan().all()
        optimizer.step()


def test_norms_that_differ_between_tensor_ranks_are_an_error_of_the_plan(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with start("fsdp_tp", 8, 0, tp_size=2) as strategy:
        wrapped, optimizer = strategy.setup(model, lambda split: torch.optim.AdamW(split.parameters()), FP32)
        wrapped(input_ids=torch.zeros(1, 8, dtype=torch.long))["logits"].sum().backward()
        # Another rank's norms are larger by a hundredth.
        monkeypatch.setattr(dist, "all_reduce", lambda both, *_, **__: both[0].mul_(1.01))
        with pytest.raises(StrategyError, match=r"have different inputs of .*q_proj"):
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"tp_size": 16}, {}, "which 16 does not divide"),
        ({"pp_size": 8}, {}, "It has 4 layers"),
        ({"cp_size": 2}, {"attn_implementation": "eager"}, "eager"),
        ({"tp_size": 8}, {"num_key_value_heads": 2}, "which 8 does not divide"),
    ],
    ids=str,
)
def test_model_that_a_mesh_cannot_share_is_refused_before_it_is_changed(
    start: Any, options: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    model = make_model(**changes)
    before = {key: (each, each.clone()) for key, each in model.named_parameters()}
    with start("mesh", 512, 77, **options) as strategy, pytest.raises(ConfigError, match=reason):
        strategy.setup(model, lambda split: torch.optim.AdamW(split.parameters()), FP32)
    for key, parameter in model.named_parameters():
        assert parameter is before[key][0]
        assert torch.equal(parameter, before[key][1])
    assert not any(hooked(module) for module in model.modules())


def hooked(module: nn.Module) -> bool:
    return bool(module._forward_pre_hooks or module._forward_hooks)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp_size": 3}, "describe 3 processes"),
        ({"tp_size": 8, "dp_shard": 8}, "describe 64 processes"),
        ({"tp_size": 0}, "not a number"),
        ({"tp_size": "all"}, "not a number"),
        ({"tp_size": "auto"}, "not a number"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_the_processes_are_refused_without_a_process_group(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    for key, value in {"RANK": 0, "WORLD_SIZE": 512, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(ConfigError, match=reason):
        create_strategy("mesh", use_cpu=True, **options)
    assert not dist.is_initialized()
