"""Whole runs on a mesh: what a `Trainer` logs, saves and resumes is that of one process with the same global batch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import launch
from support.resuming import StopAt
from support.tiny import make_arguments, make_texts

from hftrain import Trainer, TrainerCallback
from hftrain.extras.flight.fingerprint import Fingerprint
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

MESHES = {
    **{"tp": (2, {}), "cp": (2, {}), "pp": (2, {}), "fsdp_tp": (4, {"tp_size": 2})},
    **{"tp_cp": (4, {"tp_size": 2}), "fsdp_pp": (4, {"pp_size": 2})},
}
LONG = ("fsdp_tp", "tp_cp", "fsdp_pp")


def make_model(dropout: float = 0.0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **rates)
    return GPT2LMHeadModel(config).double()  # Adafactor magnifies the rounding of float32


def make_trainer(folder: Path, name: str, *, dropout: float = 0.0, callbacks: Any = (), **options: Any) -> Trainer:
    strategy: Any = "single" if name == "single" else create_strategy(name, use_cpu=True, **MESHES[name][1])
    size = 4 if name == "single" else 4 // strategy.data.world_size
    settings = {
        **{"max_steps": 3, "per_device_train_batch_size": size, "per_device_eval_batch_size": 3, "save_strategy": "no"},
        **{"learning_rate": 1e-2, "include_num_input_tokens_seen": True},
    }
    return Trainer(
        make_model(dropout), make_arguments(folder, **settings | options), train_dataset=make_texts(),
        eval_dataset=make_texts()[:7], strategy=strategy, callbacks=[*callbacks],
    )  # fmt: skip


def run(folder: Path, name: str, *, saves: bool = False, **options: Any) -> list[Any]:
    trainer = make_trainer(folder, name, **options)
    trainer.train()
    told = [
        line[key]
        for line in trainer.state.log_history
        for key in ("loss", "grad_norm", "epoch", "num_input_tokens_seen")
        if key in line
    ]
    found = trainer.predict(make_texts()[:7])
    if saves:
        trainer.save_model(str(folder / "final"))
    trainer.strategy.close()
    return [*told, trainer.evaluate()["eval_loss"] if name == "single" else found.metrics["test_loss"],
            *found.predictions.flatten()[::97].tolist()]  # fmt: skip


class Marks(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        marks = Fingerprint(model.parameters(), size=300)
        self.found += [marks.of(part)[0] for part in range(marks.num_parts)]


def marks(folder: Path, name: str) -> list[int]:
    noted = Marks()
    trainer = make_trainer(folder, name, callbacks=[noted], max_steps=1)
    trainer.train()
    found: list[int] = trainer.strategy.reduce(torch.stack(noted.found)).tolist()
    trainer.strategy.close()
    return found


def resume(folder: Path, name: str, optim: str) -> bool:
    """Return whether a run in three parts ends with the weights and the optimizer of an uninterrupted one."""
    ends = []
    for place, at, resumes in (("a", None, False), ("b", 1, False), ("b", 3, True), ("b", None, True)):
        options = {"max_steps": 4, "optim": optim, "dropout": 0.1, "gradient_accumulation_steps": 2}
        trainer = make_trainer(folder / place, name, callbacks=[StopAt(at)], **options)
        trainer.train(resume_from_checkpoint=resumes)
        model, optimizer = trainer.model_wrapped, trainer.optimizer
        assert optimizer is not None
        states = trainer.strategy.optimizer_state(model, optimizer).get("state", {})
        tensors = dict(trainer.strategy.model_state(model))
        tensors |= {f"{index}.{key}": value for index, each in states.items() for key, value in each.items()}
        ends.append({name: torch.as_tensor(value).clone() for name, value in tensors.items()})
        trainer.strategy.close()
    first, last = ends[0], ends[-1]
    return first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)


PLANS: dict[str, dict[str, Any]] = {
    "ragged": {"gradient_accumulation_steps": 3, "saves": True},
    "smooth": {"label_smoothing_factor": 0.1, "gradient_checkpointing": True},
    "muon": {"optim": "muon"},
    "adafactor": {"optim": "adafactor", "max_grad_norm": 0.1},
}


def everything(folder: str, name: str) -> dict[str, Any]:
    # What is changed in place would lose its gradient.
    warnings.filterwarnings("error", message=".*returned a view tensor")
    root = Path(folder)
    return {
        **{plan: run(root / plan, name, **options) for plan, options in PLANS.items()},
        "marks": marks(root / "marks", name),
        "same": [resume(root / optim, name, optim) for optim in ("adamw_torch", "adafactor", "muon")],
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("alone")
    return {**{plan: run(root / plan, "single", **options) for plan, options in PLANS.items()},
            "marks": marks(root / "marks", "single")}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.guarantees] * (x in LONG)) for x in MESHES])
def test_run_on_a_mesh_is_that_of_one_process(tmp_path: Path, alone: dict[str, Any], name: str) -> None:
    from transformers import AutoModelForCausalLM

    kwargs = {"folder": str(tmp_path), "name": name}
    ended = launch(everything, tmp_path, kwargs=kwargs, num_processes=MESHES[name][0], forks=True)
    assert ended.returncode == 0, ended.output
    for answer in ended.results:
        assert answer["same"] == [True] * 3
        assert answer["marks"] == alone["marks"]
        for plan in PLANS:
            # Muon orthogonalises in bfloat16.
            assert answer[plan] == pytest.approx(alone[plan], rel=2e-3 if plan == "muon" else 1e-6, abs=1e-6), plan
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ragged" / "final").config.vocab_size == 64


def begin(folder: str, name: str, at: int | None, resumes: bool) -> list[float]:
    """Train up to a step and save there; return all losses."""
    trainer = make_trainer(Path(folder) / "run", name, callbacks=[StopAt(at)], max_steps=5)
    trainer.train(resume_from_checkpoint=resumes)
    trainer.strategy.close()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_checkpoint_goes_from_mesh_to_mesh(tmp_path: Path) -> None:
    for at, name in ((1, "fsdp_tp"), (2, "pp"), (3, "cp")):
        folder = tmp_path / name
        folder.mkdir()
        kwargs = {"folder": str(tmp_path), "name": name, "at": at, "resumes": at > 1}
        ended = launch(begin, folder, kwargs=kwargs, num_processes=MESHES[name][0], forks=True)
        assert ended.returncode == 0, ended.output
    whole = begin(str(tmp_path / "whole"), "single", None, resumes=False)
    assert begin(str(tmp_path), "single", None, resumes=True) == pytest.approx(whole, rel=1e-6)
