"""A run's life on a mesh: what it generates, reads, saves and logs, how it is stopped, and what is refused in words."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_mesh_runs import make_model
from support.distributed import launch
from support.resuming import StopAt
from support.tiny import at, make_arguments, make_texts
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from hftrain import (
    ConfigError,
    FlightLog,
    Mixture,
    SavePolicy,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TaskModule,
    Trainer,
)  # fmt: skip
from hftrain.checkpoint.manifest import list_checkpoints, verify
from hftrain.preemption.signals import TrainingStopped
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {}), "cp": (2, {}), "pp": (2, {}),
    "tp_cp": (4, {"tp_size": 2}), "fsdp_tp": (4, {"tp_size": 2}), "fsdp_pp": (4, {"pp_size": 2}),
}  # fmt: skip
DENSE = {"wi": "colwise", "wo": "rowwise"}
T5_PLAN = {f"{part}.block.*.layer.*.DenseReluDense.{name}": style
           for part in ("encoder", "decoder") for name, style in DENSE.items()}  # fmt: skip
KEYS = ("loss", "grad_norm", "eval_loss")


class Tool:
    pad_token_id = 0


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        worker = get_worker_info()
        rows = make_texts()
        yield from rows if worker is None else rows[worker.id :: worker.num_workers]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Regression(TaskModule):
    """A plain module without classes of layers: nothing but its plan says how it is shared."""

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"*.up": "colwise", "*.down": "rowwise"}

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch["x"]), batch["y"])


class Scaled(Trainer):
    """The documented `compute_loss` of older versions, which undoes the mean over processes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = model(**inputs, num_items_in_batch=num_items_in_batch)["loss"] * self.accelerator.num_processes
        return (loss, {"loss": loss}) if return_outputs else loss


def make_strategy(name: str, **options: Any) -> Any:
    return create_strategy(name, use_cpu=True, **MESHES.get(name, (1, {}))[1], **options)


def run(folder: Path, name: str, *callbacks: Any, rows: Any = None, resumes: Any = False, **options: Any) -> Any:
    names = ("model", "save_policy", "flight_log", "strategy", "kind")
    parts = {each: options.pop(each) for each in names if each in options}
    strategy, kind = parts.pop("strategy", None) or make_strategy(name), parts.pop("kind", Trainer)
    model, size = parts.pop("model", None) or make_model(), 4 // strategy.data.world_size
    settings = {"max_steps": 3, "per_device_train_batch_size": size, "per_device_eval_batch_size": 3, **options}
    trainer = kind(
        model, make_arguments(folder, **settings), train_dataset=make_texts() if rows is None else rows,
        eval_dataset=make_texts()[:7], strategy=strategy, callbacks=[*callbacks], **parts,
    )  # fmt: skip
    try:
        trainer.train(resume_from_checkpoint=resumes)
    finally:
        strategy.close()
    return trainer


def numbers(trainer: Any) -> list[float]:
    return [line[key] for line in trainer.state.log_history for key in KEYS if key in line]


def weights(trainer: Any) -> list[Any]:
    """Return this process's own weights, which tell apart any two runs."""
    own = [each.to_local() if hasattr(each, "to_local") else each for each in trainer.model.parameters()]
    return [each.double().tolist() for each in own if not each.is_meta]


def generate(folder: Path, name: str, kind: str) -> Any:
    """Evaluate before training, which may call parts of the model first, train and generate."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    model: Any = make_model() if kind == "gpt2" else T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)  # type: ignore[arg-type]
    ).double()  # fmt: skip
    model.generation_config.pad_token_id = 0
    rows = [{key: value[:6] for key, value in row.items()} for row in make_texts()]
    strategy = make_strategy(name, **({"plan": T5_PLAN} if kind == "t5" and name == "tp" else {}))
    args = make_arguments(
        folder, arguments=Seq2SeqTrainingArguments, max_steps=2, predict_with_generate=True, generation_max_length=9
    )
    trainer = Seq2SeqTrainer(
        model, args, train_dataset=rows, eval_dataset=rows[:7], processing_class=Tool(), strategy=strategy,  # type: ignore[arg-type]
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found = trainer.predict(rows[:7])
    strategy.close()
    return [before, *numbers(trainer), *found.predictions.flatten().tolist()]


def refused(folder: Path, name: str) -> str:
    with pytest.raises(ConfigError, match="predict_with_generate=True") as caught:
        generate(folder, name, "gpt2")
    return str(caught.value)


def scaled(folder: Path, name: str) -> bool:
    """Return whether a warning names what a loss is to be multiplied by."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hftrain").addHandler(handler)
    trainer = run(folder, name, kind=Scaled, max_steps=1)
    logging.getLogger("hftrain").removeHandler(handler)
    return any("strategy.data.world_size" in each for each in told) or not trainer.strategy.is_main


