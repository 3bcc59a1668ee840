"""Files that hold the weights of a model on the meta device: what fits, and what is refused before any is read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_models import make_model
from support.tiny import make_arguments
from torch import nn

from hftrain import CheckpointError, ConfigError, HFTrainError, TaskModule, Trainer, attach_weights
from hftrain.core.parameters import stored_in
from hftrain.core.types import PrecisionPolicy
from hftrain.storage.shards import load_tensors
from hftrain.storage.tensors import save_tensors
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.single import SingleDeviceStrategy


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, width), nn.Linear(width, 2, bias=False)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.first(x) + self.shift)


class Computing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2), persistent=False)


class Keeping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.limits = torch.ones(2)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(2)
        self.head.weight = self.first.weight


def hollow(make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return make()


def saved(folder: Path, **changes: torch.Tensor | None) -> Path:
    state = {**Net().state_dict(), **changes}
    save_tensors({name: value for name, value in state.items() if value is not None}, folder / "model.safetensors")
    return folder


POLICY = PrecisionPolicy(
    name="fp32", param_dtype=torch.float32, compute_dtype=torch.float32, reduce_dtype=torch.float32
)


def read(model: nn.Module) -> dict[str, torch.Tensor]:
    """Let a strategy with one process shard the model; return its state."""
    strategy = FSDPStrategy(use_cpu=True)
    strategy.launch()
    try:
        strategy.setup(model, lambda bare: torch.optim.SGD(bare.parameters()), POLICY)
        return {name: value.clone() for name, value in strategy.full_tensors(model)}
    finally:
        strategy.close()


@pytest.mark.parametrize("as_file", [False, True])
def test_values_are_those_of_the_files(tmp_path: Path, as_file: bool) -> None:
    folder = saved(tmp_path, shift=torch.arange(3.0))
    model = hollow()
    assert attach_weights(model, folder / "model.safetensors" if as_file else folder) is model
    assert all(parameter.is_meta for parameter in model.parameters())
    found = read(model)
    expected = load_tensors(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert stored_in(model) == {}


def test_values_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    model = attach_weights(hollow(), saved(tmp_path)).to(torch.bfloat16)
    found = read(model)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


def test_parameters_with_values_keep_them_unless_they_are_in_the_files(tmp_path: Path) -> None:
    model = hollow()
    model.extra = nn.Linear(2, 2)  # type: ignore[assignment]
    model.shift = torch.ones(3)  # type: ignore[assignment]
    expected = model.extra.weight.detach().clone()  # type: ignore[union-attr, operator]
    found = read(attach_weights(model, saved(tmp_path, shift=torch.full((3,), 7.0))))
    assert torch.equal(found["extra.weight"], expected)
    assert found["shift"].tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (hollow, {"head.weight": None}, "missing: head.weight."),
        (hollow, {"shift": None}, "missing: shift."),
        (hollow, {"extra": torch.ones(1)}, "unexpected: extra."),
        (hollow, {"first.bias": torch.ones(4)}, "of another shape: first.bias."),
        (Net, {}, "It is not on the meta device"),
        (lambda: hollow(Computing), {}, "The model computes scale when it is built"),
        (lambda: hollow(Keeping), {}, "The model computes limits when it is built"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, make: Any, changes: Any, words: str) -> None:
    model = make()
    with pytest.raises(HFTrainError, match="Cannot read the weights of") as error:
        attach_weights(model, saved(tmp_path, **changes))
    assert words in str(error.value)
    assert stored_in(model) == {}


def test_files_that_would_be_read_whole_are_refused(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="read whole"):
        attach_weights(hollow(), tmp_path)


def test_tied_weights_with_other_values_are_refused(tmp_path: Path) -> None:
    first, head = torch.ones(2, 2), torch.zeros(2, 2)
    state = {"first.weight": first, "first.bias": torch.ones(2), "shift": torch.ones(2)}
    save_tensors({**state, "head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"other values for head\.weight"):
        read(attach_weights(hollow(Tied), tmp_path))
    save_tensors(state, tmp_path / "model.safetensors")
    model = hollow(Tied)
    read(attach_weights(model, tmp_path))
    assert model.first.weight is model.head.weight  # type: ignore[union-attr]


def test_strategies_that_do_not_read_in_parts_refuse_the_model(tmp_path: Path) -> None:
    model = attach_weights(hollow(), saved(tmp_path))
    single = SingleDeviceStrategy(use_cpu=True)
    single.launch()
    with pytest.raises(ConfigError, match="without weights"):
        single.setup(model, None, POLICY)
    FSDPStrategy(use_cpu=True).check_model(model)
    stored_in(model, take=True)
    with pytest.raises(ConfigError, match="attach_weights"):
        FSDPStrategy(use_cpu=True).check_model(model)


class Line(TaskModule):
    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch["x"]), batch["y"])


def test_a_resume_reads_its_checkpoint_in_parts(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    samples = [{"x": torch.tensor([1.0, float(n)]), "y": torch.ones(2)} for n in range(8)]

    def run(name: str, resume: Path | None) -> dict[str, torch.Tensor]:
        args = make_arguments(tmp_path / name, max_steps=2, save_strategy="steps", save_steps=1)
        strategy = FSDPStrategy(use_cpu=True)
        trainer = Trainer(Line(attach_weights(hollow(), folder)), args, train_dataset=samples, strategy=strategy)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        trainer.save_model(str(tmp_path / name / "end"))
        strategy.close()
        return load_tensors(tmp_path / name / "end" / "model.safetensors")

    whole = run("first", None)
    resumed = run("second", tmp_path / "first" / "checkpoint-1")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.interop
def test_buffers_are_those_that_the_model_computes(tmp_path: Path) -> None:
    whole = make_model("llama")
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(whole)(copy.deepcopy(whole.config))
    before = torch.get_rng_state()
    attach_weights(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    found = dict(model.named_buffers())
    assert len(found) > 0
    assert all(torch.equal(value, found[name]) for name, value in whole.named_buffers())


@pytest.mark.interop
def test_the_files_of_old_models_may_hold_what_is_computed(tmp_path: Path) -> None:
    whole = make_model("llama")
    state = {**whole.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_tensors(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = type(whole)(copy.deepcopy(whole.config))
    attach_weights(model, tmp_path)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_read_the_weights_below_them_and_need_values_of_their_own(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    whole = make_model("llama")
    whole.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(whole)(copy.deepcopy(whole.config))
    adapted: Any = get_peft_model(attach_weights(model, tmp_path), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="lora_A"):
        FSDPStrategy(use_cpu=True).check_model(adapted)
    for module in adapted.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
            module.reset_lora_parameters("default", True)
    found = read(adapted)
    key = "model.layers.0.self_attn.q_proj"
    assert torch.equal(found[f"base_model.model.{key}.base_layer.weight"], whole.state_dict()[f"{key}.weight"])
    assert not found[f"base_model.model.{key}.lora_B.default.weight"].any()
    assert found[f"base_model.model.{key}.lora_A.default.weight"].any()
