"""A compiled model on two processes: DDP wraps it, and it trains what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer, set_seed

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def train(folder: str, **options: Any) -> dict[str, Any]:
    """Train `Net`, three epochs with a short batch at the end of each, and return what it logged and counted."""
    from torch._dynamo.utils import counters

    set_seed(7)
    arguments = make_arguments(Path(folder), num_train_epochs=3, eval_strategy="epoch", **options)
    trainer = Trainer(Net(), arguments, train_dataset=make_rows(22), eval_dataset=make_rows(8, seed=2))
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "wrapped": type(trainer.model_wrapped).__name__,
        "names": list(trainer.strategy.model_state(trainer.model_wrapped)),
        "graphs": counters["stats"]["unique_graphs"],
    }


def test_compiled_ddp_equals_plain_ddp_and_compiles_once(tmp_path: Path, run_distributed: Any) -> None:
    plain = run_distributed(train, folder=str(tmp_path / "plain"), ddp_find_unused_parameters=False)
    compiled = run_distributed(
        train, folder=str(tmp_path / "compiled"), ddp_find_unused_parameters=False, torch_compile_backend="aot_eager"
    )
    for rank in range(2):
        assert compiled[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=1e-5)
        assert compiled[rank]["wrapped"] == "DistributedDataParallel"
        assert compiled[rank]["names"] == list(Net().state_dict())
        assert plain[rank]["graphs"] == 0
        assert compiled[rank]["graphs"] == 2  # training and evaluation


def fit(folder: str, limit: int, **options: Any) -> dict[str, Any]:
    """Train `Net` on a machine where the second process has memory for few samples only."""

    class Small(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            if torch.distributed.get_rank() == 1 and len(x) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return super().forward(x, labels)

    set_seed(7)
    arguments = make_arguments(Path(folder), num_train_epochs=1, per_device_train_batch_size=8, **options)
    trainer = Trainer(Small(), arguments, train_dataset=make_rows(32))
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "size": trainer.state.train_batch_size,
        "weights": [parameter.flatten().tolist() for parameter in trainer.model.parameters()],
    }


def test_processes_agree_on_a_micro_batch_that_fits_all(tmp_path: Path, run_distributed: Any) -> None:
    plain = run_distributed(fit, folder=str(tmp_path / "plain"), limit=8)
    found = run_distributed(fit, folder=str(tmp_path / "found"), limit=3, auto_find_batch_size=True)
    assert [each["size"] for each in plain] == [8, 8]
    assert [each["size"] for each in found] == [2, 2]
    for rank in range(2):
        assert found[rank]["losses"] == pytest.approx(plain[rank]["losses"], rel=1e-5)
        for ours, theirs in zip(found[rank]["weights"], plain[rank]["weights"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
