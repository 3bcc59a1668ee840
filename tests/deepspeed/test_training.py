"""DeepSpeed on two real processes: equal to one process, evaluation in step, checkpoints that go on."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import split_models
from support.resuming import StopAt
from support.split_models import best_comes_back, check_evaluated, evaluate, told
from support.tiny import make_arguments, make_rows
from torch import nn
from torch.utils.data import default_collate

from hftrain import Trainer, TrainerCallback, set_seed
from hftrain.checkpoint.weights import read_weights
from hftrain.core.errors import HFTrainError
from hftrain.storage.shards import load_shards
from hftrain.storage.tensors import load_containers

pytestmark = pytest.mark.deepspeed


class Deep(nn.Module):
    """A weight that two layers share, a frozen one, a part without dimensions, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.register_buffer("shift", torch.full((8,), 0.1))
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.middle.weight
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x) * self.frozen
        hidden = hidden + self.shift.to(hidden)  # DeepSpeed leaves buffers in float32
        logits = self.head(self.norm(self.last(self.middle(hidden).tanh())))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits.float(), labels), logits)


def make_trainer(folder: str, *, has_init: bool = False, **options: Any) -> Trainer:
    set_seed(7 + int(os.environ.get("RANK", "0")))  # only rank 0's weights may count
    model, init = (None, Deep) if has_init else (Deep(), None)
    options = {"rows": 28, "optim": "adamw_torch", **options}
    return split_models.make_trainer(folder, model, model_init=init, **options)


def train(folder: str, *, resume: bool = False, **options: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return told(trainer)


# Stage 0 in float32 clips without telling the norm.
close = partial(split_models.close, has_norm=False)
ZERO_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}  # fmt: skip
# As a shared config writes it: everything that the arguments say is "auto".
SHARED = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
CHOICES: dict[str, dict[str, Any]] = {
    "stage 0": {"deepspeed": {"zero_optimization": {"stage": 0}}},
    "stage 1": {"strategy": "deepspeed_stage_1"},
    "stage 2": {"strategy": "deepspeed_stage_2"},
    "stage 2 offload": {"strategy": "deepspeed_stage_2_offload"},
    "stage 3": {"strategy": "deepspeed_stage_3"},
    "stage 3 offload": {"strategy": "deepspeed_stage_3_offload"},
    "config's optimizer": {"deepspeed": {**SHARED, "zero_optimization": {"stage": 2}, "optimizer": ADAMW}},
    "config's optimizer 3": {"deepspeed": {**SHARED, "zero_optimization": ZERO_3, "optimizer": ADAMW}},
}
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5, "eval_strategy": "epoch"}


def each_choice(folder: str) -> dict[str, Any]:
    answers = {
        # 28 rows are 7 micro-steps of 4: with accumulation 3 the last step of an epoch is a short one.
        f"{name} {accumulation}": train(
            f"{folder}/{name}", per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
            **CLIPPED, **copy.deepcopy(choice),
        )
        for name, choice in CHOICES.items()
        for accumulation in (1, 3)
    }  # fmt: skip
    ragged = {"rows": 25, "per_device_train_batch_size": 2, **CLIPPED}
    for strategy in ("ddp", "deepspeed_stage_2", "deepspeed_stage_3"):
        answers[f"ragged {strategy}"] = train(f"{folder}/ragged", strategy=strategy, **ragged)
    for stage in (0, 2, 3):
        config = {**SHARED, "zero_optimization": {**ZERO_3, "stage": stage}}
        answers[f"bf16 {stage}"] = train(f"{folder}/bf16", deepspeed=config, precision="bf16", **ragged)
    return answers


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from support.distributed import launch

    folder = tmp_path_factory.mktemp("deepspeed")
    ended = launch(everything, folder, kwargs={"folder": str(folder)}, timeout_s=280)
    assert ended.returncode == 0, ended.output[-20_000:]
    return ended.results


