"""Which optimizers take torch's fused kernel, and that it changes nothing but the rounding."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hftrain.core.errors import ConfigError
from hftrain.optim.fused import can_fuse
from hftrain.optim.optimizers import OptimizerConfig, build_optimizer


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") is True for group in optimizer.param_groups)


def changes_every_element(dtype: torch.dtype) -> bool:
    """Tell whether torch's fused SGD steps parameters of a dtype; in torch 2.13 it left those of 16 bits unchanged."""
    parameter = torch.zeros(64, dtype=dtype)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool(parameter.all())


def train(name: str, options: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    model = make_model(dtype)
    config = OptimizerConfig(name=name, learning_rate=0.01, weight_decay=0.1, options=options)
    optimizer = build_optimizer(config, model)
    for step in range(3):
        model(torch.full((2, 5), 0.3 * step, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [("adamw_torch", {}), ("adamw_torch", {"amsgrad": True}), ("sgd", {}), ("adagrad", {"lr_decay": 0.1})],
)
def test_fused_kernel_is_chosen_and_equals_the_loop(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, optimizer = train(name, options, dtype)
    looped, plain = train(name, {**options, "fused": False}, dtype)
    assert is_fused(optimizer) is (name != "sgd" or changes_every_element(dtype))
    assert not is_fused(plain)
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(ours, looped, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw_torch", "fused=False"),
        ("adamw_torch", "foreach=True"),
        ("adamw_torch", "foreach=False"),
        ("adamw_torch", "differentiable=True"),
        ("sgd", "momentum=0.9"),
        ("rmsprop", None),
    ],
)
def test_another_choice_stays(name: str, options: str | None) -> None:
    optimizer = build_optimizer(OptimizerConfig(name=name, options=options), make_model())
    assert not any(group.get("fused") for group in optimizer.param_groups)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_parameters_without_a_kernel_are_looped_over(dtype: torch.dtype) -> None:
    model = make_model()
    model.extra = nn.Parameter(torch.zeros(2, dtype=dtype))
    assert not can_fuse(torch.optim.AdamW, {}, model, model.parameters())
    model.extra.requires_grad_(False)
    assert is_fused(build_optimizer(OptimizerConfig(), model))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_sparse_gradients_are_taken(name: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    before = model[0].weight.detach().clone()
    optimizer = build_optimizer(OptimizerConfig(name=name, learning_rate=0.1), model)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert model[0].weight.grad.is_sparse
    assert (model[0].weight != before).any(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "adagrad"])
def test_a_parameter_with_gaps_or_other_strides_is_looped_over(name: str) -> None:
    for weight in (torch.rand(3, 14)[:, ::2], torch.rand(7, 3).t()):
        model = make_model()
        model[2].weight = nn.Parameter(weight)
        assert not is_fused(build_optimizer(OptimizerConfig(name=name), model))


@pytest.mark.parametrize("options", [{"name": "adamw_torch_fused"}, {"name": "sgd", "options": "fused=True"}])
def test_the_fused_form_is_refused_for_a_parameter_with_gaps(options: dict[str, Any]) -> None:
    model = make_model()
    config = OptimizerConfig(**options)
    model[2].weight = nn.Parameter(torch.rand(7, 3).t())
    assert is_fused(build_optimizer(config, model))
    model[2].weight = nn.Parameter(torch.rand(3, 14)[:, ::2])
    with pytest.raises(ConfigError, match=r"fused=True with a parameter of shape \(3, 7\).*strides \(14, 2\)"):
        build_optimizer(config, model)


@pytest.mark.parametrize("is_chosen", [False, True])
@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "adagrad"])
def test_gradients_that_are_assigned_may_have_any_strides(name: str, is_chosen: bool) -> None:
    models = make_model(), make_model()
    for model, options in zip(models, ({"fused": True} if is_chosen else {}, {"fused": False}), strict=True):
        if is_chosen:  # dense, in another order
            model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
        optimizer = build_optimizer(OptimizerConfig(name=name, learning_rate=0.1, options=options), model)
        for parameter in model.parameters():
            grad = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.grad = (
                grad.reshape(parameter.shape[::-1]).t() if parameter.ndim == 2 else grad[:1].expand(7)[: len(grad)]
            )
        optimizer.step()
    torch.testing.assert_close(list(models[0].parameters()), list(models[1].parameters()))


def train_images(options: dict[str, Any], formats: list[torch.memory_format], saved: Any = None) -> Any:
    """Train with one memory format a step; return the weights and the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).to(memory_format=formats[0])
    optimizer = build_optimizer(OptimizerConfig(learning_rate=0.1, options=options), model)
    if saved is not None:
        optimizer.load_state_dict(copy.deepcopy(saved))
    for step, memory_format in enumerate(formats):
        model.to(memory_format=memory_format)
        optimizer.zero_grad()
        model(torch.arange(108.0).reshape(1, 3, 6, 6).sin() + step).square().mean().backward()
        optimizer.step()
    return list(model.parameters()), optimizer.state_dict()


LAST, USUAL = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize(
    ("options", "formats"),
    [({}, [USUAL, LAST, LAST]), ({}, [USUAL, LAST, USUAL]), ({"fused": True}, [USUAL, LAST, LAST])],
)
def test_a_model_may_become_channels_last_while_it_trains(
    options: dict[str, Any], formats: list[torch.memory_format]
) -> None:
    looped, _ = train_images({"fused": False}, formats)
    torch.testing.assert_close(train_images(options, formats)[0], looped)


@pytest.mark.parametrize(("before", "after"), [(LAST, USUAL), (USUAL, LAST)])
def test_a_model_takes_the_moments_of_another_memory_format(
    before: torch.memory_format, after: torch.memory_format
) -> None:
    _, saved = train_images({"fused": True}, [before] * 2)
    looped, _ = train_images({"fused": False}, [after], {**saved, "param_groups": unfused(saved)})
    fused, _ = train_images({"fused": True}, [after], saved)
    torch.testing.assert_close(fused, looped)


def unfused(saved: Any) -> list[dict[str, Any]]:
    return [{**group, "fused": False} for group in saved["param_groups"]]


def test_parameters_of_a_class_of_their_own_are_looped_over() -> None:
    class Own(nn.Parameter):
        pass

    model = make_model()
    model[0].bias = Own(torch.zeros(7))
    assert not can_fuse(torch.optim.AdamW, {}, model, model.parameters())


def test_split_parameters_are_fused_where_torch_can(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), make_model()
        split = [nn.Parameter(DTensor.from_local(p.detach(), mesh, [Replicate()])) for p in model.parameters()]
        assert can_fuse(torch.optim.AdamW, {}, model, split)
        assert not can_fuse(torch.optim.SGD, {}, model, split)
        # One call cannot take both kinds.
        assert not can_fuse(torch.optim.AdamW, {}, model, [*split, *model.parameters()])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_leaves_parameters_unchanged_is_not_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)  # as torch 2.13 does
    model = nn.Linear(64, 64).to(dtype)
    assert not can_fuse(torch.optim.SGD, {"lr": 0.1}, model, model.parameters())
    assert can_fuse(torch.optim.AdamW, {"lr": 0.1}, model, model.parameters())
    with pytest.raises(ConfigError, match=r"Cannot use fused=True with parameters of torch\.\w+\."):
        build_optimizer(OptimizerConfig(name="sgd", options={"fused": True}), model)
