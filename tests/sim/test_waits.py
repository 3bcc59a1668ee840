"""How often a step waits for the device, which a user sees as a GPU that idles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Rows, Task, make_rows, make_trainer

from hftrain import (
    EMA,
    SWA,
    FlightLog,
    Freeze,
    GradientClipping,
    SpikeGuard,
    Throughput,
    TrainerCallback,
    set_seed,
)

pytestmark = pytest.mark.sim

STEPS = 4


class Watch(TrainerCallback):
    """Hold what the host waited for from the end of step `STEPS` to the end of as many steps later."""

    def __init__(self, sim: Any) -> None:
        self.sim = sim
        self.waits: list[Any] = []
        self._recording: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            self._recording = self.sim.record_syncs()
            self.waits = self._recording.__enter__()
        elif state.global_step == 2 * STEPS:
            self._recording.__exit__(None, None, None)


def waits_of_steps(sim: Any, folder: Path, *callbacks: Any, model: Any = Net, **options: Any) -> list[Any]:
    """Return the waits of `STEPS` steps that do not log, of the third epoch on."""
    set_seed(0)
    watch = Watch(sim)
    settings = {"max_steps": 2 * STEPS, "logging_strategy": "no", "use_cpu": False, **options}
    settings.setdefault("train_dataset", make_rows(64))
    make_trainer(folder, model(), watch, *callbacks, **settings).train()
    return watch.waits


def told(waits: list[Any]) -> str:
    return "\n".join([f"{len(waits)} waits", *map(str, waits[:4])])


class Tokens(Net):
    main_input_name = "x"


FREE: dict[str, tuple[Any, dict[str, Any]]] = {
    "defaults": ((), {}),
    "task": ((), {"model": Task}),
    "bf16": ((), {"bf16": True}),
    "accumulation": ((), {"gradient_accumulation_steps": 2}),
    "clipping": ((), {"max_grad_norm": 0.1}),
    "no clipping": ((), {"max_grad_norm": 0}),
    "workers": ((), {"dataloader_num_workers": 2}),
    "dropout": ((), {"model": lambda: Net(dropout=0.1)}),
    "schedule": ((), {"lr_scheduler_type": "cosine", "warmup_steps": 3}),
    "foreach": ((), {"optim_args": "foreach=True"}),
    "SGD": ((), {"optim": "sgd"}),
    "Muon": ((), {"optim": "muon"}),
    "max_time": ((), {"max_time": "1h"}),
    "label smoothing": ((), {"label_smoothing_factor": 0.1}),
    "token counts": ((), {"model": Tokens, "include_num_input_tokens_seen": "all"}),
    "EMA": ((EMA,), {}),
    "SWA": ((lambda: SWA(start=0),), {}),
    "Throughput": ((Throughput,), {}),
    "Freeze": ((lambda: Freeze("layers.0"),), {}),
    "clipping by value": ((lambda: GradientClipping("value", 0.1),), {"max_grad_norm": 0}),
}


@pytest.mark.parametrize("case", FREE)
def test_a_step_that_does_not_log_waits_for_nothing(sim: Any, tmp_path: Path, case: str) -> None:
    callbacks, options = FREE[case]
    waits = waits_of_steps(sim, tmp_path, *(make() for make in callbacks), **options)
    assert waits == [], told(waits)


def test_a_spike_guard_waits_once(sim: Any, tmp_path: Path) -> None:
    """It has to know the loss before it updates the weights."""
    waits = waits_of_steps(sim, tmp_path, SpikeGuard())
    assert len(waits) == STEPS, told(waits)


def test_fp16_waits_once(sim: Any, tmp_path: Path) -> None:
    """GradScaler has to know whether a gradient overflowed before it updates the weights."""
    waits = waits_of_steps(sim, tmp_path, fp16=True)
    assert len(waits) == STEPS, told(waits)


def test_a_log_waits_once(sim: Any, tmp_path: Path) -> None:
    waits = waits_of_steps(sim, tmp_path, logging_strategy="steps")
    assert len(waits) == STEPS, told(waits)


def test_a_flight_log_waits_for_nothing(sim: Any, tmp_path: Path) -> None:
    waits = waits_of_steps(sim, tmp_path, flight_log=FlightLog())
    assert [wait for wait in waits if wait.kind != "event"] == [], told(waits)


def test_a_save_waits_for_each_file(sim: Any, tmp_path: Path) -> None:
    """For the weights, the optimizer's state and the process's own; before that, to know whether all is finite."""
    waits = waits_of_steps(sim, tmp_path, save_strategy="steps", save_steps=STEPS)
    assert Counter(wait.kind for wait in waits) == {"event": 3, "item": 1, "blocking copy": 1}, told(waits)


def waits_of_batches(sim: Any, folder: Path, model: Any, does: str, **options: Any) -> list[Any]:
    """Return what eight batches of an evaluation or a prediction wait for, beyond what four wait for."""
    trainer = make_trainer(folder, model(), use_cpu=False, **options)

    def waits(rows: Rows) -> list[Any]:
        with sim.record_syncs() as found:
            getattr(trainer, does)(rows)
        # What is kept is read behind an event, a batch later.
        return [wait for wait in found if wait.kind != "event"]

    waits(make_rows(16))
    few, many = waits(make_rows(16)), waits(make_rows(32))
    return many[: len(many) - len(few)]


@pytest.mark.parametrize("does", ["evaluate", "predict"])
@pytest.mark.parametrize("model", [Net, Task])
def test_a_batch_of_an_evaluation_waits_for_nothing(sim: Any, tmp_path: Path, model: Any, does: str) -> None:
    waits = waits_of_batches(sim, tmp_path, model, does)
    assert waits == [], told(waits)