def everything(folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    return {
        "choices": each_choice(folder),
        "evaluated": {name: evaluate(Deep, folder, strategy=name, **EVALUATING) for name in EVALUATED},
        "saved": save(folder),
        "refused": refuse_other_states(folder),
        "best": keep_best(folder),
        "built": build_split(folder),
        "inferred": infer(folder),
        "again": train_again(folder),
        "listened": listen(folder),
        "facts": tell_facts(folder),
    }


@pytest.fixture(scope="module", params=[1, 3])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": request.param}
    return request.param, train(str(tmp_path_factory.mktemp("alone")), **options, **CLIPPED)


@pytest.mark.parametrize("choice", CHOICES)
def test_two_processes_train_like_one(two: list[Any], alone: tuple[int, dict[str, Any]], choice: str) -> None:
    accumulation, expected = alone
    first, second = (answer["choices"][f"{choice} {accumulation}"] for answer in two)
    assert first["history"] == second["history"]
    assert max(entry.get("grad_norm", 0) for entry in expected["history"]) > 0.5, "else clipping would not be seen"
    close(first, expected)


def test_ragged_end_trains_as_with_ddp_and_bf16_nearly_so(two: list[Any]) -> None:
    first, second = (answer["choices"] for answer in two)
    for strategy in ("deepspeed_stage_2", "deepspeed_stage_3"):
        close(first[f"ragged {strategy}"], first["ragged ddp"])
    for stage in (0, 2, 3):
        half = first[f"bf16 {stage}"]
        assert half["history"] == second[f"bf16 {stage}"]["history"]
        losses = [[entry["loss"] for entry in run["history"] if "loss" in entry] for run in (half, first["ragged ddp"])]
        assert losses[0] == pytest.approx(losses[1], rel=0.1)
        assert losses[0] != losses[1]


# -- evaluation --------------------------------------------------------------------------------------------------------

EVALUATED = ("deepspeed_stage_2", "deepspeed_stage_3")
EVALUATING: dict[str, Any] = {"max_steps": 2, "optim": "adamw_torch"}


@pytest.fixture(scope="module")
def evaluated_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return evaluate(Deep, str(tmp_path_factory.mktemp("alone")), strategy=None, **EVALUATING)


@pytest.mark.parametrize("strategy", EVALUATED)
def test_evaluation_on_1_to_17_samples_equals_that_of_one_process(
    two: list[Any], evaluated_alone: list[Any], strategy: str
) -> None:
    for answer in two:
        check_evaluated(answer["evaluated"][strategy], evaluated_alone)


# -- checkpoints -------------------------------------------------------------------------------------------------------

SAVING: dict[str, Any] = {
    "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 100, "logging_steps": 2,
    "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "warmup_steps": 2,
}  # fmt: skip
SAVED: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2 offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 3 gathered": {"zero_optimization": ZERO_3},
    "stage 0 bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "stage 2 bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "stage 3 bf16": {"zero_optimization": ZERO_3, "bf16": {"enabled": True}},
    "config's own": {"zero_optimization": {"stage": 2}, "optimizer": ADAMW, "scheduler": WARMUP},
    # None of those that DeepSpeed has tested.
    "config's torch": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
    },
}


def save(folder: str) -> dict[str, Any]:
    """Train without a break; and stop in the middle of a logging window, save, and go on."""
    answers: dict[str, Any] = {"folder": folder}
    for name, config in SAVED.items():
        options = {**SAVING, "deepspeed": config, "precision": "bf16" if "bf16" in config else None}
        answers[name] = {"whole": train(f"{folder}/{name}/whole", **options)}
        train(f"{folder}/{name}/parts", stop=3, **options)
        answers[name]["files"] = sorted(os.listdir(f"{folder}/{name}/parts/checkpoint-3"))
        answers[name]["resumed"] = train(f"{folder}/{name}/parts", resume=True, **options)
    return answers


@pytest.mark.parametrize("name", SAVED)
def test_resumed_run_equals_the_undisturbed_one(two: list[Any], name: str) -> None:
    for answer in two:
        saved = answer["saved"][name]
        assert len(saved["whole"]["history"]) > 2
        close(saved["resumed"], saved["whole"], rel=1e-6)


