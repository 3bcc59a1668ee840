"""`Trainer.tune` gives every process the same answer, and trains on as if it had not been called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_rows, make_trainer

from hftrain import ConfigError, set_seed

pytestmark = pytest.mark.distributed


def train(folder: str, *, tunes: bool, **options: Any) -> Any:
    set_seed(0)
    trainer = make_trainer(Path(folder), Net(0.1), train_dataset=make_rows(64), max_steps=4, **options)
    found = None
    if tunes:
        trial = trainer.tune.lr(num_steps=12, max_lr=10.0)
        found = [trial.rates, trial.losses, trial.suggestion, sorted(trainer.tune.loader((0,), num_batches=3))]
        with pytest.raises(ConfigError, match="2 processes"):
            trainer.tune.batch_size()
    trainer.train()
    weights = [getattr(p, "full_tensor", lambda p=p: p)().flatten().tolist() for p in trainer.model.parameters()]
    return {"found": found, "weights": weights}


@pytest.mark.parametrize("options", [{}, {"fsdp": "full_shard"}], ids=["ddp", "fsdp"])
def test_every_process_gets_the_same_answer(tmp_path: Path, run_distributed: Any, options: dict[str, Any]) -> None:
    tuned = run_distributed(train, folder=str(tmp_path / "out"), tunes=True, **options)
    assert tuned[0] == tuned[1]
    plain = run_distributed(train, folder=str(tmp_path / "plain"), tunes=False, **options)
    assert [each["weights"] for each in tuned] == [each["weights"] for each in plain]
