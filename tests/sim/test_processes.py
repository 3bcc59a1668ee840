"""Two processes, each with a device of its own: collectives on the device's memory, and trainings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_rows, make_trainer
from support.torch_sim import load

from hftrain import FlightLog, SavePolicy, set_seed
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.sim

BACKENDS = "cpu:gloo,sim:simccl"
Run = Callable[..., list[Any]]


def on_my_device() -> Any:
    """Give this rank the device, and make its own the current one, as a user's launcher does."""
    sim = load()
    sim.set_device(int(os.environ["LOCAL_RANK"]))
    return sim


def collect() -> dict[str, Any]:
    import torch.distributed as dist

    sim = on_my_device()
    dist.init_process_group(BACKENDS)
    rank = dist.get_rank()
    answers: dict[str, Any] = {"backend": dist.get_default_backend_for_device("sim")}

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device="sim")

    for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG), ("max", dist.ReduceOp.MAX)):
        tensor = numbers(1 + rank, 3)
        dist.all_reduce(tensor, op)
        answers[name] = tensor.tolist()
    sent = numbers(5 + rank)
    dist.broadcast(sent, 1)
    gathered = [numbers(0), numbers(0, 0)]  # of uneven sizes
    dist.all_gather(gathered, numbers(*[rank] * (1 + rank)))
    into = torch.empty(4, device="sim")
    dist.all_gather_into_tensor(into, numbers(rank, rank))
    part = torch.empty(2, device="sim")
    dist.reduce_scatter_tensor(part, numbers(1, 2, 3, 4), dist.ReduceOp.AVG)
    exchanged = torch.empty(2 * (1 + rank), device="sim")
    dist.all_to_all_single(exchanged, numbers(*[rank] * 3), [1 + rank, 1 + rank], [1, 2])
    answers |= {
        "broadcast": sent.tolist(),
        "gathered": [each.tolist() for each in gathered],
        "into": into.tolist(),
        "scattered": part.tolist(),
        "exchanged": exchanged.tolist(),
    }
    if rank:
        dist.send(numbers(7), 0)
    else:
        received = numbers(0)
        dist.recv(received, 1)
        answers["received"] = received.tolist()
    answers["races"] = sim.num_races()
    work = dist.all_reduce(tensor := numbers(1), async_op=True)
    tensor + 1  # runs while the collective does
    work.wait()
    tensor + 1
    answers["async"] = tensor.tolist()
    answers["races"] = [answers["races"], sim.num_races()]
    dist.barrier()
    dist.destroy_process_group()
    return answers


def test_collectives_work_on_the_devices_memory(run_distributed: Run) -> None:
    first, second = run_distributed(collect)
    assert first["backend"] == "simccl"
    for answers, rank in ((first, 0), (second, 1)):
        assert answers["sum"] == [3.0, 6.0]
        assert answers["mean"] == [1.5, 3.0]
        assert answers["max"] == [2.0, 3.0]
        assert answers["broadcast"] == [6.0]
        assert answers["gathered"] == [[0.0], [1.0, 1.0]]
        assert answers["into"] == [0.0, 0.0, 1.0, 1.0]
        assert answers["scattered"] == [[1.0, 2.0], [3.0, 4.0]][rank]
        assert answers["exchanged"] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]][rank]
        assert answers["async"] == [2.0]
        assert answers["races"] == [0, 1]
    assert first["received"] == [7.0]


LAYERS = {"layers.0": "colwise_gather_output", "layers.4": "rowwise_split_input"}


def trained(strategy: str, *, use_cpu: bool, joins: bool = False, **options: Any) -> dict[str, Any]:
    import torch.distributed as dist

    sim = load()
    if joins:
        dist.init_process_group(BACKENDS)
    set_seed(0)
    chosen: Any = create_strategy("tp", use_cpu=use_cpu, plan=LAYERS) if strategy == "tp" else strategy
    trainer = make_trainer(Path("run"), use_cpu=use_cpu, strategy=chosen, max_steps=4, **options)
    with sim.record_races() as races:
        trainer.train()
    assert not races, str(races[0])
    rank = int(os.environ["RANK"])
    state = trainer.strategy.model_state(trainer.model)
    if joins:
        dist.destroy_process_group()
    return {
        "weights": {name: value.tolist() for name, value in state.items()},
        "device": str(trainer.strategy.device),
        "own": sim.num_allocations(rank),
        "other": sim.num_allocations(1 - rank),
    }