@pytest.mark.parametrize("name", SAVED)
def test_checkpoint_holds_plain_tensors_and_each_process_its_part_once(two: list[Any], name: str) -> None:
    files = set(two[0]["saved"][name]["files"])
    folder = Path(two[0]["saved"]["folder"]) / name / "parts" / "checkpoint-3"
    shards = {f"optimizer_shard-{rank:05d}-of-00002.safetensors" for rank in range(2)}
    assert {"optimizer.pt", "scheduler.pt", "manifest.json"} <= files
    assert shards <= files if not name.startswith("stage 0") else not shards & files
    assert load_containers(folder / "optimizer.pt")["param_groups"]
    is_split = name == "stage 3"
    assert ("model.safetensors" in files) is not is_split
    assert ("model_shard-00001-of-00002.safetensors" in files) is is_split
    assert read_weights(folder)["first.weight"].dtype == (torch.bfloat16 if "bf16" in name else torch.float32)
    if is_split:
        assert load_shards(folder, stem="model_shard")["first.weight"].shape == (8, 4)
    # None of DeepSpeed's own pickles, which would hold all of it a second time.
    assert not [file for file in files if file.startswith(("global_step", "zero", "latest", "bf16", "mp_rank"))]


def test_schedule_of_the_config_rises_and_falls(two: list[Any]) -> None:
    rates = [entry["learning_rate"] for entry in two[0]["saved"]["config's own"]["whole"]["history"]]
    assert max(rates) == pytest.approx(1e-2, rel=0.2)
    assert rates[-1] < max(rates)


