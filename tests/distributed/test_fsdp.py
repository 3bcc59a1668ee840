"""FSDP on real processes: equal to one process, evaluation in step, any number goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import split_models
from support.split_models import best_comes_back, check_evaluated, close, evaluate, told
from support.tiny import make_arguments, make_rows
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from hftrain import Trainer, TrainerCallback, set_seed
from hftrain.strategies.fsdp.strategy import FSDPStrategy

pytestmark = pytest.mark.distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x)).tanh()


class Deep(nn.Module):
    """Repeated layers, a weight that two layers share, a frozen one, and a buffer."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(8, 8)
        self.last.weight = self.blocks[0].mix.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x) * self.frozen + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.last(hidden))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def make_trainer(folder: str, *, is_meta: bool = False, **options: Any) -> Trainer:
    rank = int(os.environ.get("RANK", "0"))
    set_seed(7 + rank)  # only rank 0's weights may count
    with torch.device("meta" if is_meta and rank else "cpu"):
        model = Deep()
    return split_models.make_trainer(folder, model, **{"rows": 24, **options})


def train(folder: str, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


CLIPPED = {"max_grad_norm": 0.5, "eval_strategy": "epoch", "weight_decay": 0.1}
# 28 rows are 7 micro-steps of 4: with accumulation 3 the last step of an epoch is a short one.
ROWS = 28
CHOICES: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "offload": {"strategy": "fsdp_offload"},
    "full_shard": {"fsdp": "full_shard"},
    "full_shard auto_wrap": {"fsdp": "full_shard auto_wrap"},
    "shard_grad_op": {"fsdp": "shard_grad_op auto_wrap"},
    "no_shard": {"fsdp": "no_shard"},
    "hybrid_shard": {"fsdp": "hybrid_shard"},
    "offload auto_wrap": {"fsdp": "full_shard offload auto_wrap"},
    "by size": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 60, "forward_prefetch": True}},
    "weights on rank 0 alone": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"cpu_ram_efficient_loading": True},
        "is_meta": True,
    },
    "older wrapper's keys": {
        "fsdp": "hybrid_shard_zero2 auto_wrap",
        "fsdp_config": {"backward_prefetch": "backward_post", "limit_all_gathers": False, "version": 1},
    },
    "recomputing": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": "Block"},
    },
}


PAIRS = [(choice, accumulation) for choice in CHOICES for accumulation in (1, 3)]
# Without accumulation a choice by name alone always runs, the others where there is time.
LONG = [pair for pair in PAIRS if pair[1] == 1 and "strategy" not in CHOICES[pair[0]]]
SHORT = [pair for pair in PAIRS if pair not in LONG]


def train_pairs(folder: str, pairs: list[tuple[str, int]]) -> dict[str, Any]:
    return {
        f"{name} {accumulation}": train(
            f"{folder}/{name}", rows=ROWS, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
            **CLIPPED, **CHOICES[name],
        )
        for name, accumulation in pairs
    }  # fmt: skip


def each_choice(folder: str) -> dict[str, Any]:
    answers = train_pairs(folder, SHORT)
    ragged = {"rows": 25, "per_device_train_batch_size": 2, **CLIPPED}
    for strategy in ("ddp", "fsdp"):
        answers[f"ragged {strategy}"] = train(f"{folder}/ragged", strategy=strategy, **ragged)
    for precision in ("bf16", "fp16"):
        answers[precision] = train(f"{folder}/{precision}", strategy="fsdp", precision=precision, **ragged)
    return answers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from support.distributed import launch

    folder = tmp_path_factory.mktemp("fsdp")
    ended = launch(everything, folder, kwargs={"folder": str(folder)}, timeout_s=500, forks=True)
    assert ended.returncode == 0, ended.output
    return ended.results


