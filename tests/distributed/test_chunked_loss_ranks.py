"""ChunkedCrossEntropy on two processes: the weights of one process, with ragged micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, run_options

from hftrain import ChunkedCrossEntropy, Trainer, TrainingArguments

pytestmark = [pytest.mark.distributed, pytest.mark.interop]


def train(
    folder: str, *, size: int, chunks: bool = True, strategy: str | None = None, **options: Any
) -> dict[str, Any]:
    settings = {"max_steps": 3, "gradient_accumulation_steps": 3, "optim": "sgd", "learning_rate": 0.1} | options
    args = TrainingArguments(folder, **run_options(**settings, per_device_train_batch_size=size))
    callbacks = [ChunkedCrossEntropy(chunk_size=5)] if chunks else []
    trainer = Trainer(
        make_model("llama"), args, train_dataset=make_rows("llama", 36), callbacks=callbacks, strategy=strategy
    )
    trainer.train()
    state = trainer.strategy.model_state(trainer.model_wrapped)
    trainer.strategy.close()
    return {name: value.tolist() for name, value in state.items()}


# "by size" makes the head a unit of its own, whose weights are gathered again for the backward pass.
SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 500}}


@pytest.mark.parametrize(
    "options", [{"strategy": "ddp"}, {"strategy": "fsdp"}, SHARDED], ids=["ddp", "fsdp", "by size"]
)
def test_weights_are_those_of_one_process(tmp_path: Any, run_distributed: Any, options: Any) -> None:
    plain = train(str(tmp_path / "one"), strategy="single", size=4, chunks=False)
    first, _ = run_distributed(train, folder=str(tmp_path / "two"), size=2, **options)
    for name, values in plain.items():
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(values), rtol=0, atol=2e-6)
