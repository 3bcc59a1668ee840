"""Lives of a run that hypothesis makes up and shortens: trained, killed, moved, damaged, evaluated, in any order.

Whatever happens to it, each update has the samples and the weights of a loop by hand that nothing happened to.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.distributed import launch
from support.resuming import Signal, StopAt
from support.tiny import Net, at, make_trainer
from torch import nn

from hftrain import EMA, SavePolicy, StepOutput, TaskModule, Trainer, set_seed
from hftrain.checkpoint.manifest import checkpoint_step, list_checkpoints
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

SAMPLES, PER_UPDATE, EPOCHS, SAVE_STEPS = 48, 8, 6, 4
STEPS = SAMPLES // PER_UPDATE * EPOCHS
# Processes, strategy, samples of a micro-batch, micro-batches: eight samples an update.
LAYOUTS = {
    "single": (1, "single", 8, 1), "accumulating": (1, "single", 2, 4), "ddp": (2, "ddp", 4, 1),
    "ddp accumulating": (2, "ddp", 1, 4), "fsdp": (2, "fsdp", 4, 1), "fsdp accumulating": (2, "fsdp", 2, 2),
}  # fmt: skip
# The step of the newest checkpoint when a life was interrupted at a step.
ENDINGS = {
    "stop": lambda step: step, "SIGTERM": lambda step: step, "kill": lambda step: (step - 1) // SAVE_STEPS * SAVE_STEPS,
    "error": lambda step: (step - 1) // SAVE_STEPS * SAVE_STEPS,
}  # fmt: skip
FEATURES = ("ema", "flight_log", "save_async")


def make_samples(number: int = SAMPLES, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (number,), generator=generator)
    return [{"x": x[index], "labels": labels[index], "number": torch.tensor(index)} for index in range(number)]


class Task(TaskModule):
    def __init__(self, dropout: float) -> None:
        super().__init__(Net(dropout))
        self.numbers: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        self.numbers += batch["number"].tolist()
        loss, logits = self.model(batch["x"], batch["labels"])
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"])

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        loss, logits = self.model(batch["x"], batch["labels"])
        return StepOutput(loss=loss, outputs=logits, labels=batch["labels"])


def flat(model: nn.Module) -> list[float]:
    whole = (getattr(each, "full_tensor", lambda each=each: each)() for each in model.state_dict().values())
    return [number for each in whole for number in each.flatten().tolist()]


def make(layout: str, dropout: float, features: tuple[str, ...] = (), *callbacks: Any) -> Trainer:
    _, strategy, size, accumulation = LAYOUTS[layout]
    set_seed(0)
    made: Trainer = make_trainer(
        Path("run"), Task(dropout), *callbacks, *([EMA(0.9)] if "ema" in features else ()),
        train_dataset=make_samples(), eval_dataset=make_samples(22, seed=6), precision="fp64",
        strategy=create_strategy(strategy, use_cpu=True), flight_log="flight_log" in features,
        save_policy=SavePolicy(save_async="save_async" in features), num_train_epochs=EPOCHS,
        save_strategy="steps", save_steps=SAVE_STEPS, per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    return made


def train(layout: str, dropout: float, ending: str, step: int, features: tuple[str, ...]) -> None:
    """Train on from the newest checkpoint to an interruption, and write down every update when it is made."""

    def write_down(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weights, task = flat(trainer.task.model), trainer.task
        with open(f"updates_{args.process_index}.jsonl", "a") as file:
            file.write(json.dumps([state.global_step, task.numbers, weights]) + "\n")
        task.numbers = []
        if state.global_step == step and ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == step and ending == "error":
            raise RuntimeError("A planned error.")

    ends = {"stop": StopAt(step), "SIGTERM": Signal(step)}
    trainer = make(layout, dropout, features, at("on_step_end", write_down), ends.get(ending, StopAt(None)))
    trainer.train(resume_from_checkpoint="auto")


def evaluate(layout: str) -> float:
    return float(make(layout, 0.0).evaluate(ckpt="last")["eval_loss"])


def by_hand(order: list[list[int]]) -> Iterator[tuple[list[float], float]]:
    """Yield the weights after each update, and the loss of the evaluation set, of a plain loop."""
    set_seed(0)
    model, samples, held_out = Net().double(), make_samples(), make_samples(22, seed=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / STEPS)
    for numbers in order:
        optimizer.zero_grad()
        model(*(torch.stack([samples[number][key] for number in numbers]) for key in ("x", "labels")))[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            loss = model(*(torch.stack([row[key] for row in held_out]) for key in ("x", "labels")))[0].item()
        yield flat(model), loss


def updates(folder: Path) -> list[tuple[int, list[int], list[float]]]:
    """Read, and forget, what the processes wrote down: step, samples of all processes, weights."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for path in sorted(folder.glob("updates_*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            step, numbers, weights = json.loads(line)
            found[step] = (sorted([*found.get(step, ([], []))[0], *numbers]), weights)
        path.unlink()
    return [(step, *rest) for step, rest in sorted(found.items())]