def everything(folder: str) -> dict[str, Any]:
    return {
        "choices": each_choice(folder),
        "evaluated": evaluate(Deep, folder, strategy="fsdp", max_steps=1),
        "saved": save(f"{folder}/saved"),
        "bytes": {strategy: count_bytes(folder, strategy=strategy) for strategy in ("ddp", "fsdp")},
        "best": keep_best(folder),
        "ended": end_whole(folder),
        "mixed": mix_dtypes(folder),
        "fairscale": follow_fairscale(folder),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder, options = str(tmp_path_factory.mktemp("alone")), {"per_device_train_batch_size": 4, **CLIPPED}
    return {each: train(folder, rows=ROWS, gradient_accumulation_steps=each, **options) for each in (1, 3)}


def check_pair(first: dict[str, Any], second: dict[str, Any], expected: dict[str, Any]) -> None:
    assert first["history"] == second["history"]
    assert second["weights"] == {}
    assert max(entry.get("grad_norm", 0) for entry in expected["history"]) > 0.5, "else clipping would not be seen"
    close(first, expected)


@pytest.mark.parametrize(("choice", "accumulation"), SHORT)
def test_two_processes_train_like_one(
    two: list[Any], alone: dict[int, dict[str, Any]], choice: str, accumulation: int
) -> None:
    first, second = (answer["choices"][f"{choice} {accumulation}"] for answer in two)
    check_pair(first, second, alone[accumulation])


@pytest.mark.slow
def test_two_processes_train_like_one_with_the_other_choices(
    run_distributed: Any, tmp_path: Path, alone: dict[int, dict[str, Any]]
) -> None:
    first, second = run_distributed(train_pairs, folder=str(tmp_path), pairs=LONG, timeout_s=500)
    for choice, accumulation in LONG:
        pair = f"{choice} {accumulation}"
        check_pair(first[pair], second[pair], alone[accumulation])


def test_ragged_end_trains_as_with_ddp_and_half_precision_alike_on_all_ranks(two: list[Any]) -> None:
    first, second = (answer["choices"] for answer in two)
    close(first["ragged fsdp"], first["ragged ddp"])
    for precision in ("bf16", "fp16"):
        assert first[precision]["history"] == second[precision]["history"]
        losses = [
            [entry["loss"] for entry in run["history"] if "loss" in entry]
            for run in (first[precision], first["ragged ddp"])
        ]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return evaluate(Deep, str(tmp_path_factory.mktemp("alone")), strategy=None, max_steps=1)


@pytest.mark.parametrize("index", range(2))
def test_evaluation_on_1_to_17_samples_equals_that_of_one_process(
    two: list[Any], evaluated_alone: list[Any], index: int
) -> None:
    check_evaluated(two[index]["evaluated"], evaluated_alone)


# -- checkpoints -------------------------------------------------------------------------------------------------------

SAVING: dict[str, Any] = {
    "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100, "logging_steps": 2, "rows": ROWS,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
FORMS = {"sharded": {}, "full": {"state_dict_type": "full_state_dict"}}


def save(folder: str) -> dict[str, Any]:
    """Train without a break; and stop in the middle of a logging window, save in each form, and go on."""
    options = {**SAVING, "per_device_train_batch_size": 2, "fsdp": "full_shard auto_wrap"}
    answers = {"whole": train(f"{folder}/whole", **options)}
    for form, config in FORMS.items():
        parts, other = f"{folder}/{form}", FORMS["full" if form == "sharded" else "sharded"]
        train(parts, stop=3, fsdp_config=config, **options)
        answers[f"files {form}"] = sorted(os.listdir(f"{parts}/checkpoint-3"))
        # Written in the other form from here on: whichever is found is read.
        answers[form] = train(parts, resume=True, fsdp_config=other, **options)
    answers["folder"] = folder
    return answers


@pytest.mark.parametrize("form", FORMS)
def test_resumed_run_equals_the_undisturbed_one(two: list[Any], form: str) -> None:
    first = two[0]["saved"]
    close(first[form], first["whole"], rel=1e-6)


def test_checkpoints_are_sharded_unless_asked_for_whole(two: list[Any]) -> None:
    sharded, full = (two[0]["saved"][f"files {form}"] for form in FORMS)
    shards = [f"{kind}_shard-{rank:05d}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in range(2)]
    assert set(shards) <= set(sharded)
    assert "model.safetensors" not in sharded
    assert "model.safetensors" in full
    assert not set(shards) & set(full)


@pytest.mark.parametrize("strategy", ["fsdp", "single"])
@pytest.mark.parametrize("form", FORMS)
def test_one_process_goes_on_where_two_stopped(
    two: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, strategy: str
) -> None:
    saved = two[0]["saved"]
    shutil.copytree(Path(saved["folder"]) / form / "checkpoint-3", tmp_path / "checkpoint-3")
    trainer = make_trainer(str(tmp_path), per_device_train_batch_size=4, strategy=strategy, **SAVING)
    try:
        trainer.train(resume_from_checkpoint=True)
        close(told(trainer), saved["whole"])
        assert "was saved by 2 processes and resumes on 1" in caplog.text
    finally:
        trainer.strategy.close()


def keep_best(folder: str) -> bool:
    """Load the best model at the end, and compare it with the checkpoint it came from."""
    trainer = make_trainer(
        f"{folder}/best", per_device_train_batch_size=2, strategy="fsdp", eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True, learning_rate=0.5, max_steps=8,
    )  # fmt: skip
    return best_comes_back(trainer)


def test_best_model_comes_back_at_the_end(two: list[Any]) -> None:
    assert [answer["best"] for answer in two] == [True] * 2


def end_whole(folder: str) -> list[Any]:
    """Do as the documented final save does, and save once more without it."""
    folder = f"{folder}/ended"
    trainer = make_trainer(folder, per_device_train_batch_size=2, strategy="fsdp", max_steps=2, stop=1)
    trainer.train()
    if hasattr(Trainer, "accelerator"):
        plugin = trainer.accelerator.state.fsdp_plugin
    else:
        plugin = trainer.strategy.accelerator_options()["fsdp_plugin"]
    answers: list[Any] = [trainer.is_fsdp_enabled, plugin.state_dict_type.name]
    trainer.save_model(f"{folder}/before")
    plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(f"{folder}/after")
    trainer.train()
    files = [sorted(os.listdir(f"{folder}/{name}")) for name in ("before", "after", "checkpoint-1")]
    return [*answers, *("model.safetensors" in names for names in files)]


def test_model_saved_by_name_is_whole_and_checkpoints_follow_the_plugin(two: list[Any]) -> None:
    assert [answer["ended"] for answer in two] == [[True, "SHARDED_STATE_DICT", True, True, True]] * 2


# -- what it is for ----------------------------------------------------------------------------------------------------


class CountBytes(TrainerCallback):
    """Count what one process holds when gradients are there."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
        held += [value for entry in optimizer.state.values() for value in entry.values()]
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in held]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in local)


class Wide(nn.Module):
    """A model large enough for its biases not to count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 65), nn.Linear(65, 64), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.layers(x)
        return nn.functional.cross_entropy(logits, labels), logits


def count_bytes(folder: str, *, strategy: str) -> list[int]:
    """Return the bytes that one process holds, and the parameters that it says are trained."""
    counter = CountBytes()
    arguments = make_arguments(Path(folder), max_steps=2, fsdp_config={"min_num_params": 1000})
    trainer = Trainer(Wide(), arguments, train_dataset=make_rows(24), callbacks=[counter], strategy=strategy)
    trainer.train()
    return [counter.num_bytes, trainer.get_num_trainable_parameters()]


def test_process_holds_about_half_of_what_it_holds_with_ddp(two: list[Any]) -> None:
    for answer in two:
        assert 0 < answer["bytes"]["fsdp"][0] <= 0.55 * answer["bytes"]["ddp"][0]
        assert answer["bytes"]["fsdp"][1] == answer["bytes"]["ddp"][1]


def mix_dtypes(folder: str) -> list[float]:
    class Mixed(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4).requires_grad_(False).to(torch.bfloat16)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            return super().forward(self.body(x.to(torch.bfloat16)).float(), labels)

    set_seed(0)
    trainer = Trainer(
        Mixed(), make_arguments(Path(folder), max_steps=3, max_grad_norm=0.1), train_dataset=make_rows(24),
        strategy="fsdp",
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_frozen_half_precision_parts_train_beside_float32_ones(two: list[Any]) -> None:
    assert two[0]["mixed"] == two[1]["mixed"]
    assert len(two[0]["mixed"]) == 3


# FairScale's words: the sharding, and whether a layer is split on its own, split again after forward, and offloaded.
# The outermost module is gathered until backward, whatever the sharding.
FAIRSCALE = {
    "simple": ["shard_grad_op", False, False, False],
    "zero_dp_2 auto_wrap": ["shard_grad_op", True, False, False],
    "zero_dp_3 auto_wrap": ["full_shard", True, True, False],
    "zero_dp_3 cpu_offload": ["full_shard", False, False, True],
    "zero_dp_2 offload auto_wrap": ["shard_grad_op", True, False, True],
}


class Looking(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **kwargs)
        layer: Any = self.model.blocks[1]  # type: ignore[union-attr, index]
        unit = layer if isinstance(layer, FSDPModule) else self.model
        policy = unit._get_fsdp_state()._fsdp_param_group.offload_policy  # type: ignore[union-attr, operator]
        self.seen = [unit is layer, isinstance(layer.mix.weight, DTensor), isinstance(policy, CPUOffloadPolicy)]
        return found


def follow_fairscale(folder: str) -> dict[str, list[Any]]:
    answers = {}
    for words in FAIRSCALE:
        trainer = Looking(
            Deep(), make_arguments(Path(folder), max_steps=1, sharded_ddp=words), train_dataset=make_rows(8)
        )
        trainer.train()
        answers[words] = [trainer.strategy.sharding, *trainer.seen]  # type: ignore[attr-defined]
    return answers


@pytest.mark.parametrize("words", FAIRSCALE)
def test_fairscales_words_split_as_fsdps_do(two: list[Any], words: str) -> None:
    assert [answer["fairscale"][words] for answer in two] == [FAIRSCALE[words]] * 2


def hybrid(folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {"rows": 32, "per_device_train_batch_size": 1, **CLIPPED, **SAVED_SOON}
    answers = {}
    for sharding in ("hybrid_shard", "hybrid_shard_zero2"):
        strategy = FSDPStrategy(use_cpu=True, sharding=sharding, shard_size=2)
        answers[sharding] = train(f"{folder}/{sharding}", strategy=strategy, **options)
    # Without a word about it, the processes of a machine share a copy.
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    answers["by machine"] = train(f"{folder}/machine", fsdp="hybrid_shard auto_wrap", **options)
    train(f"{folder}/parts", fsdp="hybrid_shard auto_wrap", stop=5, **options)
    answers["files"] = sorted(os.listdir(f"{folder}/parts/checkpoint-5"))
    answers["resumed"] = train(f"{folder}/parts", resume=True, fsdp="hybrid_shard auto_wrap", **options)
    return answers


SAVED_SOON: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100, "num_train_epochs": 1}


def test_copies_of_a_hybrid_sharding_stay_in_step(tmp_path: Path, run_distributed: Any) -> None:
    four = run_distributed(hybrid, num_processes=4, folder=str(tmp_path))
    alone = train(str(tmp_path / "alone"), rows=32, per_device_train_batch_size=4, **CLIPPED, **SAVED_SOON)
    for name in ("hybrid_shard", "hybrid_shard_zero2", "by machine"):
        close(four[0][name], alone)
        assert all(answer[name]["history"] == four[0][name]["history"] for answer in four)
    close(four[0]["resumed"], four[0]["by machine"], rel=1e-6)
    # One of the copies is written.
    assert [name for name in four[0]["files"] if name.startswith("model_shard")] == [
        f"model_shard-{rank:05d}-of-00004.safetensors" for rank in range(2)
    ]