def stopped(folder: Path, name: str) -> list[Any]:
    """Stop a run by a signal to its last rank, and resume it."""
    last = MESHES[name][0] - 1
    options: dict[str, Any] = {"max_steps": 9, "save_strategy": "steps", "save_steps": 100}

    def slow(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == last:
            os.kill(os.getpid(), signal.SIGTERM)
        if state.global_step >= 2:
            time.sleep(0.3)  # processes take up to half a second to agree

    whole = run(folder / "whole", name, model=make_model(0.1), **options)
    with pytest.raises(TrainingStopped):
        run(folder / "run", name, at("on_step_begin", slow), model=make_model(0.1), **options)
    found = list_checkpoints(folder / "run")
    resumed = run(folder / "run", name, model=make_model(0.1), resumes=True, **options)
    return [len(found), bool(verify(found[-1])), weights(resumed) == weights(whole)]


def best(folder: Path, name: str) -> list[Any]:
    """Write in the background, keep the best checkpoint and the newest, and load the best."""
    options: dict[str, Any] = {"max_steps": 6, "learning_rate": 0.3, "load_best_model_at_end": True}
    options |= {
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = run(folder, name, save_policy=SavePolicy(save_async=True), **options)
    kept = sorted(path.name for path in folder.glob("checkpoint-*"))
    return [*numbers(trainer), kept, str(trainer.state.best_model_checkpoint).rpartition(os.sep)[2]]


def flight(folder: Path, name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(folder, name, flight_log=FlightLog(flush_every=2), max_steps=8, gradient_accumulation_steps=2)
    return [text for each in caught if not (text := str(each.message)).startswith("FSDP2-wrapped")]


def regress(folder: Path, name: str) -> list[float]:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4), "y": torch.randn(4)} for _ in range(16)]
    ends = []
    for place, stop, resumes in (("a", None, False), ("b", 2, False), ("b", None, True)):
        torch.manual_seed(1)
        model = Regression(nn.Sequential(Block(), Block()).double())
        rows = [{key: value.double() for key, value in row.items()} for row in rows]
        ends.append(run(folder / place, name, StopAt(stop), model=model, rows=rows, resumes=resumes, max_steps=4))
    assert weights(ends[0]) == weights(ends[2])
    return numbers(ends[0])


def data(folder: Path, name: str) -> list[list[float]]:
    halves = {"a": (make_texts()[:12], 0.7), "b": (make_texts()[12:], 0.3)}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Rows(), {}),
        (Rows(), {"accelerator_config": {"dispatch_batches": False}}),
        (Rows(), {"dataloader_num_workers": 2}),
        (make_texts(), {"dataloader_num_workers": 2}),
        (make_texts(), {"train_sampling_strategy": "group_by_length"}),
        (Mixture(halves), {}),
    ]
    where = enumerate(cases)
    return [numbers(run(folder / str(place), name, rows=rows, **more)) for place, (rows, more) in where]


def rehearse(folder: Path, name: str) -> bool:
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    strategy = make_strategy(name)
    trainer = Trainer(
        make_model(), make_arguments(folder, per_device_train_batch_size=2, max_steps=3, **steps),
        train_dataset=make_texts(), eval_dataset=make_texts()[:7], strategy=strategy, fast_dev_run=2,
    )  # fmt: skip
    trainer.train()
    strategy.close()
    return not folder.exists()


def live(folder: str, name: str) -> dict[str, Any]:
    root = Path(folder)
    found: dict[str, Any] = {
        "stopped": stopped(root / "stopped", name), "best": best(root / "best", name),
        "flight": flight(root / "flight", name), "data": data(root / "data", name),
        "rehearsed": rehearse(root / "rehearsed", name),
    }  # fmt: skip
    if name == "tp":
        found["tokens"] = [generate(root / kind, name, kind) for kind in ("gpt2", "t5")]
    else:
        found["refused"] = refused(root / "refused", name)
    if name != "pp":
        found["scaled"] = scaled(root / "scaled", name)
    if "cp" not in name:
        found["task"] = regress(root / "task", name)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("alone")
    return {
        "best": best(root / "best", "single"), "data": data(root / "data", "single"),
        "task": regress(root / "task", "single"),
        "tokens": [generate(root / kind, "single", kind) for kind in ("gpt2", "t5")],
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.guarantees] if size > 2 else [])
    for name, (size, _) in MESHES.items()
])  # fmt: skip
def test_a_run_lives_on_a_mesh_as_in_one_process(tmp_path: Path, alone: dict[str, Any], name: str) -> None:
    ended = launch(
        live, tmp_path, kwargs={"folder": str(tmp_path), "name": name}, num_processes=MESHES[name][0], forks=True
    )
    assert ended.returncode == 0, ended.output
    for answer in ended.results:
        assert answer["stopped"] == [1, True, True]
        assert answer["flight"] == []
        assert answer["rehearsed"]
        assert answer.get("scaled", True)
        *losses, kept, chosen = answer["best"]
        assert losses == pytest.approx(alone["best"][:-2], rel=1e-6)
        assert [kept, chosen] == alone["best"][-2:]
        for place, (ours, theirs) in enumerate(zip(answer["data"], alone["data"], strict=True)):
            # Workers of two data ranks share a stream in another order than those of one process.
            assert ours == pytest.approx(theirs, rel=1e-6) or (place == 2 and name.startswith("fsdp_"))
        if "task" in answer:
            assert answer["task"] == pytest.approx(alone["task"], rel=1e-6)
        if "tokens" in answer:
            for ours, theirs in zip(answer["tokens"], alone["tokens"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-6)
        else:
            assert "once a token" in answer["refused"] or "one token at a time" in answer["refused"]
