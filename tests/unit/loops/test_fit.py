"""The training loop on bare parts: how steps are cut, what is asked for when, and where a run can stop.

The order of events and real training are in tests/loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.progress import Progress, TrainerControl
from hftrain.core.state import TrainerState
from hftrain.loops.fit import FitConfig, FitHooks, FitLoop, FitParts
from hftrain.loops.window import LossWindow
from hftrain.step.stepper import Stepper

Hook = Callable[["Bench"], None]


class Bench:
    """All parts that the loop calls, each writing into one diary; batches are rows of their own number.

    Args:
        num_batches: What the data gives per epoch.
        hooks: Event -> what a callback does then.
        skipped_updates: Steps whose update overflowed.
    """

    def __init__(
        self,
        num_batches: int | list[int],
        *,
        hooks: dict[str, Hook] | None = None,
        skipped_updates: tuple[int, ...] = (),
        progress: Progress | None = None,
        knows_length: bool = True,
        evaluates_first: bool = False,
        **config: Any,
    ) -> None:
        self.num_batches = num_batches
        self.hooks = hooks or {}
        self.heard = frozenset(self.hooks)
        self.skipped_updates = skipped_updates
        self.diary: list[Any] = []
        self.logs: list[dict[str, Any]] = []
        self.progress, self.state, self.control = progress or Progress(), TrainerState(), TrainerControl()
        parameter = nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.SGD([parameter], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        # The schedule wants to see an update before its own step; the loop's updates are only noted.
        self.optimizer.step()
        known = num_batches if knows_length and isinstance(num_batches, int) else None
        self.loop = FitLoop()
        self.parts = FitParts(
            config=FitConfig(num_batches=known, **config),
            hooks=FitHooks(
                get_batch_samples=lambda batches, number, device: (list(islice(batches, number)), "items"),
                training_step=self.train,
                before_epoch=lambda: self.note("before_epoch"),
                restore_rng=lambda: self.note("restore_rng"),
                log=lambda logs: self.logs.append(logs),
                evaluate=lambda: self.note("evaluate"),
                save=self.save,
                evaluate_first=(lambda: self.note("evaluate")) if evaluates_first else None,
                empty_cache=lambda: self.note("empty_cache"),
                make_feed=lambda dataset: self,
                evaluate_on=lambda dataset, prefix: {},
            ),
            feed=self,
            dataset=None,
            stepper=Stepper(
                autocast=nullcontext,
                backward=torch.Tensor.backward,
                clip=self.clip,
                step=self.step,
                zero_grad=self.zero_grad,
            ),
            model=nn.Identity(),
            optimizer=self.optimizer,
            schedule=self.schedule,
            no_sync=self.no_sync,
            device=torch.device("cpu"),
            progress=self.progress,
            state=self.state,
            control=self.control,
            events=self,
            losses=LossWindow(hides_nonfinite=False, reduce=torch.clone),
        )
        self.loop.attach(self.parts)

    def note(self, entry: Any) -> None:
        self.diary.append(entry)

    def save(self) -> None:
        self.control.should_save = False
        self.note("save")

    def count(self, entry: Any) -> int:
        return self.diary.count(entry)

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        self.note(("open", epoch, skip))
        per_epoch = self.num_batches if isinstance(self.num_batches, int) else self.num_batches[epoch]
        return (torch.full((2,), float(number)) for number in range(skip, per_epoch))

    def train(self, model: nn.Module, batch: torch.Tensor, num_items: Any) -> torch.Tensor:
        assert num_items == "items"
        self.note(int(batch[0]))
        return batch[0]

    @contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        self.note(f"{name}(")
        yield
        self.note(")")

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._noted("no_sync")

    def clip(self) -> torch.Tensor | None:
        return torch.tensor(0.5)

    def step(self) -> bool:
        self.note("step")
        return self.progress.step not in self.skipped_updates

    def zero_grad(self) -> None:
        self.note("zero_grad")

    def fire(self, event: str, **extra: Any) -> None:
        if event in self.hooks:
            self.hooks[event](self)


def run(*args: Any, **options: Any) -> Bench:
    bench = Bench(*args, **options)
    bench.loop.run()
    return bench


def ask(**flags: bool) -> Hook:
    return lambda bench: bench.control.update(flags)


def at_step(step: int, **flags: bool) -> Hook:
    return lambda bench: bench.control.update(flags) if bench.progress.step == step else None


# -- how steps are cut -----------------------------------------------------------------------------------------------


def test_step_gathers_gradients_and_exchanges_them_last() -> None:
    bench = run(5, max_steps=2, accumulation=3)
    assert bench.diary == [
        "before_epoch", ("open", 0, 0), "restore_rng",
        "no_sync(", 0, ")", "no_sync(", 1, ")", 2, "step", "zero_grad",
        "no_sync(", 3, ")", 4, "step", "zero_grad",
    ]  # fmt: skip


# -- resuming --------------------------------------------------------------------------------------------------------


def test_resume_at_the_end_of_unmeasured_data_goes_on_with_the_next_epoch() -> None:
    bench = run(3, max_steps=4, knows_length=False, progress=Progress(step=3, micro_steps_in_epoch=3))
    assert [entry for entry in bench.diary if isinstance(entry, tuple)] == [("open", 0, 3), ("open", 1, 0)]
    assert bench.progress.step == 4


# -- what callbacks ask for ------------------------------------------------------------------------------------------


def test_loop_acts_in_one_order_after_a_step() -> None:
    bench = Bench(
        2, max_steps=2, hooks={"on_step_end": at_step(1, should_log=True, should_evaluate=True, should_save=True)}
    )
    bench.loop.run()
    assert bench.diary[3:] == [0, "step", "zero_grad", "evaluate", "save", 1, "step", "zero_grad"]
    assert len(bench.logs) == 1
    assert bench.control == TrainerControl()


def test_requests_made_before_a_step_are_void() -> None:
    bench = run(2, max_steps=2, hooks={"on_epoch_begin": ask(should_save=True)})
    assert "save" not in bench.diary


def test_schedule_waits_where_the_update_was_skipped() -> None:
    bench = run(3, max_steps=3, skipped_updates=(1,), hooks={"on_step_end": ask(should_log=True)})
    assert [logs["learning_rate"] for logs in bench.logs] == pytest.approx([1, 1 / 2, 1 / 2])
    assert bench.progress.step == 3


@pytest.mark.parametrize(
    ("num_epochs", "cut_at", "steps"), [(None, 1, 8), (2, 1, 5), (2, 5, 5), (2, None, 8), (3, 1, 8)]
)
def test_run_with_a_cut_epoch_ends_after_its_epochs(num_epochs: int | None, cut_at: int | None, steps: int) -> None:
    hook = at_step(-1 if cut_at is None else cut_at, should_epoch_stop=True)
    bench = run(4, max_steps=8, num_epochs=num_epochs, hooks={"on_step_end": hook})
    assert bench.progress.step == steps


# -- what others ask for ---------------------------------------------------------------------------------------------


def test_pending_calls_run_at_every_steps_end_until_they_take_themselves_out() -> None:
    bench = Bench(5, max_steps=4, hooks={"on_step_end": at_step(2, should_save=True)})

    def call() -> None:
        bench.note("called")
        if bench.progress.step == 2:
            bench.parts.pending.remove(call)

    bench.parts.pending.append(call)
    bench.loop.run()
    marks = [entry for entry in bench.diary if entry in ("step", "called", "save")]
    # Before the save of the same step, which it may still ask for.
    assert marks == ["step", "called", "step", "called", "save", "step", "step"]
