"""FSDP beside other settings on two real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer, set_seed

pytestmark = pytest.mark.distributed


def make_trainer(
    folder: str,
    *,
    model: Any = None,
    strategy: Any = None,
    size: int = 2,
    kind: type[Trainer] = Trainer,
    **options: Any,
) -> Trainer:
    set_seed(7)
    arguments = make_arguments(
        Path(folder), max_steps=3, per_device_train_batch_size=size, per_device_eval_batch_size=2,
        **{"fsdp_config": {"min_num_params": 20}} if strategy == "fsdp" else {}, **options,
    )  # fmt: skip
    return kind(
        Net() if model is None else model, arguments, train_dataset=make_rows(24), eval_dataset=make_rows(7, seed=2),
        strategy=strategy,
    )  # fmt: skip


def train(folder: str, **options: Any) -> list[float]:
    trainer = make_trainer(folder, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


# A loss that divides by the item count is found by a trial, before the first step.
COUNTED = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}


def reuse(folder: str, *, first: str, second: str) -> list[str]:
    """Train and evaluate what another strategy has split."""
    trainer = make_trainer(folder, strategy=first)
    trainer.train()
    answers = []
    other = make_trainer(folder, model=trainer.model, strategy=second)
    for verb in (other.train, other.evaluate):
        with pytest.raises(ConfigError) as caught:
            verb()
        answers.append(str(caught.value))
    same = make_trainer(folder, model=trainer.model, strategy=trainer.strategy)
    same.train()
    return answers


class Clips(Trainer):
    def training_step(self, *inputs: Any) -> torch.Tensor:
        loss = super().training_step(*inputs)
        self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), 0.1)
        return loss


def clip(folder: str, *, strategy: str) -> list[list[float]]:
    """Return the losses of a run that clips by itself, and of one that is told to."""
    found = []
    for kind, max_norm in ((Clips, 0.0), (Trainer, 0.1)):
        trainer = make_trainer(folder, kind=kind, strategy=strategy, max_grad_norm=max_norm, optim="sgd")
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return found


def everything(folder: str) -> dict[str, Any]:
    return {
        "clipped": clip(folder, strategy="fsdp"),
        "counted": train(folder, strategy="fsdp", **COUNTED),
        "compiled": train(folder, strategy="fsdp", torch_compile_backend="aot_eager"),
        "split": reuse(folder, first="fsdp", second="ddp"),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from support.distributed import launch

    folder = tmp_path_factory.mktemp("combined")
    ended = launch(everything, folder, kwargs={"folder": str(folder)}, forks=True)
    assert ended.returncode == 0, ended.output
    return ended.results


def test_loss_that_divides_by_the_item_count_trains_as_alone(two: list[Any], tmp_path: Path) -> None:
    alone = train(str(tmp_path), size=4, **COUNTED)
    for answer in two:
        assert answer["counted"] == pytest.approx(alone, rel=1e-5)


def test_compiled_model_trains_and_evaluates_as_the_plain_one_alone(two: list[Any], tmp_path: Path) -> None:
    alone = train(str(tmp_path), size=4)
    for answer in two:
        assert answer["compiled"] == pytest.approx(alone, rel=1e-5)


def test_accelerators_clipping_takes_the_norm_over_all_processes(two: list[Any]) -> None:
    for found in two:
        own, expected = found["clipped"]
        assert own == pytest.approx(expected, rel=1e-6)


def test_model_that_another_strategy_has_split_is_refused(two: list[Any]) -> None:
    assert two[0]["split"] == two[1]["split"]
    assert len(two[0]["split"]) == 2
    assert all("FSDP has split it among processes already" in answer for answer in two[0]["split"])


def test_zero_3s_empty_parameters_are_refused_by_one_process_too() -> None:
    from hftrain.strategies.single import SingleDeviceStrategy

    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[attr-defined]  # what deepspeed.zero.Init puts there
    with pytest.raises(ConfigError, match="ZeRO-3 has split it"):
        SingleDeviceStrategy(use_cpu=True).check_model(model)