def stage(folder: Path, layout: str, dropout: float, ending: str, step: int, features: tuple[str, ...] = ()) -> Any:
    given = {"layout": layout, "dropout": dropout, "ending": ending, "step": step, "features": features}
    ran = launch(train, folder, num_processes=LAYOUTS[layout][0], kwargs=given, forks=True)
    assert (ran.returncode == 0) == (ending in ("stop", "end")), ran.output
    return updates(folder)


@cache
def never_interrupted(layout: str, dropout: float) -> dict[int, tuple[list[int], list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        return {step: rest for step, *rest in stage(Path(folder), layout, dropout, "end", 0)}  # type: ignore[misc]


class Life(RuleBasedStateMachine):
    """A run and what must hold of it."""

    @initialize(layout=st.sampled_from(sorted(LAYOUTS)), dropout=st.sampled_from([0.0, 0.0, 0.2]))
    def begin(self, layout: str, dropout: float) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.folder, self.layout, self.dropout = Path(self.place.name), layout, dropout
        self.features: set[str] = set()
        self.saved = [0]
        order = [never_interrupted("single", 0.0)[step][0] for step in range(1, STEPS + 1)]
        self.expected = dict(enumerate(zip(order, by_hand(order), strict=True), 1))
        read = [number for numbers in order for number in numbers]
        each_epoch = [read[at : at + SAMPLES] for at in range(0, len(read), SAMPLES)]
        assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in each_epoch)

    @rule(steps=st.integers(1, 7), ending=st.sampled_from(sorted(ENDINGS)))
    def train_on(self, steps: int, ending: str) -> None:
        last = min(self.saved[-1] + steps, STEPS - 1)
        if last > self.saved[-1]:
            last = self.check(ending, last)
            planned = range(self.saved[-1] // SAVE_STEPS * SAVE_STEPS + SAVE_STEPS, last + 1, SAVE_STEPS)
            kept = {step for step in (*planned, ENDINGS[ending](last)) if step <= ENDINGS[ending](last)}
            if ending == "kill" and "save_async" in self.features:  # what was being written is lost
                kept &= {checkpoint_step(folder) for folder in list_checkpoints(self.folder / "run")}
            self.saved += sorted(step for step in kept if step > self.saved[-1])

    @precondition(lambda self: not self.dropout)
    @rule(layout=st.sampled_from(sorted(LAYOUTS)))
    def move(self, layout: str) -> None:
        self.layout = layout

    @rule(feature=st.sampled_from(FEATURES))
    def switch(self, feature: str) -> None:
        self.features ^= {feature}

    @precondition(lambda self: self.saved[-1])
    @rule(share=st.floats(0, 1, exclude_max=True))
    def damage_newest(self, share: float) -> None:
        newest = self.folder / "run" / f"checkpoint-{self.saved[-1]}"
        path = max(newest.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
        content = bytearray(path.read_bytes())
        content[int(share * len(content))] ^= 1
        path.write_bytes(content)
        self.saved.pop()

    @precondition(lambda self: self.saved[-1] and not self.dropout)
    @rule()
    def evaluate(self) -> None:
        ran = launch(
            evaluate, self.folder, num_processes=LAYOUTS[self.layout][0], kwargs={"layout": self.layout}, forks=True
        )
        assert ran.returncode == 0, ran.output
        assert ran.results[0] == pytest.approx(self.expected[self.saved[-1]][1][1], rel=1e-12)

    def check(self, ending: str, last: int) -> int:
        """Train on, hold every update against the loop by hand, and return the last step."""
        found = stage(self.folder, self.layout, self.dropout, ending, last, tuple(self.features))
        if ending == "SIGTERM" and LAYOUTS[self.layout][0] > 1:
            assert last <= found[-1][0] < STEPS  # the processes agree on a step by messages that take their time
            last = found[-1][0]
        assert [step for step, *_ in found] == list(range(self.saved[-1] + 1, last + 1))
        for step, numbers, weights in found:
            assert numbers == sorted(self.expected[step][0])
            if self.dropout:
                assert weights == never_interrupted(self.layout, self.dropout)[step][1], step
            else:
                assert weights == pytest.approx(self.expected[step][1][0], rel=1e-10, abs=1e-12), step
        return last

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.check("end", STEPS)
            self.place.cleanup()


LIVES = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_any_life_has_the_updates_of_a_loop_by_hand() -> None:
    quick = settings(LIVES, max_examples=6, stateful_step_count=6, phases=[Phase.generate])
    run_state_machine_as_test(Life, settings=quick)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_lives_have_the_updates_of_a_loop_by_hand() -> None:
    run_state_machine_as_test(Life, settings=settings(LIVES, max_examples=200, stateful_step_count=12))
