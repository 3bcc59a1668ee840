"""The documented optimizers take the same steps here as in transformers' own Trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import collate, make_model, make_rows, run_options  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence"),  # in torchao's own files
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # In GaLore's and GrokAdamW's, which hftrain spares its users.
    pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:.*torch\.cuda\.amp\.autocast:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]

SAME = ["adamw_8bit", "ademamix", "lion_32bit", "rmsprop_bnb", "paged_adamw_32bit", "stable_adamw", "grokadamw"]


@pytest.fixture(autouse=True)
def environment_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep what transformers' Trainer sets for the whole process, once it has run, from outliving a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)
    if "bitsandbytes" in sys.modules:
        # It holds exceptions by the identity of a parameter, which a later one may get.
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()


def both(folder: Path, **options: Any) -> list[dict[str, torch.Tensor]]:
    results = []
    for library in (hftrain, transformers):
        model = make_model("bert")
        arguments = library.TrainingArguments(str(folder), **run_options(**options))
        rows = make_rows("bert", 16)
        trainer: Any = library.Trainer(model, arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        if options["optim"].startswith("schedule_free"):
            # transformers leaves the weights to train in the model.
            trainer.optimizer.eval()
        results.append({name: value.detach().clone() for name, value in model.named_parameters()})
    return results


def check(folder: Path, **options: Any) -> None:
    ours, theirs = both(folder, max_steps=4, learning_rate=1e-3, **options)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.optimizers
@pytest.mark.parametrize("optim", SAME)
def test_optimizer_takes_the_steps_of_transformers(tmp_path: Path, optim: str) -> None:
    check(tmp_path, optim=optim, weight_decay=0.1)


@pytest.mark.optimizers
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_schedule_free_takes_the_steps_of_transformers(tmp_path: Path, kind: str) -> None:
    check(tmp_path, optim=f"schedule_free_{kind}", lr_scheduler_type="constant", warmup_steps=2)


@pytest.mark.optimizers
def test_galore_takes_the_steps_of_transformers(tmp_path: Path) -> None:
    # transformers leaves the optimizer's own eps, which is written out here, and has no weight decay.
    check(
        tmp_path,
        optim="galore_adamw",
        optim_target_modules=["attention", "dense"],
        optim_args="rank=2, update_proj_gap=2, scale=0.5",
        adam_epsilon=1e-6,
    )


@pytest.mark.optimizers
def test_lomo_takes_the_steps_of_transformers(tmp_path: Path) -> None:
    check(tmp_path, optim="lomo", max_grad_norm=0.0)
