"""DDP on two real processes: equal to one process, whole collectives, and groups that come and go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.distributed import launch
from torch import nn

from hftrain.core.errors import ConfigError, StrategyError
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.strategies.base import Strategy
from hftrain.strategies.distributed import drain_at_exit
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

ROWS, STEPS, MAX_NORM = 2, 4, 0.5


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.unused = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(batch)


def micro_batches(accumulation: int, world_size: int) -> Iterator[torch.Tensor]:
    """Yield the global micro-batches, all ranks' rows together."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS * accumulation):
        yield torch.randn(ROWS * world_size, 3, generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def plain_loop(accumulation: int) -> dict[str, Any]:
    """Train on the global batch in one process, as a script would."""
    torch.manual_seed(3)
    model = Branches()
    optimizer = make_optimizer(model)
    losses, norms = [], []
    batches = micro_batches(accumulation, world_size=2)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(accumulation):
            loss = model(next(batches)).square().mean() / accumulation
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": model.used[0].weight.flatten().tolist()}


def train(strategy: Strategy, *, accumulation: int, precision: str = "fp32", overflow_at: int = -1) -> dict[str, Any]:
    """Train on this rank's rows; in step `overflow_at` the gradients of rank 1 alone overflow."""
    numerics = precisions.create(precision)
    numerics.open(strategy.device, strategy.scaler_factory)
    torch.manual_seed(3 + strategy.rank)  # only rank 0's parameters may count
    model, optimizer = strategy.setup(Branches(), make_optimizer, numerics.policy)
    stepper = assemble_stepper(strategy=strategy, precision=numerics, optimizer=optimizer, max_grad_norm=MAX_NORM)
    losses, norms, done = [], [], []
    batches = micro_batches(accumulation, world_size=strategy.world_size)
    for step in range(STEPS):
        total = torch.zeros(())
        for index in range(accumulation):
            rows = next(batches)[strategy.rank * ROWS : (strategy.rank + 1) * ROWS]
            with strategy.no_sync(model) if index < accumulation - 1 else stepper.autocast():
                loss = model(strategy.to_device(rows)).float().square().mean() / accumulation
                if step == overflow_at and strategy.rank == 1:
                    loss = loss * float("inf")
                stepper.backward(loss)
            total += loss.detach()
        losses.append(strategy.reduce(total, "mean").item())
        norms.append(stepper.clip().item())
        done.append(stepper.step())
        stepper.zero_grad()
    numerics.close()
    state = strategy.model_state(model)
    weights = state["used.0.weight"].flatten().tolist()
    return {"losses": losses, "norms": norms, "weights": weights, "done": done, "keys": sorted(state)}


def gathered(strategy: Strategy) -> dict[str, Any]:
    """Gather what the two ranks hold in different amounts."""
    rank = strategy.rank
    rows = torch.arange(6).reshape(3, 2) + 10 * rank
    answers = {
        "uneven": strategy.gather(rows[: 3 - 2 * rank]),
        "zero rows on rank 0": strategy.gather(rows[:2] if rank else torch.empty(0)),
        "zero rows": strategy.gather(torch.empty(0, 2)),
        "one number": strategy.gather(torch.tensor(rank + 0.5)),
        "bool": strategy.gather(torch.tensor([rank == 1] * (rank + 1))),
        "bfloat16": strategy.gather(torch.tensor([rank + 0.5], dtype=torch.bfloat16)),
        "strided": strategy.gather(rows.T),
    }
    with pytest.raises(StrategyError, match="more than their number of rows"):
        strategy.gather(torch.ones(1, 2 + rank))
    return {name: answer.tolist() for name, answer in answers.items()}


def talked(strategy: Strategy) -> dict[str, Any]:
    """Exchange plain data, and numbers."""
    rank = strategy.rank
    mine = torch.tensor([1.0, 2.0 * rank])
    answers = {
        "objects": strategy.gather_object({"rank": rank, "text": "é\n\u2028" * (rank + 1), "none": None}),
        "broadcast": strategy.broadcast_object(["from", rank], src=1),
        "long broadcast": len(strategy.broadcast_object("x" * 100_000 if rank == 0 else None)),
        "sum": strategy.reduce(mine).tolist(),
        "mean": strategy.reduce(mine, "mean").tolist(),
        "max": strategy.reduce(mine, "max").tolist(),
        "mine": mine.tolist(),
        "all": [strategy.all_true(True), strategy.all_true(rank == 0), strategy.all_true(False)],
    }
    with pytest.raises(TypeError, match="not JSON serializable"):
        strategy.gather_object(object())
    strategy.barrier()
    return answers


def joined() -> dict[str, Any]:
    """Use a group that this process made itself, and leave it."""
    torch.distributed.init_process_group("gloo")
    del os.environ["LOCAL_RANK"]  # as where no launcher started the processes
    strategy = create_strategy(use_cpu=True)
    strategy.launch()
    answer = {"world": strategy.gather_object([strategy.rank, strategy.local_rank, str(strategy.device)])}
    strategy.close()
    answer["still there"] = torch.distributed.is_initialized()
    answer["waits at exit"] = bool(drain_at_exit.cache_info().currsize)
    torch.distributed.destroy_process_group()
    return answer


def met_again(late_rank: int) -> int:
    """Form one more group, while one rank takes its time."""
    strategy = create_strategy("ddp", use_cpu=True, timeout_s=60)
    if strategy.rank == late_rank:
        time.sleep(1)
    strategy.launch()
    total = strategy.reduce(torch.tensor(strategy.rank + 1)).item()
    strategy.close()
    return int(total)


def noted(strategy: Strategy) -> list[str | None]:
    """Leave notes on two boards, and wait for the other's."""
    first, second = strategy.make_board(), strategy.make_board()
    other = str(1 - strategy.rank)
    first.post(str(strategy.rank), f"from {strategy.rank}")
    deadline = time.monotonic() + 20
    while first.read(other) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return [first.read(other), second.read(other)]


def work() -> dict[str, Any]:
    """Do everything that the tests ask about, in one launch."""
    strategy = create_strategy("auto", use_cpu=True, find_unused_parameters=True, timeout_s=60)
    before = [strategy.rank, strategy.local_rank, strategy.world_size]
    strategy.launch()
    answers = {
        "name": strategy.name,
        "before": before,
        "after": [strategy.rank, strategy.local_rank, strategy.world_size],
        "main": [strategy.is_main, strategy.is_local_main],
        "train 1": train(strategy, accumulation=1),
        "train 3": train(strategy, accumulation=3),
        "train fp16": train(strategy, accumulation=1, precision="fp16", overflow_at=1),
        "gathered": gathered(strategy),
        "talked": talked(strategy),
        "noted": noted(strategy),
    }
    strategy.close()
    from accelerate import PartialState

    answers["left"] = [torch.distributed.is_initialized(), bool(PartialState._shared_state)]
    answers["met again"] = [met_again(late_rank) for late_rank in (0, 1)]
    answers["joined"] = joined()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ended = launch(work, tmp_path_factory.mktemp("ddp"), forks=True)
    assert ended.returncode == 0, ended.output
    return ended.results


def test_ranks_know_who_they_are_before_and_after_launch(answers: list[dict[str, Any]]) -> None:
    for rank, answer in enumerate(answers):
        assert answer["name"] == "ddp"
        assert answer["before"] == answer["after"] == [rank, rank, 2]
        assert answer["main"] == [rank == 0] * 2


def test_processes_meet_as_often_as_they_like_and_wait_for_the_late_one(answers: list[dict[str, Any]]) -> None:
    assert [answer["met again"] for answer in answers] == [[3, 3], [3, 3]]


def test_board_passes_notes_and_keeps_them_from_other_boards(answers: list[dict[str, Any]]) -> None:
    assert [answer["noted"] for answer in answers] == [["from 1", None], ["from 0", None]]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_processes_equal_one_on_the_same_global_batch(answers: list[dict[str, Any]], accumulation: int) -> None:
    expected = plain_loop(accumulation)
    assert max(expected["norms"]) > MAX_NORM  # else clipping would not be seen
    for answer in answers:
        trained = answer[f"train {accumulation}"]
        for name in ("losses", "norms", "weights"):
            torch.testing.assert_close(trained[name], expected[name], rtol=1e-6, atol=1e-7)
    assert "used.0.weight" in answers[0]["train 1"]["keys"]


def test_overflow_on_one_rank_skips_the_step_on_all(answers: list[dict[str, Any]]) -> None:
    first, second = (answer["train fp16"] for answer in answers)
    assert first["done"] == second["done"] == [True, False, True, True]
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uneven", [[0, 1], [2, 3], [4, 5], [10, 11]]),
        ("zero rows on rank 0", [[10, 11], [12, 13]]),
        ("zero rows", []),
        ("one number", [0.5, 1.5]),
        ("bool", [False, True, True]),
        ("bfloat16", [0.5, 1.5]),
        ("strided", [[0, 2, 4], [1, 3, 5], [10, 12, 14], [11, 13, 15]]),
    ],
)
def test_gather_concatenates_whatever_the_ranks_hold(
    answers: list[dict[str, Any]], name: str, expected: list[Any]
) -> None:
    assert [answer["gathered"][name] for answer in answers] == [expected, expected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("objects", [{"rank": rank, "text": "é\n\u2028" * (rank + 1), "none": None} for rank in range(2)]),
        ("broadcast", ["from", 1]),
        ("long broadcast", 100_000),
        ("sum", [2.0, 2.0]),
        ("mean", [1.0, 1.0]),
        ("max", [1.0, 2.0]),
        ("all", [True, False, False]),
    ],
)
def test_every_rank_hears_the_same(answers: list[dict[str, Any]], name: str, expected: Any) -> None:
    assert [answer["talked"][name] for answer in answers] == [expected, expected]


