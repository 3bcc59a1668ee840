"""DataParallel without GPUs: torch's threads and copies are stood in for; sharing out and joining are the real ones."""

from __future__ import annotations

import sys
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer
from torch import nn
from torch.nn.parallel import DataParallel

from hftrain import ConfigError, StrategyError, Trainer, TrainingArguments, set_seed
from hftrain.strategies import data_parallel, single
from hftrain.strategies.data_parallel import DataParallelStrategy, Replicas, join

pytestmark = pytest.mark.filterwarnings("ignore:One process trains on 2 GPUs")

CPU = torch.device("cpu")
# The package has a function of the same name.
TORCHS = sys.modules[DataParallel.__module__]
Pair = namedtuple("Pair", ["loss", "logits"])


class StandIn(Replicas):
    """The same on the CPU: the copies are the module itself, called one after the other."""

    def __init__(self, module: nn.Module, device_ids: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.dim = module, list(device_ids), 0
        self.output_device, self.src_device_obj = 0, CPU

    def device_of(self, index: int) -> torch.device:
        return CPU

    def replicate(self, module: Any, device_ids: Any) -> list[Any]:
        return [module] * len(device_ids)


def chunks(inputs: Any, kwargs: dict[str, Any], device_ids: Any, dim: int = 0) -> Any:
    """Share out as torch does: as many pieces as there are rows for."""
    parts = {name: value.chunk(len(device_ids)) for name, value in kwargs.items()}
    num = len(next(iter(parts.values())))
    return ((),) * num, tuple({name: part[index] for name, part in parts.items()} for index in range(num))


def in_turn(copies: Any, inputs: Any, kwargs: Any, _: Any) -> list[Any]:
    """Call the copies one after the other."""
    return [copy(*given, **named) for copy, given, named in zip(copies, inputs, kwargs, strict=True)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that it sees two GPUs, and let them be the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(data_parallel, "find_device_type", lambda use_cpu: "cuda")
    monkeypatch.setattr(data_parallel, "Replicas", StandIn)
    monkeypatch.setattr(TORCHS, "scatter_kwargs", chunks)
    monkeypatch.setattr(TORCHS, "parallel_apply", in_turn)


class OnCPU(DataParallelStrategy):
    """The strategy, on a device that is here."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.planned_device = CPU

    @classmethod
    def refuses(cls, policy: Any, device_type: str) -> str | None:
        return None


class Counting(nn.Module):
    """A loss that divides by the items it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: Any, num_items_in_batch: Any = None) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits, labels, reduction=reduction)
        return {"loss": loss / (1 if num_items_in_batch is None else num_items_in_batch), "logits": logits}


def run(folder: Path, strategy: Any, model: Any, **options: Any) -> tuple[list[Any], Any]:
    set_seed(3)
    args = make_arguments(folder, use_cpu=strategy is None, **options)
    trainer = Trainer(model(), args, train_dataset=make_rows(21), eval_dataset=make_rows(7, seed=2), strategy=strategy)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]], trainer


