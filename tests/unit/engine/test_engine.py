"""An `Engine` in one process: equal to a loop in plain torch, resumed to the bit, and clear about wrong use."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arch.test_hot_path import count_calls_between_backwards as count_calls
from support.engines import NUM_STEPS, assert_close, make_optimizer, train, train_by_hand
from support.stateful import StatefulStream
from support.tiny import Net, Noisy, Stream, make_rows, make_trainer
from torch import nn
from torch.utils.data import DataLoader

from hftrain import CheckpointError, ConfigError, Engine, HFTrainError
from hftrain.checkpoint.manifest import list_checkpoints
from hftrain.precision.registry import precisions
from hftrain.strategies.single import SingleDeviceStrategy

MAX_EXTRA_CALLS = 12


def make_engine(folder: Path | None = None, **options: Any) -> Engine:
    return Engine(strategy=SingleDeviceStrategy(use_cpu=True), output_dir=folder, **options)


def test_training_equals_a_loop_by_hand(tmp_path: Path) -> None:
    assert_close(train(tmp_path, strategy="single", shuffle=False)["weights"], train_by_hand())


def test_parts_are_taken_by_name_and_as_objects() -> None:
    with Engine(strategy="single", precision="bf16") as by_name:
        assert (by_name.strategy.name, by_name.precision.policy.name) == ("single", "bf16")
    precision = precisions.create("bf16")
    with Engine(strategy=SingleDeviceStrategy(use_cpu=True), precision=precision) as engine:
        assert engine.precision is precision
        assert (engine.rank, engine.world_size, engine.is_main, engine.device) == (0, 1, True, torch.device("cpu"))
        assert engine.reduce(torch.tensor(2.0)) == 2
        assert engine.gather(torch.tensor(2.0)).tolist() == [2]
        engine.barrier()


@pytest.mark.parametrize("stop", [1, 5, 6])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumed_run_is_bit_equal(tmp_path: Path, stop: int, precision: str) -> None:
    """An epoch has 11 batches: 5.5 updates."""
    options: dict[str, Any] = {"strategy": "single", "precision": precision, "dropout": 0.2}
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "cut", **options, num_steps=stop, save_at=stop)
    resumed = train(tmp_path / "cut", **options)
    assert resumed["start"] == stop
    assert resumed["losses"] == whole["losses"][2 * stop :]
    assert all(resumed[name] == whole[name] for name in ("weights", "rate", "mean", "epoch"))


@pytest.mark.parametrize("make", [Noisy, Stream])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_any_data_goes_on_where_it_was(tmp_path: Path, make: Any, num_workers: int) -> None:
    options: dict[str, Any] = {
        "strategy": "single",
        "shuffle": make is Noisy,
        "rows": make(make_rows(44)),
        "num_workers": num_workers,
    }
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "cut", **options, num_steps=3, save_at=3)
    assert train(tmp_path / "cut", **options)["weights"] == whole["weights"]


def test_position_is_kept_with_another_batch_size(tmp_path: Path) -> None:
    with make_engine(tmp_path, seed=1) as engine:
        model, _ = engine.setup(Net(), make_optimizer)
        batches = engine.shard(DataLoader(list(range(20)), batch_size=4, shuffle=True))
        read = [batch.tolist() for _, batch in zip(range(3), batches, strict=False)]
        engine.save(1)
    with make_engine(tmp_path, seed=1) as engine:
        engine.setup(Net(), make_optimizer)
        batches = engine.shard(DataLoader(list(range(20)), batch_size=6, shuffle=True))
        engine.load()
        read += [batch.tolist() for batch in batches]
        assert batches.epoch == 1
    assert sorted(itertools.chain(*read)) == list(range(20))
    assert model.training


class Drawn(list[int]):
    def __iter__(self) -> Any:
        return iter(torch.randperm(len(self)).tolist())


def test_what_draws_its_own_order_goes_on_without_reading_twice(tmp_path: Path) -> None:
    data, read = [StatefulStream(20), StatefulStream(20)], list[int]()
    for run in range(2):
        with make_engine(tmp_path) as engine:
            engine.setup(Net(), make_optimizer)
            drawn = engine.shard(DataLoader(range(20), batch_size=4, sampler=Drawn(range(20))))
            stream = engine.shard(DataLoader(data[run], batch_size=4))
            engine.load()
            read += [int(index) for _, batch, _ in zip(range(3), drawn, stream, strict=False) for index in batch]
            engine.save(1)
    assert sorted(read) == list(range(20))
    assert [each.num_read for each in data] == [12, 8]


def test_break_keeps_the_position_and_evaluation_reads_everything() -> None:
    with make_engine() as engine:
        batches = engine.shard(DataLoader(list(range(6)), batch_size=2))
        assert [next(iter(batches)).tolist(), *(batch.tolist() for batch in batches)] == [[0, 1], [2, 3], [4, 5]]
        assert (batches.epoch, len(batches)) == (1, 3)
        unsaved = engine.shard(DataLoader(list(range(3))), training=False)
        assert [[int(batch) for batch in unsaved] for _ in range(2)] == [[0, 1, 2]] * 2


def test_evaluation_leaves_the_model_as_it_was() -> None:
    with make_engine() as engine:
        model, _ = engine.setup(Net(0.5), make_optimizer)
        with engine.evaluating() as bare:
            assert not bare.training
            assert not torch.is_grad_enabled()
        assert model.training


def test_surplus_checkpoints_are_deleted_and_runs_keep_apart(tmp_path: Path) -> None:
    with make_engine(tmp_path, save_total_limit=2) as engine:
        engine.setup(Net(), make_optimizer)
        for step in range(4):
            engine.save(step)
        assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
        with make_engine(tmp_path) as other:
            other.setup(Net(), make_optimizer)
            with pytest.raises(ConfigError, match="Another run is saving there"):
                other.save(4)


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    train(tmp_path, strategy="single", num_steps=2, save_at=1)
    train(tmp_path, strategy="single", num_steps=2, save_at=2)
    damaged = tmp_path / "checkpoint-2" / "optimizer.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(bytes(content))
    with make_engine(tmp_path) as engine:
        engine.setup(Net(), make_optimizer)
        with pytest.raises(CheckpointError, match=r"optimizer\.pt.*SHA-256"):
            engine.load(tmp_path / "checkpoint-2")
        with pytest.raises(CheckpointError, match="does not exist"):
            engine.load(tmp_path / "checkpoint-7")
    assert train(tmp_path, strategy="single", num_steps=1)["start"] == 1


KILLED = """
import os, sys
from pathlib import Path
from hftrain import Engine
from hftrain.storage import files
from support.engines import train
save = Engine.save
def save_and_die(self, step):
    save(self, step)
    files.commit = lambda *names: os._exit(9)
    save(self, step + 2)
