"""G8: one rank's error ends all ranks within seconds, its traceback first.

The ranks of the short form have no launcher that would end them: each has to notice by itself. The long form has one.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import DistributedRun
from support.forked import Ended, run_cases
from support.tiny import Net, at, make_arguments, make_rows, on_tensor_ranks
from torch import nn
from torch.utils.data import get_worker_info

from hftrain import Trainer
from hftrain.data.collators import default_data_collator

pytestmark = pytest.mark.distributed

PLACES = (
    *("collate", "worker", "forward", "backward", "callback"),
    *("evaluate", "compute_metrics", "rehearsal", "save", "write"),
)
# The longest that a rank that notices nothing goes on for, on a busy machine.
SECONDS = 15.0
TIMEOUT_S = 6
STOPPED_S = 90.0
WHOLE_S = 280.0


class Trouble:
    """Fail, or stop for long, at one place of one rank, once the run is under way."""

    def __init__(self, place: str, rank: int, stops: bool = False) -> None:
        self.place = place
        self.stops = stops
        self.is_here = os.environ.get("RANK") == str(rank)
        self.num_passed = 0

    def at(self, place: str, *, after: int = 0) -> None:
        """Pass a place."""
        if not self.is_here or place != self.place:
            return
        self.num_passed += 1
        if self.num_passed > after and self.stops:
            time.sleep(STOPPED_S)
        if self.num_passed > after:
            raise ValueError(f"boom in {place}")


class _Backward(torch.autograd.Function):
    trouble: Trouble

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _Backward.trouble.at("backward", after=2)
        return grads[0]


class TroubledNet(Net):
    trouble: Trouble

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        if not self.training:
            self.trouble.at("evaluate")
            return super().forward(x, labels)
        self.trouble.at("forward", after=2)
        return super().forward(_Backward.apply(x.requires_grad_()), labels)


class TroubledTrainer(Trainer):
    trouble: Trouble

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        self.trouble.at("save")
        super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.trouble.at("write")
        super().save_model(output_dir, _internal_call)


def train(
    place: str, rank: int = 1, stops: bool = False, busy: str | None = None, mesh: bool = False, **options: Any
) -> None:
    """Train for eight steps on two ranks, with trouble on one and, at another place, a busy other one."""
    trouble = Trouble(place, rank, stops)
    if busy is not None and not trouble.is_here:
        trouble = Trouble(busy, 1 - rank, stops=True)
    TroubledNet.trouble = TroubledTrainer.trouble = _Backward.trouble = trouble

    def collate(rows: list[Any]) -> Any:
        trouble.at("worker" if get_worker_info() is not None else "collate", after=2)
        return default_data_collator(rows)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        trouble.at("compute_metrics" if trouble.place != "rehearsal" else "rehearsal")
        return {"one": 1.0}

    passing = at("on_step_end", lambda args, state, control, **kwargs: trouble.at("callback", after=2))
    if place == "worker":
        options["dataloader_num_workers"] = 1
    if place == "rehearsal":
        options |= {"metric_for_best_model": "one", "load_best_model_at_end": True}
    arguments = make_arguments(
        Path("out"),
        max_steps=8,
        per_device_train_batch_size=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        **options,
    )
    TroubledTrainer(
        TroubledNet(),
        arguments,
        train_dataset=make_rows(),
        eval_dataset=make_rows(9, seed=2),
        data_collator=collate,
        compute_metrics=compute_metrics,
        callbacks=[passing],
        strategy=on_tensor_ranks(timeout_s=options.get("ddp_timeout", 1800)) if mesh else None,
    ).train()


# -- without a launcher ----------------------------------------------------------------------------------------------

SHORT: dict[str, dict[str, Any]] = {
    **{place: {"place": place} for place in ("collate", "backward", "evaluate", "write")},
    # Nothing tells the other that its peer is gone: it is in no collective.
    "busy": {"place": "collate", "busy": "collate"},
    "late": {"place": "forward", "stops": True, "ddp_timeout": TIMEOUT_S},
}
LONG: dict[str, dict[str, Any]] = {
    **{place: {"place": place} for place in PLACES if place not in SHORT},
    "rank 0": {"place": "forward", "rank": 0},
    **{f"{place} of a tensor rank": {"place": place, "mesh": True} for place in ("collate", "backward", "write")},
    "late tensor rank": {"place": "forward", "stops": True, "ddp_timeout": TIMEOUT_S, "mesh": True},
    "late to save": {"place": "save", "stops": True, "ddp_timeout": TIMEOUT_S},
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Ended]]:
    """Return how a case ended; all of its kind are run, one after the other, when the first is asked for."""

    @functools.cache
    def run(is_long: bool) -> dict[str, list[Ended]]:
        cases = LONG if is_long else SHORT
        found = run_cases(train, tmp_path_factory.mktemp("errors"), list(cases.values()), timeout_s=WHOLE_S)
        return dict(zip(cases, found, strict=True))

    return lambda case: run(case in LONG)[case]


def in_the_long_form(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.guarantees) for case in cases]


ERRORS_LONG = in_the_long_form(*((name,) for name in LONG if not name.startswith("late")))


@pytest.mark.timeout(WHOLE_S + 60)
@pytest.mark.parametrize("case", ["collate", "backward", "evaluate", "write", *ERRORS_LONG])
def test_error_of_one_rank_ends_the_other(ended: Callable[[str], list[Ended]], case: str) -> None:
    given = {**SHORT, **LONG}[case]
    place, rank = given["place"], given.get("rank", 1)
    failed, other = ended(case)[rank], ended(case)[1 - rank]
    assert "Traceback" in failed.output
    assert f"ValueError: boom in {place}" in failed.output
    assert failed.code == 1
    assert other.code == 1
    assert other.end_s - failed.end_s < SECONDS
    # Its traceback first, and the other's not at all.
    assert f"ended, because rank {rank} failed: " in other.output
    assert "Traceback" not in other.output


@pytest.mark.timeout(WHOLE_S + 60)
def test_rank_outside_a_collective_is_ended_too(ended: Callable[[str], list[Ended]]) -> None:
    busy, failed = ended("busy")
    assert "boom in collate" in failed.output
    assert busy.code == 1
    assert "ended, because rank 1 failed: ValueError: boom in collate" in busy.output
    assert "Traceback" not in busy.output
    assert abs(busy.end_s - failed.end_s) < SECONDS


@pytest.mark.timeout(WHOLE_S + 60)
@pytest.mark.parametrize(
    ("case", "phase"),
    [
        ("late", "train step 3"),
        *in_the_long_form(("late tensor rank", "train step 3"), ("late to save", "save checkpoint-4")),
    ],
)
def test_timeout_names_the_phase_and_who_did_not_come(
    ended: Callable[[str], list[Ended]], case: str, phase: str
) -> None:
    waited, late = ended(case)
    text = f"Rank 0 waited in '{phase}' for the other ranks. Rank 1 did not come within {TIMEOUT_S} s: rank 1 is in "
    assert f"{text}'{phase}', at at (" in waited.output, waited.output[-2000:]
    assert "raise ddp_timeout" in waited.output
    assert waited.end_s < STOPPED_S
    assert late.end_s < STOPPED_S
    assert "ended, because rank 0 failed: StrategyError: Rank 0 waited" in late.output


# -- under torchrun --------------------------------------------------------------------------------------------------


def check_torchrun(run: DistributedRun, place: str) -> None:
    assert run.returncode not in (0, None), run.output
    assert f"ValueError: boom in {place}" in run.output
    first = run.output.index("Traceback")
    assert "[rank0]" not in run.output[first : run.output.index(f"boom in {place}", first)]
    assert "[rank0]: Traceback" not in run.output


def test_error_of_one_rank_ends_torchrun(launch_distributed: Callable[..., DistributedRun]) -> None:
    check_torchrun(launch_distributed(train, kwargs={"place": "evaluate"}), "evaluate")


@pytest.mark.guarantees
@pytest.mark.parametrize("place", PLACES)
def test_error_at_any_place_ends_torchrun(launch_distributed: Callable[..., DistributedRun], place: str) -> None:
    check_torchrun(launch_distributed(train, kwargs={"place": place}), place)
