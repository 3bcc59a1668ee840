"""Two networks with an optimizer each train on two processes as on one, and are resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.gan import Gan, make, weights

pytestmark = pytest.mark.distributed
WRAPPED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Half"]}}


def train(folder: str, *, turns: bool = False, resume: int | None = None, **options: Any) -> Any:
    trainer = make(Path(folder), Gan(takes_turns=turns), save_strategy="steps", save_steps=1, **options)
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{resume}")
    return {"weights": weights(trainer), "logs": trainer.state.log_history[-2]}


@pytest.mark.parametrize("turns", [False, True], ids=["both", "turns"])
@pytest.mark.parametrize("options", [{}, {"fp16": True}, WRAPPED], ids=["ddp", "fp16", "fsdp"])
def test_a_gan_trains_on_two_processes_as_on_one(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any], turns: bool
) -> None:
    """Accumulation of 3 micro-batches; resumed twice between the two steps of a pair."""
    folder, settings = str(tmp_path / "two"), {**options, "turns": turns, "gradient_accumulation_steps": 3}
    both = run_distributed(train, folder=folder, max_steps=7, **settings)
    assert both[0]["weights"] == both[1]["weights"]
    for step in (3, 5):
        assert run_distributed(train, folder=folder, max_steps=7, resume=step, **settings) == both
    # Ranks take batches in turn, so a micro-step of two ranks has the samples of one with twice the batch size.
    alone = {name: value for name, value in settings.items() if not name.startswith("fsdp")}
    one = train(str(tmp_path / "one"), max_steps=7, per_device_train_batch_size=4, **alone)
    for ours, theirs in zip(both[0]["weights"], one["weights"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3 if options.get("fp16") else 1e-4, abs=1e-4)
    assert both[0]["logs"]["num_updates/critic"] == one["logs"]["num_updates/critic"] == (4 if turns else 7)
    assert both[0]["logs"]["grad_norm/critic"] == pytest.approx(one["logs"]["grad_norm/critic"], rel=1e-2)
