"""What every optimizer of an optional package does without it, on the wrong device, and with its options."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.errors import ConfigError, MissingDependencyError
from hftrain.core.extras import is_available
from hftrain.core.parameters import load_optimizer_state
from hftrain.optim.extras import packaged
from hftrain.optim.extras.anyprecision import AnyPrecisionAdamW
from hftrain.optim.optimizers import OptimizerConfig, build_optimizer, optimizers

PACKAGED = [name for name in optimizers.names() if optimizers.summary(name) not in ("torch", "")]
NEEDS_CUDA = ["adalomo", "adamw_apex_fused", "galore_adamw_8bit", "galore_adamw_8bit_layerwise"]


def class_of(name: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    model = settings.pop("model", nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)))
    config = {"target_modules": "all-linear"} if name.startswith(("galore", "apollo")) else {}
    return OptimizerConfig(**{"name": name, "learning_rate": 0.1, **config, **settings}).optimizer_class(model)


@pytest.mark.parametrize("name", PACKAGED)
def test_optimizer_of_a_missing_package_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = optimizers.summary(name)
    if is_available(package):
        pytest.skip(f"{package} is installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MissingDependencyError, match=f"optim='{name}'.*{package}.*pip install"):
        class_of(name)


@pytest.mark.parametrize("name", NEEDS_CUDA)
def test_optimizer_for_cuda_is_refused_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match=f"optim='{name}'.*CUDA devices only"):
        class_of(name, use_cpu=True)


@pytest.mark.parametrize("name", ["galore_adafactor", "apollo_adamw"])
def test_low_rank_update_that_mixes_tensors_is_refused_for_shards(name: str) -> None:
    model = nn.Linear(4, 4)
    model.weight.placements = ()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="sharded"):
        class_of(name, model=model)


def test_optimizer_that_counts_parameters_is_refused_for_a_stage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ConfigError, match=r"grokadamw.*in a pipeline.*place among all"):
        class_of("grokadamw", model=model)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("adamw_torch_xla", "torch_xla.amp.syncfree:AdamW"),
        ("adamw_torch_npu_fused", "torch_npu.optim:NpuFusedAdamW"),
        ("adamw_apex_fused", "apex.optimizers:FusedAdam"),
    ],
)
def test_vendors_adamw_gets_adams_arguments(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    # A stand-in module: none of the three packages runs without its device.
    path, _, cls = module.partition(":")
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[path], cls, torch.optim.AdamW)
    monkeypatch.setattr("hftrain.optim.optimizers.require", lambda requirement, **about: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    assert class_of(name, betas=(0.8, 0.9), eps=1e-6) == (torch.optim.AdamW, settings)
    with pytest.raises(ConfigError, match="It takes none"):
        class_of(name, options="fused=True")


def test_package_without_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As when "apex" is another package of that name.
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setattr("hftrain.optim.optimizers.require", lambda requirement, **about: None)
    monkeypatch.setattr(packaged, "check_cuda", lambda config, **about: None)
    with pytest.raises(MissingDependencyError, match=r"'apex' is installed, but apex\.optimizers has no FusedAdam"):
        class_of("adamw_apex_fused")


def test_target_modules_without_low_rank_warn() -> None:
    with pytest.warns(UserWarning, match="optim_target_modules has no effect"):
        class_of("sgd", target_modules=["attn"])


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
@pytest.mark.optimizers
def test_lomo_needs_a_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="hooks into the model"):
        class_of(name, model=None)


@pytest.mark.optimizers
@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")
@pytest.mark.parametrize(
    "name", [name for name in PACKAGED if not name.startswith("adamw_torch_") and name not in NEEDS_CUDA]
)
def test_optimizer_of_a_package_refuses_unknown_options(name: str) -> None:
    with pytest.raises(ConfigError, match=f"optim='{name}'.*'momentun'"):
        class_of(name, options="momentun=0.9")


@pytest.mark.optimizers
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("adafactor", "beta1=0.9, decay_rate=-0.7", {"beta1": 0.9, "decay_rate": -0.7, "relative_step": False}),
        ("adafactor", None, {"scale_parameter": False, "relative_step": False}),
        ("ademamix", "beta3=0.99, alpha=2, t_alpha=7", {"betas": (0.9, 0.999, 0.99), "alpha": 2.0, "t_alpha": 7}),
        ("paged_ademamix_8bit", None, {"betas": (0.9, 0.999, 0.9999), "optim_bits": 8, "is_paged": True}),
        ("rmsprop_bnb", "alpha=0.9,momentum=0.5", {"alpha": 0.9, "momentum": 0.5, "optim_bits": 32}),
        ("paged_lion_32bit", None, {"betas": (0.9, 0.999), "optim_bits": 32, "is_paged": True}),
        ("lion_8bit", None, {"optim_bits": 8, "is_paged": False}),
        ("grokadamw", "lamb=3, gamma=0.2", {"lamb": 3.0, "gamma": 0.2, "betas": (0.9, 0.999)}),
        ("schedule_free_adamw", "r=1", {"r": 1.0, "warmup_steps": 5, "betas": (0.9, 0.999)}),
        ("schedule_free_sgd", "weight_lr_power=1", {"weight_lr_power": 1.0, "warmup_steps": 5}),
        ("stable_adamw", "kahan_sum=False,decouple_lr=False", {"kahan_sum": False, "decouple_lr": False}),
        ("galore_adamw", "rank=64, update_proj_gap=100, scale=0.10", {
            "low_rank": {"rank": 64, "update_proj_gap": 100, "scale": 0.1, "proj_type": "std"}, "eps": 1e-8}),
        ("galore_adafactor", None, {"relative_step": False, "scale_parameter": False}),
        ("galore_adafactor_layerwise", None, {"relative_step": False, "scale_parameter": False}),
        ("apollo_adamw", "proj=svd,scale_type=tensor,rank=1", {
            "low_rank": {"rank": 1, "proj": "svd", "scale_type": "tensor", "update_proj_gap": 200, "scale": 1.0,
                         "proj_type": "std"}, "betas": (0.9, 0.999)}),
    ],
)  # fmt: skip
def test_optimizer_of_a_package_casts_its_options(name: str, options: str | None, expected: dict[str, Any]) -> None:
    settings = class_of(name, options=options, warmup_steps=5)[1]
    assert {key: settings[key] for key in expected} == expected
    assert settings["lr"] == 0.1


@pytest.mark.optimizers
def test_grokadamw_leaves_logging_alone() -> None:
    sys.modules.pop("grokadamw.grokadamw", None)
    sys.modules.pop("grokadamw", None)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    class_of("grokadamw")
    assert (root.handlers, root.level) == (handlers, level)


@pytest.mark.optimizers
@pytest.mark.parametrize(("name", "bits"), [("adamw_8bit", 8), ("adamw_bnb_8bit", 8), ("paged_adamw_32bit", 32)])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_bitsandbytes_keeps_embeddings_in_32_bits(name: str, bits: int) -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    optimizer = build_optimizer(OptimizerConfig(name=name), model)
    model(torch.tensor([3])).sum().backward()
    optimizer.step()
    kinds = {p.shape: optimizer.state[p]["state1"].dtype for p in model.parameters()}
    assert kinds[model[1].bias.shape] == torch.float32
    assert optimizer.state[model[0].weight]["state1"].dtype == torch.float32
    assert optimizer.state[model[1].weight]["state1"].dtype == (torch.uint8 if bits == 8 else torch.float32)


def make_lomo(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any]:
    # It runs on CUDA only: here "moving to CUDA" stays where it is, and the rest is the real package.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, build_optimizer(OptimizerConfig(name=name, learning_rate=0.1), model)


@pytest.mark.optimizers
def test_adalomo_trains_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for stop in (4, 2):
        model, optimizer = make_lomo("adalomo", monkeypatch)
        for step in range(4):
            if step == stop:
                state = optimizer.state_dict()
                optimizer = build_optimizer(OptimizerConfig(name="adalomo", learning_rate=0.1), model)
                optimizer.load_state_dict(state)
            loss = model(torch.full((2, 3), 0.1 * (step + 1))).square().mean()
            optimizer.update_in_backward(loss, backward=torch.Tensor.backward, max_norm=0.5)
            assert optimizer.last_norm() > 0
            optimizer.step()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.optimizers
@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_lomo_steps_after_the_backward_pass_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # As it does with several processes.
    models = []
    for is_during in (True, False):
        model, optimizer = make_lomo(name, monkeypatch)
        for step in range(3):
            loss = model(torch.full((2, 3), 0.1 * (step + 1))).square().mean()
            if is_during:
                optimizer.update_in_backward(loss, backward=torch.Tensor.backward, max_norm=0.0)
                assert optimizer.last_norm() is None
            else:
                before = model[0].weight.detach().clone()
                loss.backward()
                assert torch.equal(model[0].weight, before)
            optimizer.step()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.optimizers
@pytest.mark.parametrize("layerwise", ["", "_layerwise"])
def test_galore_in_8_bits_trains_and_resumes(monkeypatch: pytest.MonkeyPatch, layerwise: str) -> None:
    # It runs on CUDA only, because it synchronises with the device: that is left out here, the rest is the package.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    models = []
    for stop in (4, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 1))
        config = OptimizerConfig(
            name=f"galore_adamw_8bit{layerwise}",
            learning_rate=0.1,
            weight_decay=0.1,
            target_modules=["0"],
            options="rank=64",
        )
        optimizer: Any = build_optimizer(config, model)
        for step in range(4):
            if step == stop:
                state = optimizer.state_dict()
                optimizer = build_optimizer(config, model)
                optimizer.load_state_dict(state)
            loss = model(torch.full((2, 128), 0.1 * (step + 1))).square().mean()
            if layerwise:
                optimizer.update_in_backward(loss, backward=torch.Tensor.backward, max_norm=0.0)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[model[0].weight]["state1"].dtype == torch.uint8
        assert optimizer.state[model[0].weight]["projector"].ortho_matrix.shape == (96, 64)
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def test_anyprecision_equals_adamw_by_default() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    pair = [
        (model, build_optimizer(OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.1), model))
        for model, name in ((ours, "adamw_anyprecision"), (theirs, "adamw_torch"))
    ]
    for step in range(5):
        for model, optimizer in pair:
            model(torch.full((1, 3), 0.3 * step + 0.1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)
    state = pair[0][1].state[ours.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.float32)
    assert "compensation" not in state


def test_anyprecision_defaults_are_the_documented_ones() -> None:
    optimizer = AnyPrecisionAdamW([nn.Parameter(torch.ones(2))], use_kahan_summation=True)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[parameter]["compensation"].dtype == torch.bfloat16


def test_anyprecision_compensation_keeps_small_updates() -> None:
    weights = []
    for options in ("", "use_kahan_summation=True"):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        config = OptimizerConfig(name="adamw_anyprecision", learning_rate=1e-4, options=options)
        optimizer = build_optimizer(config, model)
        for _ in range(100):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        weights.append(model.weight.item())
    assert weights[0] == 1.0  # each update is lost in rounding
    assert weights[1] == pytest.approx(0.99, abs=0.005)


def test_anyprecision_state_keeps_its_dtypes() -> None:
    options = "momentum_dtype=float32, variance_dtype=torch.bfloat16, use_kahan_summation=1"
    config = OptimizerConfig(name="adamw_anyprecision", options=options)
    models = [nn.Linear(3, 2).bfloat16() for _ in range(2)]
    first, second = (build_optimizer(config, model) for model in models)
    models[0](torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    first.step()
    load_optimizer_state(second, first.state_dict())
    state = second.state[models[1].weight]
    assert [state[name].dtype for name in ("exp_avg", "exp_avg_sq", "compensation")] == [
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    ]
    assert torch.equal(state["exp_avg"], first.state[models[0].weight]["exp_avg"])


def test_anyprecision_refuses_what_is_no_dtype() -> None:
    with pytest.raises(ConfigError, match="names no dtype"):
        class_of("adamw_anyprecision", options="momentum_dtype=int8")
