"""How often a step waits for the device: each row of the table of waits in docs/performance.md has a test here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Task, make_rows, make_trainer

from hftrain import TrainerCallback, set_seed

pytestmark = pytest.mark.sim

# A run of this many steps, and one of twice as many: what the second waits for more is what the steps wait for.
STEPS = 4


class Waits(TrainerCallback):
    """Hold what the steps from one to another waited for, from the end of a step to the end of a later one."""

    def __init__(self, sim: Any, first: int = STEPS, last: int = 2 * STEPS) -> None:
        self.sim, self.first, self.last = sim, first, last
        self.found: list[Any] = []
        self._context: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.first:
            self._context = self.sim.record_syncs()
            self.waits = self._context.__enter__()
        elif state.global_step == self.last:
            self._context.__exit__(None, None, None)
            self.found = list(self.waits)


def waits_of(sim: Any, folder: Path, model: Any = Net, *callbacks: Any, **options: Any) -> list[Any]:
    """Return the waits of `STEPS` steps that do not log."""
    set_seed(0)
    watching = Waits(sim)
    settings = {"max_steps": 2 * STEPS, "logging_strategy": "no", "use_cpu": False, **options}
    settings.setdefault("train_dataset", make_rows(64))
    make_trainer(folder, model(), watching, *callbacks, **settings).train()
    return watching.found


def shown(waits: list[Any]) -> str:
    return "\n".join(str(wait) for wait in waits[:3])


FREE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"bf16": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"max_grad_norm": 0.1},
    "no clipping": {"max_grad_norm": 0},
    "workers": {"dataloader_num_workers": 2},
    "dropout": {"model": lambda: Net(dropout=0.1)},
    "task": {"model": Task},
    "scheduler": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "checkpointing": {"gradient_checkpointing": False, "optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd"},
}


@pytest.mark.parametrize("case", FREE)
def test_a_step_that_does_not_log_waits_for_nothing(sim: Any, tmp_path: Path, case: str) -> None:
    options = dict(FREE[case])
    waits = waits_of(sim, tmp_path, options.pop("model", Net), **options)
    assert waits == [], shown(waits)


def test_what_the_hand_written_loop_waits_for(sim: Any) -> None:
    """The measure itself: a loop that reads its loss waits once a step, by name."""
    model = Net().to("sim")
    with sim.record_syncs() as waits:
        for row in make_rows(3):
            batch = {name: value[None].pin_memory().to("sim", non_blocking=True) for name, value in row.items()}
            loss, _ = model(**batch)
            loss.backward()
            loss.item()
    assert Counter(wait.kind for wait in waits) == {"item": 3}
