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


@pytest.mark.interop
def test_weights_of_a_loss_are_trained_and_not_clipped_as_in_transformers(tmp_path: Path) -> None:
    """As in sentence-transformers, whose optimizer trains the loss's own weights beside the model's."""
    found = []
    for library in (hftrain, transformers):

        class Weighted(library.Trainer):  # type: ignore[name-defined, misc]
            scale = torch.nn.Parameter(torch.ones(()))

            def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
                # transformers clears the model's gradients only.
                self.scale.grad = None
                return model(**inputs).loss * self.scale.exp()

            def create_optimizer(self, *args: Any) -> Any:
                self.optimizer = torch.optim.SGD([*self.model.parameters(), self.scale], lr=0.1)
                return self.optimizer

        arguments = library.TrainingArguments(str(tmp_path), **run_options(max_steps=4, max_grad_norm=0.1))
        trainer = Weighted(make_model("bert"), arguments, train_dataset=make_rows("bert", 16), data_collator=collate)
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        found.append([*norms, trainer.scale.item(), *(p.norm().item() for p in trainer.model.parameters())])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:The loss depends on")
def test_gradients_of_what_the_optimizer_leaves_out_are_clipped_and_cleared_as_in_transformers(tmp_path: Path) -> None:
    """An optimizer of the head alone, above a body that nobody froze, and a callback's own optimizer."""
    found = []
    for library in (hftrain, transformers):
        model = make_model("bert")
        pooler = torch.optim.SGD(model.bert.pooler.parameters(), lr=0.1)

        class Second(library.TrainerCallback):  # type: ignore[name-defined, misc]
            def on_optimizer_step(self, *args: Any, own: Any = pooler, **kwargs: Any) -> None:
                own.step()

        arguments = library.TrainingArguments(str(tmp_path), **run_options(max_steps=4, max_grad_norm=0.1))
        optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
        trainer = library.Trainer(
            model,
            arguments,
            train_dataset=make_rows("bert", 16),
            data_collator=collate,
            optimizers=(optimizer, None),
            callbacks=[Second],
        )
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append([*norms, *(p.norm().item() for p in model.parameters())])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


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