Engine.save = save_and_die
train(Path(sys.argv[1]), strategy="single", dropout=0.2, save_at=4)
"""


def test_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[2]), *sys.path]
    killed = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{KILLED}", str(tmp_path / "cut")], timeout=120
    )
    assert killed.returncode == 9
    assert len([*(tmp_path / "cut").iterdir()]) == 2
    resumed = train(tmp_path / "cut", strategy="single", dropout=0.2)
    assert resumed["start"] == 4
    assert resumed["weights"] == train(tmp_path / "whole", strategy="single", dropout=0.2)["weights"]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["checkpoint-4"]


def test_fp16_step_says_that_it_was_skipped() -> None:
    with make_engine(precision="fp16") as engine:
        model, _ = engine.setup(Net(), make_optimizer)
        before = [parameter.clone() for parameter in model.parameters()]
        engine.backward(model(torch.full((2, 4), 1e3))[0].sum() * 1e38)
        assert not engine.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())


def test_loss_scale_goes_on_where_the_precision_is_the_same(tmp_path: Path) -> None:
    def scale(engine: Engine) -> float:
        return float(engine.precision.state_dict()["scale"])

    with make_engine(tmp_path, precision="fp16") as engine:
        model, _ = engine.setup(Net(), make_optimizer)
        initial = scale(engine)
        engine.backward(model(torch.full((2, 4), 1e3))[0].sum() * 1e38)
        engine.step()
        engine.save(1)
        assert scale(engine) < initial
    for precision in ("fp16", "fp32"):
        with make_engine(tmp_path, precision=precision) as another:
            another.setup(Net(), make_optimizer)
            assert another.load() == 1
            assert precision == "fp32" or scale(another) == scale(engine)
            another.save(1)
    with make_engine(tmp_path, precision="fp16") as another:
        another.setup(Net(), make_optimizer)
        another.load()
        assert scale(another) == initial


def misuse_setup(engine: Engine, model: nn.Module) -> None:
    engine.setup(model, make_optimizer)


WRONG: dict[str, tuple[Callable[[Engine, nn.Module], Any], str]] = {
    "step first": (lambda engine, model: engine.step(), "no model yet. Call setup"),
    "save first": (lambda engine, model: engine.save(1), "no model yet. Call setup"),
    "an optimizer": (lambda engine, model: engine.setup(model, make_optimizer(model)), "Pass a function"),
    "a class": (lambda engine, model: engine.setup(model, torch.optim.AdamW), "Pass a function"),
    "other weights": (lambda engine, model: engine.setup(model, lambda _: make_optimizer(Net())), "holds none of"),
    "no state": (lambda engine, model: engine.register("x", 3), "no state_dict"),
    "no folder": (lambda engine, model: [misuse_setup(engine, model), engine.save(1)], "Pass Engine.output_dir"),
    "twice": (lambda engine, model: [misuse_setup(engine, model), misuse_setup(engine, model)], "one model"),
    "empty data": (lambda engine, model: list(engine.shard([])), "gave no batch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_explained(name: str) -> None:
    act, message = WRONG[name]
    with make_engine() as engine, pytest.raises(ConfigError, match=message):
        act(engine, Net())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "dpp"}, "Did you mean .*'ddp'"),
        ({"precision": "bf61"}, "Did you mean 'bf16'"),
        ({"strategy": SingleDeviceStrategy}, "strategy"),
        ({"precision": "tf32", "strategy": "single"}, "TF32 exists on CUDA devices only"),
    ],
)
def test_wrong_parts_are_explained(options: dict[str, Any], message: str) -> None:
    if torch.cuda.is_available() and "TF32" in message:
        pytest.skip("there is a GPU")
    with pytest.raises(HFTrainError, match=message):
        Engine(**options)


def test_checkpoints_do_not_lose_gradients_and_do_not_fit_other_runs(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        model, _ = engine.setup(Net(), make_optimizer)
        engine.backward(model(torch.ones(2, 4))[0].sum())
        with pytest.raises(ConfigError, match="waiting for step"):
            engine.save(1)
        engine.step()
        engine.save(1)
        engine.backward(model(torch.ones(2, 4))[0].sum())
        engine.load()
        assert all(parameter.grad is None for parameter in model.parameters())
        engine.save(1)
    with make_engine(tmp_path) as engine:
        engine.setup(Net(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(CheckpointError, match=r"optimizer='SGD'.*the checkpoint has 'AdamW'"):
            engine.load()
    with make_engine(tmp_path) as engine:
        engine.setup(nn.Linear(4, 4), make_optimizer)
        with pytest.raises(CheckpointError, match="do not fit: missing"):
            engine.load()


def test_checkpoint_of_a_trainer_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    with make_engine(tmp_path) as engine:
        engine.setup(Net(), make_optimizer)
        with pytest.raises(CheckpointError, match="A Trainer saved it"):
            engine.load()


def test_step_costs_a_handful_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(make_rows(40), batch_size=4)

    def by_hand() -> None:
        model = Net()
        optimizer, parameters = make_optimizer(model), [*model.parameters()]
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**{name: value.to("cpu") for name, value in batch.items()})[0]
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def with_engine() -> None:
        with make_engine(precision="bf16") as engine:
            model, _ = engine.setup(Net(), make_optimizer)
            for batch in engine.shard(loader):
                with engine.autocast():
                    loss = model(**batch)[0]
                engine.backward(loss)
                engine.clip(1.0)
                engine.step()

    plain, ours = (
        count_calls(by_hand, monkeypatch),
        count_calls(with_engine, monkeypatch),
    )
    assert ours - plain <= MAX_EXTRA_CALLS, f"{ours} calls per step, a plain loop makes {plain}"


@pytest.mark.parametrize("default", [None, 1.0])
def test_a_limit_given_to_clip_is_for_that_call(default: float | None) -> None:
    with Engine(strategy="single", max_grad_norm=default) as engine:
        model, _ = engine.setup(nn.Linear(2, 1), make_optimizer)
        for limit in (0.01, None):
            engine.backward(100 * model(torch.ones(1, 2)).sum())
            norm = engine.clip(limit)
            assert (norm is None) == (limit is None and default is None)
            clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            assert float(clipped) == pytest.approx(limit or default or 100 * 3**0.5, rel=1e-4)
            engine.step()


def test_steps_are_counted_as_planned(tmp_path: Path) -> None:
    assert len(train(tmp_path, strategy="single")["losses"]) == 2 * NUM_STEPS


def test_a_step_in_two_calls_is_that_of_a_loop_by_hand() -> None:
    x = torch.arange(8.0).view(4, 2)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).square().mean() / 2

    torch.manual_seed(0)
    with Engine(strategy="single", max_grad_norm=0.5) as engine:
        engine.setup(torch.nn.Linear(2, 1), lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        model.load_state_dict(dict(engine.weights()))
        losses = [engine.forward_backward(part, loss, is_last=part is x[2:]) for part in (x[:2], x[2:])]
        update = engine.optim_step(lr=0.01)
        assert not losses[0].requires_grad
        sum(loss(model, part) for part in (x[:2], x[2:])).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        assert (update.is_updated, float(update.grad_norm)) == (True, float(norm))
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in engine.weights())
