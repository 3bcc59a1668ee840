"""Training on XLA devices: those that torch_xla makes of a CPU, one, two and four, in a process of their own.

A process cannot go back from several devices to one, and its XLA client must be there before its first backward pass;
so each setting runs once, in one process, and the tests look at what it answered.
"""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import Net, Noisy, Task, make_arguments, make_rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from hftrain import Trainer
from hftrain.core.errors import ConfigError, StrategyError

pytestmark = [
    pytest.mark.xla,
    # torch 2.9, which torch_xla wants, says so when the tests look at its flags.
    pytest.mark.filterwarnings("ignore:Please use the new API settings"),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"strategy": "xla"},
    "two": {"tpu_num_cores": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2},
    "fsdp_one": {"strategy": "xla_fsdp"},
    "fsdp_two": {"strategy": "xla_fsdp"},
    "fsdp_four": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"xla": True, "xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": "Sequential"},
    },
}
NUM_DEVICES = {"one": 1, "fsdp_one": 1, "two": 2, "fsdp_two": 2, "fsdp_four": 4}
NUM_EVALUATED = (1, 4, 17)
# What is run in which setting; every further device costs seconds per step on a small machine.
PARTS = {
    "one": ("learn", "compare", "resume", "tie", "switch", "compile_once", "recompute", "halve", "look_inside"),
    "two": ("refuse", "learn", "look_inside"),
    "fsdp_one": ("learn", "resume", "tie", "shard"),
    "fsdp_two": ("learn", "resume", "tie", "switch", "look_inside"),
    "fsdp_four": ("learn", "look_inside"),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.head.weight = self.embed.weight
        self.inner = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.inner(self.embed(self.inner(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 3))


class Counting(nn.Module):
    """A layer that counts how often it is computed, and whether the model's cache was on."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear, self.config, self.seen = nn.Linear(8, 8), config, list[bool]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.config.use_cache)
        return torch.tanh(self.linear(x))


class Caching(nn.Module):
    """A model that names its layers, has a cache, and a switch that calls torch's checkpoint, as transformers' have."""

    _no_split_modules = ("Counting",)

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.layers = nn.Sequential(nn.Linear(4, 8), Counting(self.config), nn.Linear(8, 3))
        self.recomputes = False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.recomputes = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = checkpoint(self.layers, x, use_reentrant=False) if self.recomputes else self.layers(x)
        return nn.functional.cross_entropy(logits, labels), logits


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[-1] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


# -- what the processes run ------------------------------------------------------------------------------------------


def make(
    folder: Path, model: Any = None, *, rows: Any = None, optimizers: Any = (None, None), **options: Any
) -> Trainer:
    """Build a Trainer of the same start; `strategy` may be among the options."""
    torch.manual_seed(0)
    strategy = options.pop("strategy", None)
    args = make_arguments(folder, **{"use_cpu": strategy == "single", "max_grad_norm": 0.5, **options})
    model = Net() if model is None else model()
    rows = make_rows(22) if rows is None else rows
    given = {"compute_metrics": accuracy} if isinstance(model, Net) else {}
    return Trainer(model, args, train_dataset=rows, optimizers=optimizers, strategy=strategy, **given)


def follow(trainer: Trainer, **options: Any) -> list[list[float]]:
    trainer.train(**options)
    return [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]


def num_compiled() -> int:
    from torch_xla.debug import metrics

    return int((metrics.metric_data("CompileTime") or [0])[0])


def run_setting(name: str) -> dict[str, Any]:
    """Train in several ways; CPU runs come after the first XLA run, which starts the client."""
    answer: dict[str, Any] = {}
    for part in PARTS[name]:
        globals()[part](SETTINGS[name], answer, Path(part))
    return answer


def refuse(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    """Ask for more devices than there are, before anything else; the process is none the worse for it."""
    from hftrain.strategies.xla import XLAStrategy

    with pytest.raises(StrategyError) as caught:
        XLAStrategy(num_devices=4).launch()
    answer["refusal"] = str(caught.value)


def learn(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    for accumulation in (1, 3):
        for name, choice in (("xla", setting), ("cpu", {"strategy": "single"})):
            trainer = make(folder, **choice, gradient_accumulation_steps=accumulation)
            answer[f"{name} losses {accumulation}"] = follow(trainer)
            answer[f"{name} evaluations {accumulation}"] = [
                [metrics["eval_loss"], metrics["eval_accuracy"]]
                for metrics in (trainer.evaluate(make_rows(num, seed=2)) for num in NUM_EVALUATED)
            ]
            answer[f"{name} name"] = trainer.strategy.name


def compare(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    """Give an optimizer that was made for the parameters on the CPU."""
    for name, choice in (("xla", setting), ("cpu", {"strategy": "single"})):
        net = Net()
        torch.manual_seed(7)
        nn.init.normal_(net.layers[0].weight)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        answer[f"{name} given"] = follow(make(folder, lambda net=net: net, optimizers=(optimizer, None), **choice))


def resume(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "linear"}

    def start(**others: Any) -> Trainer:
        folder_of = folder / "again" if "seed" in others else folder
        return make(folder_of, lambda: Task(0.4), rows=Noisy(make_rows(22)), **options, **{**setting, **others})

    answer["undisturbed"] = follow(start())
    answer["resumed"] = follow(start(), resume_from_checkpoint=str(folder / "checkpoint-4"))
    answer["seeded anew"] = follow(start(seed=43))
    # The state is host memory's: a CPU goes on with it.
    on_cpu = make(
        folder, lambda: Task(0.0), rows=make_rows(22), **options, strategy="single", per_device_train_batch_size=4
    )
    answer["cpu goes on"] = len(follow(on_cpu, resume_from_checkpoint=str(folder / "checkpoint-4")))


def tie(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    setting = {**setting, "num_train_epochs": 1}
    trainer = make(folder, Tied, **setting)
    embed = trainer.model.embed.weight
    losses = follow(trainer)
    trainer.save_model(str(folder / "saved"))
    answer["is tied"] = trainer.model.embed.weight is trainer.model.head.weight and trainer.model.head.weight is embed
    answer["saved"] = sorted(path.name for path in (folder / "saved").iterdir())
    state = trainer.strategy.model_state(trainer.model)
    answer["is tied on host"] = (
        state["embed.weight"] is state["head.weight"] and state["embed.weight"].device.type == "cpu"
    )
    answer["tied losses"] = [losses, follow(make(folder, Tied, strategy="single", num_train_epochs=1))]
    fresh = Tied()
    trainer._load_from_checkpoint(str(folder / "saved"), model=fresh)
    answer["is loaded"] = bool(torch.equal(fresh.head.weight, state["head.weight"]))


def switch(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    """Recompute with the documented switch, which turns the cache off for as long as the model trains."""
    options = {"max_steps": 2, "gradient_checkpointing": True}
    for name, choice in (("xla", setting), ("cpu", {"strategy": "single"})):
        trainer = make(folder, Caching, **options, **choice)
        answer[f"{name} switched"] = follow(trainer)
        answer[f"{name} cache"] = [list(trainer.model.layers[1].seen), trainer.model.config.use_cache]
        trainer.model.layers[1].seen.clear()
        trainer.evaluate(make_rows(2))
        answer[f"{name} evaluated"] = trainer.model.layers[1].seen
    trainer = make(folder, Caching, use_cache=False, max_steps=1, **setting)
    follow(trainer)
    answer["use_cache"] = [list(trainer.model.layers[1].seen), trainer.model.config.use_cache]
    answer["nothing to recompute"] = []
    for kwargs in (None, {"layer_classes": ["Blok"]}):
        with pytest.raises(ConfigError) as caught:
            make(folder, gradient_checkpointing_kwargs=kwargs, **options, **setting).train()
        answer["nothing to recompute"].append(str(caught.value))


def compile_once(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    rows = make_rows(24)
    follow(make(folder, rows=rows, num_train_epochs=1, **setting))
    before = num_compiled()
    follow(make(folder, rows=rows, num_train_epochs=3, learning_rate=3e-3, **setting))
    answer["compiled again"] = num_compiled() - before


def recompute(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    from hftrain.strategies.xla import XLAStrategy

    for name, recomputes in (("kept", False), ("recomputed", True)):
        strategy = XLAStrategy(
            shards="fsdp" in str(setting),
            num_devices=setting.get("tpu_num_cores"),
            layer_classes=["Block"],
            recomputes=recomputes,
        )
        answer[name] = follow(make(folder, Blocks, strategy=strategy, max_steps=2))


def halve(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = make(folder, bf16=True, debug="tpu_metrics_debug", **setting)
        answer["halved"] = [follow(trainer), follow(make(folder, strategy="single"))]
    answer["prints metrics"] = "CompileTime" in printed.getvalue()
    answer["stays whole"] = str(trainer.model.layers[0].weight.dtype)


def shard(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    """Train with the documented keys; nothing may exchange gradients beside the compiler."""
    import torch_xla.core.xla_model as xm

    calls: list[str] = []
    before = xm.optimizer_step, xm.reduce_gradients
    xm.optimizer_step = xm.reduce_gradients = lambda *given, **named: calls.append("reduced")
    config = {
        "xla": True, "transformer_layer_cls_to_wrap": "Linear,LayerNorm", "xla_fsdp_grad_ckpt": True,
        "xla_fsdp_settings": {"shard_param_on_dim_0": True},
    }  # fmt: skip
    trainer = make(folder, num_train_epochs=1, weight_decay=0.1, fsdp="full_shard auto_wrap", fsdp_config=config)
    answer["sharded losses"] = [
        follow(trainer),
        follow(make(folder, num_train_epochs=1, weight_decay=0.1, strategy="single")),
    ]
    answer["trainable"] = trainer.get_num_trainable_parameters()
    answer["decay"] = [[group["weight_decay"], len(group["params"])] for group in trainer.optimizer.param_groups]
    answer["calls"] = calls
    xm.optimizer_step, xm.reduce_gradients = before


def look_inside(setting: dict[str, Any], answer: dict[str, Any], folder: Path) -> None:
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    setting = {**setting, "num_train_epochs": 1}
    trainer = make(folder, logging_nan_inf_filter=True, **setting)
    follow(trainer)
    weight = trainer.model.layers[0].weight
    held = trainer.optimizer.state[weight]["exp_avg"]
    answer["splits"] = [torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in (weight, held)]
    trainer.strategy.load_model_state(trainer.model, trainer.strategy.model_state(trainer.model))
    answer["splits after loading"] = torch_xla._XLAC._get_xla_sharding_spec(trainer.model.layers[0].weight)
    answer["mesh"] = None if spmd.get_global_mesh() is None else list(spmd.get_global_mesh().mesh_shape)
    answer["accelerator"] = [str(trainer.accelerator.distributed_type), trainer.accelerator.num_processes]
    poisoned = make_rows(22)
    poisoned[0]["x"].fill_(math.nan)
    answer["is nan logged"] = any(math.isnan(loss) for loss, _ in follow(make(folder, rows=poisoned, **setting)))


# -- the tests -------------------------------------------------------------------------------------------------------


def after(part: str) -> pytest.MarkDecorator:
    """Look at the settings in which a part was run."""
    return pytest.mark.parametrize("found", [name for name in SETTINGS if part in PARTS[name]], indirect=True)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from support.distributed import launch

    name = request.param
    run = launch(
        run_setting,
        tmp_path_factory.mktemp(name),
        num_processes=1,
        kwargs={"name": name},
        # Compiling is most of what the tests cost, and what they look at does not depend on its effort.
        env={
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(NUM_DEVICES[name]),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        },
        timeout_s=280,
    )
    assert run.returncode == 0, run.output
    return {**run.results[0], "setting": name, "num_devices": NUM_DEVICES[name]}


def close_to(values: Any, tolerance: float = 1e-5) -> Any:
    return [pytest.approx(value, abs=tolerance, rel=tolerance) for value in values]


@after("learn")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_equals_that_on_a_cpu(found: dict[str, Any], accumulation: int) -> None:
    assert found["xla name"] == "xla"
    assert len(found[f"xla losses {accumulation}"]) == {1: 12, 3: 4}[accumulation]
    assert found[f"xla losses {accumulation}"] == close_to(found[f"cpu losses {accumulation}"])


@after("learn")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_evaluation_equals_that_on_a_cpu(found: dict[str, Any], accumulation: int) -> None:
    assert found[f"xla evaluations {accumulation}"] == close_to(found[f"cpu evaluations {accumulation}"])


@after("compare")
def test_optimizer_that_was_given_trains_the_placed_model(found: dict[str, Any]) -> None:
    assert found["xla given"] == close_to(found["cpu given"])


@after("resume")
def test_resumed_run_equals_the_undisturbed_one(found: dict[str, Any]) -> None:
    assert found["resumed"] == found["undisturbed"]


@after("resume")
def test_seed_reaches_the_generator_of_the_device(found: dict[str, Any]) -> None:
    assert found["seeded anew"] != found["undisturbed"]


@after("resume")
def test_cpu_resumes_what_xla_saved(found: dict[str, Any]) -> None:
    assert found["cpu goes on"] == 12


@after("tie")
def test_tied_weights_stay_tied(found: dict[str, Any]) -> None:
    assert found["is tied"]
    assert found["is tied on host"]
    assert found["tied losses"][0] == close_to(found["tied losses"][1])


@after("tie")
def test_saved_weights_are_whole(found: dict[str, Any]) -> None:
    assert "model.safetensors" in found["saved"]
    assert found["is loaded"]


@after("switch")
def test_cache_is_off_while_activations_are_recomputed(found: dict[str, Any]) -> None:
    assert found["xla switched"] == close_to(found["cpu switched"])
    assert found["xla cache"] == found["cpu cache"] == [[False] * 4, True]
    assert found["use_cache"] == [[False], False]


@after("switch")
def test_model_recomputes_in_training_only(found: dict[str, Any]) -> None:
    # The cache is off in an evaluation too, where packed documents would otherwise see each other.
    assert found["xla evaluated"] == [False]


@after("switch")
def test_recomputing_no_layers_is_refused(found: dict[str, Any]) -> None:
    hint, named = found["nothing to recompute"]
    assert "Net has no layer of the classes in _no_split_modules. Name the repeated layers" in hint
    assert "Net has no Blok." in named


@after("compile_once")
def test_same_shapes_compile_once(found: dict[str, Any]) -> None:
    assert found["compiled again"] == 0


@after("recompute")
def test_recomputed_layers_draw_the_same_random_numbers(found: dict[str, Any]) -> None:
    # Of the first step: the second recording moves the numbers of the later ones on.
    assert found["recomputed"][0] == close_to([found["kept"][0]])[0]


@after("halve")
def test_bf16_computes_in_half_and_keeps_whole_weights(found: dict[str, Any]) -> None:
    halved, whole = found["halved"]
    assert halved != whole
    assert halved == close_to(whole, tolerance=0.05)
    assert found["stays whole"] == "torch.float32"


@after("halve")
def test_metrics_of_xla_are_printed_when_asked_for(found: dict[str, Any]) -> None:
    assert found["prints metrics"]


@after("shard")
def test_documented_keys_train_on_one_device(found: dict[str, Any]) -> None:
    assert found["sharded losses"][0] == close_to(found["sharded losses"][1])
    assert found["decay"] == [[0.1, 2], [0.0, 4]]
    assert found["trainable"] == sum(parameter.numel() for parameter in Net().parameters())


@after("shard")
def test_gradients_are_not_reduced_again(found: dict[str, Any]) -> None:
    assert found["calls"] == []


@after("look_inside")
def test_parameters_and_optimizer_state_are_split_by_fsdp_only(found: dict[str, Any]) -> None:
    num = found["num_devices"]
    part = f"devices=[{num},1]" if "fsdp" in found["setting"] else ""
    assert all(part in spec for spec in found["splits"])
    assert part in found["splits after loading"]
    if not part:
        assert all("devices" not in spec for spec in found["splits"])


@after("look_inside")
def test_mesh_is_there_for_all_to_use(found: dict[str, Any]) -> None:
    assert found["mesh"] == (None if found["setting"] == "one" else [found["num_devices"]])


@after("look_inside")
def test_accelerator_agrees(found: dict[str, Any]) -> None:
    assert found["accelerator"] == ["DistributedType.XLA", 1]


@after("look_inside")
def test_nan_is_logged(found: dict[str, Any]) -> None:
    assert found["is nan logged"]


@after("refuse")
def test_other_number_of_devices_is_refused(found: dict[str, Any]) -> None:
    assert "XLA sees 2 devices" in found["refusal"]
