"""ZeRO-3 with optimizer and parameters on a drive, on two real processes.

DeepSpeed compiles what that takes, for minutes, so no test lets it. The tests run where it has been done before, by
`python -c "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"`.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resuming import StopAt
from support.tiny import make_arguments, make_rows
from torch import nn
from torch.utils.cpp_extension import get_default_build_root

from hftrain import Trainer, set_seed

pytestmark = pytest.mark.deepspeed


class Wide(nn.Module):
    """Two weights of which half is more than the mebibyte below which DeepSpeed leaves tensors in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 768), nn.LayerNorm(768)
        self.middle, self.last, self.head = nn.Linear(768, 768), nn.Linear(768, 768), nn.Linear(768, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        hidden = self.last(self.middle(self.norm(self.first(x))).tanh()).tanh()
        logits = self.head(hidden)
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits.float(), labels), logits)


CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "in memory": {},
    "optimizer": {"offload_optimizer": {}},
    "optimizer, pipelined": {"offload_optimizer": {"pipeline_read": True, "pipeline_write": True, "buffer_count": 8}},
    "parameters": {"offload_param": {}},
    "both": {"offload_optimizer": {}, "offload_param": {}},
    "both, built there": {"offload_optimizer": {}, "offload_param": {}},
    "both, evaluated first": {"offload_optimizer": {}, "offload_param": {}},
    "both, in rows": {"offload_optimizer": {}, "offload_param": {}},
    "both, in bf16": {"offload_optimizer": {}, "offload_param": {}},
    "in memory, in bf16": {},
    "in memory, built there": {},
}
RESUMED = [name for name in CHOICES if name.startswith(("optimizer", "both"))]


def config_of(folder: str, name: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 400_000}
    zero["stage3_gather_16bit_weights_on_model_save"] = "rows" not in name
    for part, options in CHOICES[name].items():
        zero[part] = {"device": "nvme", "nvme_path": f"{folder}/drive/{name}", "pin_memory": False, **options}
    if "offload_param" in zero:
        zero["offload_param"] |= {"max_in_cpu": 0, "buffer_size": 600_000}
    return {"zero_optimization": zero}


def train(folder: str, name: str, *, stop: int | None = None, resume: bool = False, **options: Any) -> dict[str, Any]:
    set_seed(7)
    arguments = make_arguments(
        Path(folder) / name, optim="adamw_torch", deepspeed=config_of(folder, name), per_device_train_batch_size=2,
        max_grad_norm=0.5, learning_rate=1e-3, gradient_accumulation_steps=2, max_steps=5, eval_strategy="steps",
        eval_steps=2, **options,
    )  # fmt: skip
    is_built = "built" in name
    trainer = Trainer(
        None if is_built else Wide(), arguments, model_init=Wide if is_built else None, callbacks=[StopAt(stop)],
        train_dataset=make_rows(28), eval_dataset=make_rows(7, seed=2), precision="bf16" if "bf16" in name else None,
    )  # fmt: skip
    if "evaluated" in name:
        assert trainer.evaluate()["eval_loss"] > 0
        trainer.state.log_history.clear()
    trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "grad_norm", "eval_loss")
    history = [{key: entry[key] for key in names if key in entry} for entry in trainer.state.log_history]
    state = trainer.strategy.model_state(trainer.model_wrapped)
    engine: Any = trainer.model_wrapped
    return {
        "history": [entry for entry in history if entry],
        "weights": {key: [float(value.double().sum()), float(value.double().norm())] for key, value in state.items()},
        "files": sorted(
            f"{path.parts[-3]}/{path.name.partition('-')[0]}"
            for path in Path(folder, "drive", name).rglob(f"rank{engine.global_rank}/*.swp")
        ),
    }


def everything(folder: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's use of torch
    answers: dict[str, Any] = {}
    saving = {"save_strategy": "steps", "save_steps": 100}
    for name in CHOICES:
        answers[name] = train(folder, name, **saving)
        if name in RESUMED:
            train(f"{folder}/parts", name, stop=3, **saving)
            answers[name]["resumed"] = train(f"{folder}/parts", name, resume=True, **saving)
    return answers


def is_built() -> bool:
    """Tell whether DeepSpeed's operation is compiled for this very torch; asking DeepSpeed would compile it."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    for folder in [Path(root)] if root else Path(get_default_build_root()).glob("*"):
        op = folder / "async_io"
        is_whole = (op / "async_io.so").is_file() and not (op / "lock").exists()
        if is_whole and str(Path(torch.__file__).parent / "include") in (op / "build.ninja").read_text():
            return True
    return False


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from support.distributed import launch

    if not is_built():
        pytest.skip("DeepSpeed's async_io is not compiled here, which would take minutes")
    folder = tmp_path_factory.mktemp("nvme")
    ended = launch(everything, folder, kwargs={"folder": str(folder)}, timeout_s=280)
    assert ended.returncode == 0, ended.output[-20_000:]
    return ended.results


def close(ours: dict[str, Any], theirs: dict[str, Any], rel: float) -> None:
    assert len(ours["history"]) == len(theirs["history"])
    for left, right in zip(ours["history"], theirs["history"], strict=True):
        assert left == pytest.approx(right, rel=rel)
    for name, values in ours["weights"].items():
        assert values == pytest.approx(theirs["weights"][name], rel=rel, abs=1e-5), name


@pytest.mark.parametrize("name", [name for name in CHOICES if "memory" not in name])
def test_run_on_a_drive_equals_the_one_in_memory(two: list[dict[str, Any]], name: str) -> None:
    kind = name.partition(", ")[2]
    for answer in two:
        close(answer[name], answer.get(f"in memory, {kind}", answer["in memory"]), rel=1e-6)


@pytest.mark.parametrize("name", CHOICES)
def test_state_and_parameters_are_really_on_the_drive(two: list[dict[str, Any]], name: str) -> None:
    for answer in two:
        kinds = {file.rpartition(".")[0] or file for file in answer[name]["files"]}
        assert ("optimizer/exp_avg" in kinds) is ("offload_optimizer" in CHOICES[name])
        params = [file for file in answer[name]["files"] if file.startswith("float32params/")]
        # In bfloat16 they are too small for it.
        assert len(params) == (2 if "offload_param" in CHOICES[name] and "bf16" not in name else 0)
        assert bool(answer[name]["weights"]) is (answer is two[0] and "rows" not in name)


@pytest.mark.parametrize("name", RESUMED)
def test_run_on_a_drive_goes_on_from_a_checkpoint(two: list[dict[str, Any]], name: str) -> None:
    for answer in two:
        assert len(answer[name]["history"]) > 5
        close(answer[name]["resumed"], answer[name], rel=1e-6)