def refuse_other_states(folder: str) -> list[str]:
    """Resume with another stage or precision than was saved, and without DeepSpeed."""
    answers = []
    half = {"deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "precision": "bf16"}
    for source, options in (
        ("stage 0 bf16", half),
        ("stage 0", half),
        ("stage 1", {"deepspeed": {"zero_optimization": {"stage": 3}}}),
        ("stage 3", {"deepspeed": {"zero_optimization": {"stage": 0}}}),
        ("stage 1", {"strategy": "ddp"}),
    ):
        try:
            train(f"{folder}/{source}/parts", resume=True, **SAVING, **copy.deepcopy(options))
        except HFTrainError as error:
            answers.append(str(error))
    return answers


def test_state_of_another_stage_or_precision_is_refused(two: list[Any]) -> None:
    for answer in two:
        assert len(answer["refused"]) == 5
        assert "saved with ZeRO stage 0, and ZeRO stage 1 or 2 uses another layout" in answer["refused"][0]
        assert "precision" in answer["refused"][1]
        # Of equal size by chance, the parts of one would otherwise be taken for the other's.
        assert "saved with ZeRO stage 1 or 2, and ZeRO stage 3 uses" in answer["refused"][2]
        assert "saved with ZeRO stage 3, and ZeRO stage 0 uses" in answer["refused"][3]
        assert "the run does not use DeepSpeed" in answer["refused"][4]


def keep_best(folder: str) -> dict[str, bool]:
    """Load the best model at the end, and compare it with the checkpoint it came from."""
    answers = {}
    for name in ("deepspeed_stage_2", "deepspeed_stage_3"):
        trainer = make_trainer(
            f"{folder}/best {name}", per_device_train_batch_size=2, strategy=name, eval_strategy="steps", eval_steps=2,
            save_strategy="steps", save_steps=2, load_best_model_at_end=True, greater_is_better=True, max_steps=8,
        )  # fmt: skip
        answers[name] = best_comes_back(trainer)
    return answers


def test_best_model_comes_back_at_the_end(two: list[Any]) -> None:
    assert [set(answer["best"].values()) for answer in two] == [{True}, {True}]


# -- stage 3 ----------------------------------------------------------------------------------------------------------


class Spy(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.sizes = [parameter.numel() for parameter in kwargs["model"].parameters()]


def build_split(folder: str) -> dict[str, Any]:
    """Build the model inside train(): each layer is split at once."""
    answers: dict[str, Any] = {}
    for name in ("deepspeed_stage_2", "deepspeed_stage_3"):
        made: list[bool] = []

        class Watched(Deep):
            def __init__(self, made: list[bool] = made) -> None:
                super().__init__()
                made.append(hasattr(self.first.weight, "ds_id"))

        spy = Spy()
        options = {**SAVING, "per_device_train_batch_size": 2}
        trainer = Trainer(
            model_init=Watched, args=make_arguments(Path(f"{folder}/built {name}"), optim="adamw_torch", **options),
            train_dataset=make_rows(28), callbacks=[spy, StopAt(3)], strategy=name,
        )  # fmt: skip
        trainer.train()
        trainer.pop_callback(StopAt)
        trainer.train(resume_from_checkpoint=True)
        answers[name] = {**told(trainer), "made": made, "sizes": spy.sizes}
    return answers


def test_model_init_is_split_while_it_is_built_with_stage_3(two: list[Any]) -> None:
    built = two[0]["built"]
    # Once by the constructor, before there are processes, then by each train().
    assert built["deepspeed_stage_2"]["made"] == [False, False, False]
    assert built["deepspeed_stage_3"]["made"] == [False, True, True]
    assert max(built["deepspeed_stage_3"]["sizes"]) == 0
    assert min(built["deepspeed_stage_2"]["sizes"]) > 0
    close(built["deepspeed_stage_3"], built["deepspeed_stage_2"])


def infer(folder: str) -> dict[str, Any]:
    answers = {}
    for name in ("ddp", "deepspeed_stage_2", "deepspeed_stage_3"):
        for precision in ("fp32", "bf16"):
            trainer = make_trainer(
                f"{folder}/inferred", strategy=name, precision=precision, per_device_train_batch_size=2, max_steps=2
            )
            # Every process its own weights as yet; rank 0's count with stage 3.
            first = {"eval_loss": trainer.evaluate()["eval_loss"]} if name != "ddp" else {}
            is_split = [hasattr(parameter, "ds_id") for parameter in trainer.model.parameters()]
            trainer.train()
            answers[f"{name} {precision}"] = {**told(trainer), **first, "is_split": any(is_split)}
    return answers


def test_evaluation_without_training_splits_the_model_with_stage_3_alone(two: list[Any]) -> None:
    first = two[0]["inferred"]
    assert first["deepspeed_stage_3 fp32"]["is_split"]
    assert not first["deepspeed_stage_2 fp32"]["is_split"]
    for precision in ("fp32", "bf16"):
        losses = [answer["inferred"][f"deepspeed_stage_3 {precision}"]["eval_loss"] for answer in two]
        assert losses[0] == losses[1]
    for name in ("deepspeed_stage_2", "deepspeed_stage_3"):
        close(first[f"{name} fp32"], first["ddp fp32"])


def train_again(folder: str) -> dict[str, Any]:
    """Train twice with one Trainer: the second time with a new engine, from where the weights are."""
    answers = {}
    for name in ("ddp", "deepspeed_stage_1", "deepspeed_stage_3"):
        trainer = make_trainer(f"{folder}/again", strategy=name, per_device_train_batch_size=2, max_steps=3)
        trainer.train()
        if name == "ddp":
            trainer.optimizer = trainer.lr_scheduler = None
        trainer.args.learning_rate = 2e-2
        trainer.train()
        is_plain = trainer.task.model is trainer.model and type(trainer.model) is Deep
        answers[name] = {**told(trainer), "is_plain": is_plain, "eval_loss": trainer.evaluate()["eval_loss"]}
    return answers


def test_training_twice_goes_on_from_the_weights_and_leaves_the_plain_model(two: list[Any]) -> None:
    again = two[0]["again"]
    for name in ("deepspeed_stage_1", "deepspeed_stage_3"):
        close(again[name], again["ddp"])
        assert again[name]["is_plain"]
        assert again[name]["eval_loss"] == pytest.approx(again["ddp"]["eval_loss"], rel=1e-4)


# -- what the model gets ----------------------------------------------------------------------------------------------


class Listener(nn.Module):
    """Note the dtypes of what arrives, floats and integers, nested and not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 3)
        self.heard: list[list[str]] = []

    def forward(self, audio: Any, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = (audio["wave"], audio["parts"][0], audio["mask"], ids, labels)
        self.heard.append([str(tensor.dtype).removeprefix("torch.") for tensor in tensors])
        logits = self.head(self.embed(ids) + audio["wave"] + audio["parts"][0])
        return nn.functional.cross_entropy(logits.float(), labels), logits


def listen(folder: str) -> dict[str, Any]:
    """Train, evaluate and predict on audio next to words, in each precision."""
    rows = [
        {
            "audio": {"wave": torch.ones(4), "parts": [torch.ones(4)], "mask": torch.tensor(True)},
            "ids": torch.tensor(number % 5),
            "labels": torch.tensor(number % 3),
        }
        for number in range(8)
    ]
    answers = {}
    for precision in ("fp32", "bf16"):
        for stage in (2, 3):
            model = Listener()
            trainer = Trainer(
                model, make_arguments(Path(f"{folder}/listen"), optim="adamw_torch", max_steps=2), train_dataset=rows,
                data_collator=default_collate, strategy=f"deepspeed_stage_{stage}", precision=precision,
            )  # fmt: skip
            heard = []
            for act, *given in ((trainer.train,), (trainer.evaluate, rows), (trainer.predict, rows)):
                model.heard.clear()
                act(*given)
                heard.append(sorted(set(map(tuple, model.heard))))
            answers[f"{precision} {stage}"] = heard
    return answers


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_float_inputs_come_in_the_engines_dtype_and_integers_as_they_are(
    two: list[Any], precision: str, dtype: str, stage: int
) -> None:
    for answer in two:
        heard = answer["listened"][f"{precision} {stage}"]
        assert heard == [[[dtype, dtype, "bool", "int64", "int64"]]] * 3


# -- around it ---------------------------------------------------------------------------------------------------------


def tell_facts(folder: str) -> dict[str, Any]:
    import deepspeed

    trainer = make_trainer(
        f"{folder}/facts", strategy="deepspeed_stage_3", per_device_train_batch_size=2, max_steps=1, bf16=True
    )
    trainer.train()
    engine: Any = trainer.model_wrapped
    batch = trainer.strategy.to_device({"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.long)})
    plugin = trainer.strategy.accelerator_options()["deepspeed_plugin"]
    trainer.save_model(f"{folder}/facts/final")
    return {
        "engine": isinstance(engine, deepspeed.DeepSpeedEngine),
        "flags": [trainer.is_deepspeed_enabled, trainer.place_model_on_device],
        "dtypes": [str(tensor.dtype) for tensor in batch.values()],
        "batch": [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()],
        "clipping": engine.gradient_clipping(),
        "plugin": [type(plugin).__name__, plugin.zero_stage],
        "final": sorted(os.listdir(f"{folder}/facts/final")),
        "weights": str(read_weights(Path(f"{folder}/facts/final"))["first.weight"].dtype) if engine.global_rank == 0
        else "torch.bfloat16",
    }  # fmt: skip


def test_engine_is_told_what_the_arguments_say(two: list[Any]) -> None:
    for answer in two:
        facts = answer["facts"]
        assert facts["engine"]
        assert facts["flags"] == [True, False]
        assert facts["dtypes"] == ["torch.bfloat16", "torch.int64"]
        assert facts["batch"] == [4, 2]
        assert facts["clipping"] == 1.0
        assert facts["plugin"] == ["DeepSpeedPlugin", 3]
        assert "model.safetensors" in facts["final"]
        assert facts["weights"] == "torch.bfloat16"
