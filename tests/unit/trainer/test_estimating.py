"""The estimate of memory against what torch's profiler sees allocated in a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import StepMemory
from support.tiny import Net, make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, Trainer, TrainerCallback
from hftrain.loggers import Logger

WIDTH, BATCH = 64, 8


class Wrapped(nn.Module):
    """Any body, by the documented rules; its inputs come as one tensor."""

    def __init__(self, body: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.LazyLinear(num_classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.body(x).flatten(1))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    return nn.Sequential(nn.Embedding(500, WIDTH), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU())


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def images() -> torch.Tensor:
    return torch.randn(3, 24, 24)


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), lambda: torch.randn(256)),
    "convolutions": (convolutions, images),
    "attention": (attention, lambda: torch.randint(500, (32,))),
    "recurrent": (lambda: Recurrent(32, 96, batch_first=True), lambda: torch.randn(20, 32)),
    "embeddings": (lambda: nn.EmbeddingBag(20_000, 64), lambda: torch.randint(20_000, (30,))),
}


class Measure(StepMemory):
    """Remember as well what was there before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        states = [value for each in optimizer.state.values() for value in each.values()]
        self.before = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers(), *states])
        super().on_step_begin(args, state, control, **kwargs)


def make_trainer(folder: Path, name: str, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    torch.manual_seed(0)
    body, sample = MODELS[name]
    rows = [{"x": sample(), "labels": torch.tensor(index % 10)} for index in range(3 * BATCH)]
    model = Wrapped(body(), 10)
    model(torch.stack([row["x"] for row in rows[:2]]))
    settings = {"per_device_train_batch_size": BATCH, "max_steps": 3, **options}
    return Trainer(model, make_arguments(folder, **settings), train_dataset=rows, callbacks=list(callbacks))


# oneDNN has no LSTM for bfloat16 on every processor.
CASES = [
    (name, precision) for name in MODELS for precision in ("fp32", "bf16") if (name, precision) != ("recurrent", "bf16")
]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_estimate_is_within_ten_percent_of_the_measured_peak(tmp_path: Path, name: str, precision: str) -> None:
    options = {"bf16": precision == "bf16"}
    estimate = make_trainer(tmp_path, name, **options).estimate_memory()
    measure = Measure()
    make_trainer(tmp_path, name, measure, **options).train()
    assert estimate.peak_bytes == pytest.approx(measure.before + measure.peaks[-1], rel=0.1)


def test_estimate_names_the_parts_and_leaves_nothing_behind(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "out", "mlp")
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    estimate = trainer.estimate_memory()
    num_bytes = sum(4 * parameter.numel() for parameter in trainer.model.parameters())
    assert estimate.parameters_bytes == estimate.gradients_bytes == num_bytes
    # AdamW keeps two numbers for each, and the count of its steps for each tensor.
    assert estimate.optimizer_bytes == 2 * num_bytes + 4 * len(list(trainer.model.parameters()))
    parts = estimate.parameters_bytes + estimate.gradients_bytes + estimate.optimizer_bytes
    assert estimate.peak_bytes == parts + estimate.activations_bytes
    assert "peak" in str(estimate)
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert not (tmp_path / "out").exists()
    assert trainer.fast_dev_run == 0


class Steep(nn.Module):
    """Its gradients overflow in float16 until the scale has been lowered a few times, or never in time."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.net, self.factor = Net(), factor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.net(x, labels)[0] * self.factor,)


def test_estimate_with_a_scaled_loss_looks_at_steps_that_were_taken(tmp_path: Path) -> None:
    def estimate(factor: float) -> Any:
        arguments = make_arguments(tmp_path, fp16=True, num_train_epochs=20)
        return Trainer(Steep(factor), arguments, train_dataset=make_rows()).estimate_memory()

    flat, steep = estimate(1e-3), estimate(1e3)
    assert steep.optimizer_bytes == flat.optimizer_bytes > 0
    with (
        pytest.warns(UserWarning, match="although the loss scale has come down"),
        pytest.raises(ConfigError, match="every step it took overflowed"),
    ):
        estimate(1e30)


class Telling(Logger):
    """Notes that it was started."""

    name = "telling"
    num_starts = 0

    def start(self, run: Any) -> None:
        self.num_starts += 1


def test_estimate_is_reported_to_no_tracker(tmp_path: Path) -> None:
    logger = Telling()
    trainer = Trainer(Net(), make_arguments(tmp_path, max_steps=2), train_dataset=make_rows(), loggers=[logger])
    trainer.estimate_memory()
    assert logger.num_starts == 0
    trainer.train()
    assert logger.num_starts == 1


def test_estimate_with_ddp_counts_the_buckets(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(), strategy="ddp")
    try:
        estimate = trainer.estimate_memory()
    finally:
        trainer.strategy.close()
    assert estimate.gradients_bytes == 2 * estimate.parameters_bytes


def test_estimate_of_an_engine_with_memory_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows())
    trainer.strategy.name = "deepspeed_stage_2"  # a stand-in: the name alone decides
    with pytest.raises(ConfigError, match="does not report its peak"):
        trainer.estimate_memory()