def test_reduce_leaves_its_input_alone(answers: list[dict[str, Any]]) -> None:
    assert [answer["talked"]["mine"] for answer in answers] == [[1.0, 0.0], [1.0, 2.0]]


def test_close_leaves_no_group_and_no_accelerate_state(answers: list[dict[str, Any]]) -> None:
    assert [answer["left"] for answer in answers] == [[False, False]] * 2


def test_group_of_somebody_else_is_used_and_left(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        assert answer["joined"] == {"world": [[0, 0, "cpu"], [1, 1, "cpu"]], "still there": True, "waits at exit": True}


def build_by_rank(name: str) -> list[str]:
    """Return what this rank is told of models that differ from the other rank's, one after the other."""
    strategy = create_strategy(name, use_cpu=True)
    strategy.launch()
    is_second = strategy.rank == 1

    def told(change: Callable[[nn.Module], Any], *, is_changed: bool = is_second) -> str:
        model = Branches()
        if is_changed:
            change(model)
        try:
            strategy.setup(model, make_optimizer, precisions.create("fp32").policy)
        except ConfigError as error:
            return str(error)
        return ""

    return [
        told(lambda model: model.used.append(nn.Linear(1, 1))),
        told(lambda model: model.unused.bias.requires_grad_(False)),
        told(lambda model: model.unused.double()),
        told(lambda model: model.register_buffer("mean", torch.zeros(2))),
        told(lambda model: model.double(), is_changed=True),
    ]


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_with_different_models_are_told_the_first_difference(
    run_distributed: Callable[..., list[Any]], name: str
) -> None:
    told, others = run_distributed(build_by_rank, name=name)
    assert told == others
    differences = [
        "unused.weight float32 (1, 3) on rank 0; used.3.weight float32 (1, 1) on rank 1",
        "unused.bias float32 (1,) on rank 0; unused.bias float32 (1,) frozen on rank 1",
        "unused.weight float32 (1, 3) on rank 0; unused.weight float64 (1, 3) on rank 1",
        "no further parameter on rank 0; mean float32 (2,) on rank 1",
    ]
    start = "Cannot train Branches on 2 ranks: their models differ. The first difference: "
    assert [text.partition(". Build")[0] for text in told] == [*(start + each for each in differences), ""]