def busy(strategy: str) -> None:
    trained(
        strategy,
        use_cpu=False,
        joins=True,
        eval_dataset=make_rows(10, seed=2),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=1,
        save_policy=SavePolicy(save_async=True),
        flight_log=FlightLog(),
    )


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_strategies_train_as_on_the_cpu(run_distributed: Run, strategy: str, *, joins: bool) -> None:
    expected = run_distributed(trained, strategy=strategy, use_cpu=True)
    found = run_distributed(trained, strategy=strategy, use_cpu=False, joins=joins)
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert other["device"] == f"sim:{rank}"
        assert other["own"] > 0
        for name, value in one["weights"].items():
            torch.testing.assert_close(torch.tensor(other["weights"][name]), torch.tensor(value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_runs_beside_a_step_reads_and_writes_in_time(run_distributed: Run, strategy: str) -> None:
    """Background saves, the flight log and evaluations: `trained` fails where there is a race."""
    run_distributed(busy, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_a_process_puts_nothing_on_the_device_of_another(run_distributed: Run, strategy: str) -> None:
    answers = run_distributed(trained, strategy=strategy, use_cpu=False, joins=True)
    assert [answer["other"] for answer in answers] == [0, 0]


MESHES: dict[int, dict[str, dict[str, int]]] = {
    2: {"cp": {}, "pp": {}},
    4: {"hsdp": {"dp_replicate": 2, "dp_shard": 2}, "fsdp_tp": {"tp_size": 2}},
}


def trained_on_meshes() -> dict[str, Any]:
    """Train a language model on the CPU and on the devices; tell the weights, and on which devices anything was put."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = int(os.environ["WORLD_SIZE"])
    os.environ["TORCH_SIM_DEVICES"] = str(size)
    sim, found = load(), {}
    for name, use_cpu in itertools.product(MESHES[size], (True, False)):
        set_seed(0)
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(
            n_embd=16, n_layer=2, n_head=4, vocab_size=64, n_positions=16,
            attn_implementation="sdpa" if name == "cp" else "eager", **rates,
        )  # fmt: skip
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (16, 12))]
        trainer = make_trainer(
            Path(f"{name}{use_cpu}"), GPT2LMHeadModel(config).double(), use_cpu=use_cpu, train_dataset=rows,
            strategy=create_strategy(name, use_cpu=use_cpu, **MESHES[size][name]), eval_dataset=rows[:5], max_steps=3,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2,
        )  # fmt: skip
        trainer.train()
        numbers = {"eval_loss": trainer.evaluate()["eval_loss"], **trainer.strategy.model_state(trainer.model_wrapped)}
        found[f"{name} {trainer.strategy.device}"] = {key: torch.as_tensor(x).tolist() for key, x in numbers.items()}
        trainer.strategy.close()
    return {"found": found, "devices": [index for index in range(size) if sim.num_allocations(index)]}


@pytest.mark.parametrize("size", MESHES)
def test_meshes_train_as_on_the_cpu(run_distributed: Run, size: int) -> None:
    """To the bit, but for context ranks: the CPU's fused attention, which they need, rounds differently."""
    pytest.importorskip("transformers")
    for rank, answer in enumerate(run_distributed(trained_on_meshes, size)):
        assert answer["devices"] == [rank]
        for name in MESHES[size]:
            expected, found = (answer["found"][f"{name} {device}"] for device in ("cpu", f"sim:{rank}"))
            assert found.keys() == expected.keys()
            assert rank or len(found) > 20
            for key, value in expected.items():
                given, wanted = (torch.tensor(each, dtype=torch.float64) for each in (found[key], value))
                torch.testing.assert_close(
                    given, wanted, rtol=0, atol=1e-9 if name == "cp" else 0, msg=f"{name}: {key}"
                )
