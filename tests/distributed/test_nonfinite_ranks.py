"""Weights that become NaN in one process: all agree, and go back or stop together."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from support.resuming import StopAt, assert_same, outcome
from support.tiny import SHARINGS, make_resumable, make_rows

from hftrain import NonFiniteError, SavePolicy, TrainerCallback
from hftrain.checkpoint.manifest import list_checkpoints, read_manifest
from hftrain.checkpoint.weights import read_weights

pytestmark = pytest.mark.distributed


class Spoil(TrainerCallback):
    """Write NaN into the part of one weight that the last process holds, once, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step and int(os.environ["RANK"]) == 1:
            for parameter in model.parameters():
                part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                if part.numel():
                    part.detach().view(-1)[-1] = math.nan
                    return


def make_run(folder: Path, strategy: str, *callbacks: Any, policy: SavePolicy, **options: Any) -> Any:
    options = {"save_steps": 2, "max_steps": 8, "logging_steps": 4, **options}
    rows = make_rows(64)
    return make_resumable(
        folder, *callbacks, train_dataset=rows, save_policy=policy, **{**SHARINGS[strategy], **options}
    )


def restored(root: str, strategy: str, save_async: bool) -> None:
    folder, policy = Path(root), SavePolicy(on_nonfinite="restore", save_async=save_async)
    whole = make_run(folder / "whole", strategy, Spoil(5), policy=policy)
    whole.train()
    if whole.is_world_process_zero():
        found = {path.name: read_manifest(path).is_finite for path in list_checkpoints(folder / "whole")}
        assert found == {f"checkpoint-{step}": True for step in (2, 4, 6, 8)}
        assert_same(read_weights(folder / "whole/checkpoint-6"), read_weights(folder / "whole/checkpoint-4"))
    make_run(folder / "cut", strategy, Spoil(5), StopAt(7), policy=policy).train()
    resumed = make_run(folder / "cut", strategy, policy=policy)
    resumed.train(resume_from_checkpoint=True)
    if not strategy.startswith("fsdp"):
        assert_same(outcome(resumed), outcome(whole))
    ours, theirs = (read_weights(folder / name / "checkpoint-8") for name in ("cut", "whole"))
    assert_same(ours, theirs)
    assert all(bool(value.isfinite().all()) for value in ours.values())


@pytest.mark.parametrize(("strategy", "save_async"), [("ddp", False), ("fsdp_whole", False), ("fsdp", True)])
def test_processes_go_back_together(tmp_path: Path, run_distributed: Any, strategy: str, save_async: bool) -> None:
    run_distributed(restored, root=str(tmp_path), strategy=strategy, save_async=save_async)


def stopped(root: str, strategy: str) -> str:
    trainer = make_run(Path(root), strategy, Spoil(3), policy=SavePolicy(on_nonfinite="stop"))
    with pytest.raises(NonFiniteError) as raised:
        trainer.train()
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["fsdp"])
def test_all_stop_with_the_same_error(tmp_path: Path, run_distributed: Any, strategy: str) -> None:
    first, second = run_distributed(stopped, root=str(tmp_path), strategy=strategy)
    assert first == second
    assert "Cannot save step 4: NaN or infinity in layers.0.weight" in first
    assert "Resume from checkpoint-2" in first
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]
