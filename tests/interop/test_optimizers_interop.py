"""The documented optimizers take the same steps here as in transformers' own Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import collate, make_model, make_rows, run_options  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [
    pytest.mark.optimizers,
    pytest.mark.usefixtures("environment_stays"),
    pytest.mark.filterwarnings("ignore:.*invalid escape sequence"),  # in torchao's own files
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    # In GaLore's and GrokAdamW's, which hftrain spares its users.
    pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:.*torch\.cuda\.amp\.autocast:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CUDA is not available"),
]

SAME = ["adamw_8bit", "ademamix", "lion_32bit", "rmsprop_bnb", "paged_adamw_32bit", "stable_adamw", "grokadamw"]


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


# transformers leaves galore's own eps, which is written out here, and has no weight decay.
GALORE = {
    "optim_target_modules": ["attention", "dense"],
    "optim_args": "rank=2, update_proj_gap=2, scale=0.5",
    "adam_epsilon": 1e-6,
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"weight_decay": 0.1} for name in SAME},
    **{f"schedule_free_{kind}": {"lr_scheduler_type": "constant", "warmup_steps": 2} for kind in ("adamw", "sgd")},
    "galore_adamw": GALORE,
    "lomo": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("optim", CASES)
def test_optimizer_takes_the_steps_of_transformers(tmp_path: Path, optim: str) -> None:
    ours, theirs = both(tmp_path, max_steps=4, learning_rate=1e-3, optim=optim, **CASES[optim])
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