@pytest.mark.parametrize("model", [Net, Counting, Task])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_on_two_devices_equals_one_with_the_same_batches(
    tmp_path: Path, two_gpus: None, monkeypatch: pytest.MonkeyPatch, model: Any, accumulation: int
) -> None:
    strategy = OnCPU()
    found, trainer = run(
        tmp_path / "two",
        strategy,
        model,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
    )
    assert (trainer.args.n_gpu, trainer.args.train_batch_size, trainer.args.eval_batch_size) == (2, 4, 4)
    assert trainer.args.parallel_mode == "not_distributed"
    assert isinstance(trainer.model_wrapped, DataParallel)
    assert list(strategy.model_state(trainer.model_wrapped)) == list(trainer.model.state_dict())
    monkeypatch.undo()
    expected, _ = run(tmp_path / "one", None, model, gradient_accumulation_steps=accumulation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_checkpoint_is_that_of_the_bare_model_and_resumes(tmp_path: Path, two_gpus: None) -> None:
    options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole, _ = run(tmp_path, OnCPU(), Net, **options)
    set_seed(3)
    args = make_arguments(tmp_path, use_cpu=False, **options)
    trainer = Trainer(Net(), args, train_dataset=make_rows(21), strategy=OnCPU())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == whole[:-1]


def test_several_visible_gpus_are_taken_by_one_process(
    tmp_path: Path, two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr("hftrain.trainer.choices.check_legal", lambda *_: None)
    with pytest.warns(UserWarning, match="torchrun --nproc_per_node=2"):
        Trainer(Net(), make_arguments(tmp_path, use_cpu=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = Trainer(Net(), make_arguments(tmp_path, use_cpu=False))
    assert trainer.strategy.name == "data_parallel"
    assert (trainer.args.n_gpu, trainer.strategy.planned_device) == (2, torch.device("cuda", 0))
    # A model that is spread over the devices already is on one, as far as batches go.
    spread = Net()
    spread.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    monkeypatch.setattr(single, "find_device_type", lambda use_cpu=False: "cpu")
    trainer = Trainer(spread, make_arguments(tmp_path, use_cpu=False))
    assert (trainer.strategy.name, trainer.args.n_gpu, trainer.args.train_batch_size) == ("single", 1, 4)
    # One that only its maker knows is refused when it trains.
    trainer = make_trainer(tmp_path, model_init=lambda: spread, use_cpu=False)
    with pytest.raises(ConfigError, match="Its layers are on several devices already"):
        trainer.train()


@pytest.mark.parametrize(
    ("flag", "options", "reason"),
    [
        ("is_quantized", {}, "weights are quantized"),
        ("", {"torch_compile": True}, "torch_compile compiles for one"),
        ("", {"debug": "underflow_overflow"}, "new copies of them"),
        (
            "",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"layer_classes": ["Linear"]}},
            "layers of the first GPU",
        ),
    ],
)
def test_models_that_cannot_be_copied_are_refused(
    tmp_path: Path, two_gpus: None, flag: str, options: dict[str, Any], reason: str
) -> None:
    model = Net()
    if flag:
        setattr(model, flag, True)
    trainer = make_trainer(tmp_path, model, strategy=OnCPU(), use_cpu=False, **options)
    with pytest.raises(ConfigError, match=reason):
        trainer.train()


def test_devices_that_are_not_here_and_launched_processes_are_refused(
    monkeypatch: pytest.MonkeyPatch, two_gpus: None
) -> None:
    with pytest.raises(ConfigError, match="torch sees 2 of them"):
        DataParallelStrategy(device_ids=[0, 2])
    assert DataParallelStrategy(device_ids=[1, 0]).planned_device == torch.device("cuda", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="started several processes"):
        DataParallelStrategy()


def test_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch sees 0 of them"):
        DataParallelStrategy(use_cpu=True)
    assert "CUDA" in str(DataParallelStrategy.refuses(None, "cpu"))  # type: ignore[arg-type]


def test_outputs_are_joined_by_their_kind() -> None:
    parts = [Pair(torch.tensor(1.0), torch.zeros(3, 2)), Pair(torch.tensor(5.0), torch.ones(1, 2))]
    joined = join([{"out": part, "hidden": (None, "same")} for part in parts], [0.75, 0.25], device=CPU)
    assert joined["out"].loss == 2.0
    assert joined["out"].logits.shape == (4, 2)
    assert joined["hidden"] == (None, "same")
    with pytest.raises(StrategyError, match="A object is among it"):
        join([object(), object()], [0.5, 0.5], device=CPU)


def test_threads_compute_in_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(copies: Any, inputs: Any, kwargs: Any, _: Any) -> list[Any]:
        from threading import Thread

        seen: list[Any] = []
        for copy in copies:
            thread = Thread(target=lambda copy=copy: seen.append(copy()))
            thread.start()
            thread.join()
        return seen

    monkeypatch.setattr(TORCHS, "parallel_apply", apply)
    before = torch.get_autocast_dtype("cpu")
    other = torch.float16 if before == torch.bfloat16 else torch.bfloat16
    torch.set_autocast_dtype("cpu", other)
    try:
        wrapped = StandIn(nn.Linear(1, 1), [0, 1])
        reading: Any = lambda: torch.get_autocast_dtype("cpu")  # noqa: E731
        assert wrapped.parallel_apply([reading, reading], [(), ()], [{}, {}]) == [other, other]
    finally:
        torch.set_autocast_dtype("cpu", before)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_real_devices_train_like_one(tmp_path: Path, precision: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one GPU")
    set_seed(3)
    args = make_arguments(tmp_path, use_cpu=False, per_device_train_batch_size=2)
    trainer = Trainer(Net(), args, train_dataset=make_rows(21), precision=precision)
    assert trainer.strategy.name == "data_parallel"
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    set_seed(3)
    args = make_arguments(tmp_path, use_cpu=False)
    trainer = Trainer(Net(), args, train_dataset=make_rows(21), precision=precision, strategy="single")
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.testing.assert_close(found, expected, rtol=1e-2 if precision == "bf16" else 1e-4, atol=1e-3)
