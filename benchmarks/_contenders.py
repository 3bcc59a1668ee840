"""The model that every contender of `overhead.py` trains, and how each one trains it; other scripts take parts."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain import TaskModule, Trainer, TrainingArguments

NUM_FEATURES = 64
NUM_CLASSES = 10
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01

ARGUMENTS: dict[str, Any] = {
    "learning_rate": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "dataloader_pin_memory": False,
    "use_cpu": True,
    "logging_strategy": "no",
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of ``2 (depth + 1)`` tensors, and how many steps make a turn.

    Its plain step takes about as long as its name says, or it has as many small tensors.
    """

    name: str
    width: int
    depth: int
    batch_size: int
    steps_per_turn: int
    num_turns: int
    budget: float | None = None


SIZES = {
    size.name: size
    for size in (
        Size(name="0.5ms", width=32, depth=2, batch_size=8, steps_per_turn=20, num_turns=80, budget=1.12),
        Size(name="1ms", width=448, depth=2, batch_size=16, steps_per_turn=10, num_turns=80, budget=1.10),
        Size(name="5ms", width=640, depth=3, batch_size=32, steps_per_turn=3, num_turns=70),
        Size(name="20ms", width=1152, depth=4, batch_size=32, steps_per_turn=1, num_turns=100, budget=1.02),
        Size(name="100 tensors", width=16, depth=49, batch_size=16, steps_per_turn=2, num_turns=60, budget=1.05),
        Size(name="1,000 tensors", width=16, depth=499, batch_size=16, steps_per_turn=1, num_turns=20, budget=1.02),
        Size(name="10,000 tensors", width=16, depth=4999, batch_size=16, steps_per_turn=1, num_turns=8, budget=1.02),
    )
}


class Net(nn.Module):
    """A multilayer perceptron that returns its loss, and tells a probe whenever it is entered."""

    def __init__(self, size: Size, probe: Callable[[], None]) -> None:
        super().__init__()
        widths = [NUM_FEATURES, *[size.width] * size.depth]
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(size.width, NUM_CLASSES))
        self.probe = probe

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.probe()
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Task(TaskModule):
    """The same model as a task."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss


@dataclass(frozen=True, kw_only=True)
class Job:
    """What each contender trains: one epoch of `max_steps` full batches."""

    net: nn.Module
    samples: list[dict[str, torch.Tensor]]
    batch_size: int
    max_steps: int

    def loader(self, **options: Any) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(self.samples, batch_size=self.batch_size, collate_fn=collate, **options)  # type: ignore[arg-type]

    def optimizer(self, *, fused: bool | None) -> torch.optim.Optimizer:
        """Return AdamW; None leaves its form to torch, which takes a loop over parameters on a CPU."""
        parameters = list(self.net.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=fused)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, (self.max_steps - step) / self.max_steps)
        )


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def make_job(size: Size, probe: Callable[[], None], *, num_steps: int) -> Job:
    """Prepare `num_steps` whole steps, from `forward` to `forward`."""
    torch.manual_seed(0)
    max_steps = num_steps + 1
    distinct = [
        {"inputs": torch.randn(NUM_FEATURES), "labels": torch.randint(NUM_CLASSES, ())}
        for _ in range(8 * size.batch_size)
    ]
    samples = (distinct * (max_steps // 8 + 1))[: max_steps * size.batch_size]
    return Job(net=Net(size, probe), samples=samples, batch_size=size.batch_size, max_steps=max_steps)


class InOrder:
    """Make a Trainer, hftrain's or transformers', read its training data in order."""

    train_dataset: Any

    def _get_train_sampler(self, train_dataset: Any = None) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class InOrderTrainer(InOrder, Trainer):
    """The Trainer measured here."""


def run_plain(job: Job, *, fused: bool | None = True) -> None:
    device = torch.device("cpu")
    model = job.net.to(device).train()
    # Listed once: a walk through the modules at each step would flatter everybody else.
    parameters = list(model.parameters())
    optimizer = job.optimizer(fused=fused)
    schedule = job.schedule(optimizer)
    for batch in job.loader():
        batch = {name: value.to(device) for name, value in batch.items()}
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def run_hftrain_task(job: Job) -> None:
    _run_hftrain(job, Task(job.net))


def run_hftrain_module(job: Job) -> None:
    _run_hftrain(job, job.net)


def _run_hftrain(job: Job, model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=job.max_steps, per_device_train_batch_size=job.batch_size, **ARGUMENTS
        )
        InOrderTrainer(model, arguments, data_collator=collate, train_dataset=job.samples).train()


def run_accelerate(job: Job, *, fused: bool | None = None) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = job.optimizer(fused=fused)
    model, optimizer, loader, schedule = accelerator.prepare(job.net, optimizer, job.loader(), job.schedule(optimizer))
    model.train()
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def run_transformers(job: Job) -> None:
    import transformers

    transformers.logging.set_verbosity_error()

    class InOrderTrainer(InOrder, transformers.Trainer):
        pass

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=job.max_steps, per_device_train_batch_size=job.batch_size, **ARGUMENTS
        )
        InOrderTrainer(job.net, arguments, data_collator=collate, train_dataset=job.samples).train()


def run_lightning(job: Job, *, fused: bool | None = None) -> None:
    import lightning

    logging.getLogger("lightning").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.net

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer(fused=fused)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": job.schedule(optimizer), "interval": "step"},
            }

    trainer = lightning.Trainer(
        barebones=True, accelerator="cpu", devices=1, max_steps=job.max_steps, gradient_clip_val=1.0
    )
    trainer.fit(Module(), job.loader())


CONTENDERS: dict[str, Callable[[Job], None]] = {
    "plain": run_plain,
    "plain-again": run_plain,
    "plain-loop": partial(run_plain, fused=None),
    "hftrain-task": run_hftrain_task,
    "hftrain-module": run_hftrain_module,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
    "accelerate-fused": partial(run_accelerate, fused=True),
    "lightning": run_lightning,
    "lightning-fused": partial(run_lightning, fused=True),
}


def is_installed(name: str) -> bool:
    """Tell whether a contender's package is here (hftrain and torch are)."""
    package = name.partition("-")[0]
    return package not in ("accelerate", "transformers", "lightning") or find_spec(package) is not None


def write_between(page: Path, mark: str, text: str) -> None:
    """Put text into a page between the comment that names the mark and the comment that ends it."""
    before, _, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    _, _, after = rest.partition("<!-- end of what")
    page.write_text(f"{before}<!-- {mark} -->\n{text}<!-- end of what{after}", encoding="utf-8")
