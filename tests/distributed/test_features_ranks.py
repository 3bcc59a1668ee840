"""Features of a run on two processes, with each strategy: the weights of one process, and exact after two resumes.

A feature that acts between steps, on gradients or on weights needs a row here and no file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support import optimizer_runs
from support.distributed import launch
from support.resuming import Stop, StopAt
from support.tiny import Net, Rows, make_rows, make_trainer

from hftrain import EMA, Freeze, GradientAccumulationScheduler, GradientClipping, SpikeGuard, TrainerCallback, set_seed

pytestmark = pytest.mark.distributed


class Feature(NamedTuple):
    """The callbacks and options of a run, its model and samples, where and how it is cut, and its rounding."""

    callbacks: Callable[[], list[TrainerCallback]] = list
    options: Mapping[str, Any] = MappingProxyType({})
    model: Callable[[], Any] = Net
    rows: Callable[[], Rows] = lambda: make_rows(24)
    cuts: tuple[int, int] = (3, 4)
    tolerance: float = 1e-5
    stop: Callable[[int | None], TrainerCallback] = StopAt


class Second(TrainerCallback):
    """Step the last layer with an optimizer of its own, too."""

    optimizer: Any = None

    def checkpoint_objects(self) -> dict[str, Any]:
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer = torch.optim.Adam(kwargs["model"].layers[-1].parameters(), lr=1e-3)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizer.step()


class Sensitive(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        loss, *rest = super().forward(x, labels)
        return (loss * x.abs().max().clamp(min=10.0), *rest)


def make_spiked() -> Rows:
    rows = make_rows(48)
    rows[32] = {**rows[32], "x": torch.full((4,), 1e4)}  # of the first process, in its ninth batch
    return rows


def clipping(kind: str) -> Feature:
    options = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    return Feature(lambda: [GradientClipping(kind, 0.01)], options)


def spikes(on_spike: str) -> Feature:
    options = {
        "max_steps": 12,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps",
        "save_steps": 6,
    }
    guard = {"rolling_interval_length": 8, "sigma_factor": 20}
    return Feature(lambda: [SpikeGuard(on_spike, **guard)], options, Sensitive, make_spiked, (8, 9), stop=Stop)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
FEATURES = {
    "accumulation": Feature(
        lambda: [GradientAccumulationScheduler({0: 1, 2: 3, 4: 2})], {"gradient_accumulation_steps": 3}
    ),
    "clipping by value": clipping("value"),
    "clipping by group": clipping("group"),
    "adaptive clipping": clipping("adaptive"),
    "freezing": Feature(lambda: [Freeze({"layers.0": "1ep", "layers.1.weight": None})], cuts=(5, 6)),
    "average": Feature(lambda: [EMA(0.8, every=2)], EVALUATED),
    "average in bf16": Feature(lambda: [EMA(0.8, every=2)], {"bf16": True, **EVALUATED}, tolerance=1e-2),
    # What a checkpoint averages is not what trains when the resumed run begins.
    "average and freezing": Feature(lambda: [EMA(0.8, every=2), Freeze("layers.0", 4)], cuts=(3, 5)),
    "second optimizer": Feature(lambda: [EMA(0.8, every=2), Second()]),
    "muon": Feature(
        options={"optim": "muon", "learning_rate": 1e-2, "max_grad_norm": 0.0},
        model=optimizer_runs.Words,
        rows=optimizer_runs.make_words,
        tolerance=2e-3,  # orthogonalized in bfloat16
    ),
    "skipped spikes": spikes("skip"),
    "rewound spikes": spikes("rewind"),
}


def train(folder: Path, feature: Feature, strategy: str, *, size: int, cuts: Any = (None,), resume: Any = False) -> Any:
    """Train in as many parts as there are cuts; return the weights, the evaluations and the spikes."""
    for cut in cuts:
        set_seed(3)
        options = {
            "max_steps": 8,
            "per_device_train_batch_size": size,
            "optim": "sgd",
            "learning_rate": 0.1,
            "weight_decay": 0.1,
            **feature.options,
        }
        data = {"train_dataset": feature.rows(), "eval_dataset": feature.rows()[:9]}
        callbacks = [*feature.callbacks(), feature.stop(cut)]
        trainer = make_trainer(folder, feature.model(), *callbacks, strategy=strategy, **data, **options)
        trainer.train(resume_from_checkpoint=resume)
        state = trainer.strategy.model_state(trainer.model_wrapped)
        trainer.strategy.close()
        resume = True
    history = trainer.state.log_history
    return {
        "weights": {name: value.flatten().tolist() for name, value in state.items()},
        "losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "spikes": [entry["step"] for entry in history if "spike_loss" in entry],
    }


def train_each(folder: str) -> dict[str, Any]:
    """Train with each feature: with each strategy, and with sharded weights also in three parts."""
    found = {}
    for name, feature in FEATURES.items():
        place = Path(folder) / name
        runs = {strategy: train(place / strategy, feature, strategy, size=2) for strategy in ("ddp", "fsdp")}
        runs["parts"] = train(place / "parts", feature, "fsdp", size=2, cuts=(*feature.cuts, None))
        found[name] = runs
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Return where two processes trained with each feature, and what each found."""
    folder = tmp_path_factory.mktemp("features")
    ended = launch(train_each, tmp_path_factory.mktemp("launch"), kwargs={"folder": str(folder)}, forks=True)
    assert ended.returncode == 0, ended.output
    return folder, ended.results


def check_equal(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert ours["spikes"] == theirs["spikes"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=max(tolerance, 1e-4))
    for name, values in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx(values, rel=10 * tolerance, abs=tolerance), name


@pytest.mark.parametrize("name", FEATURES)
def test_two_processes_train_as_one_does_continue_exactly_twice_and_can_be_continued_by_one(
    ranks: Any, tmp_path: Path, name: str
) -> None:
    folder, (first, second) = ranks
    feature = FEATURES[name]
    alone = train(tmp_path / "alone", feature, "single", size=4)
    assert alone["spikes"] == ([9] if "spikes" in name else [])
    assert first[name]["parts"] == first[name]["fsdp"]
    assert first[name]["ddp"] == second[name]["ddp"]
    saved = str(folder / name / "parts" / f"checkpoint-{feature.cuts[1]}")
    continued = train(tmp_path / "continued", feature, "single", size=4, resume=saved)
    for found in (first[name]["ddp"], first[name]["fsdp"], continued):
        check_equal(found, alone, feature.tolerance)
