"""Pipelines give the losses, gradients, weights and predictions of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipelines import float64, make_batch, make_model, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hftrain.core.errors import StrategyError, TaskError
from hftrain.strategies.mesh.pipeline import Pipeline, clip_grad_norm, whole_tensors

pytestmark = pytest.mark.distributed
EXACT = {"rtol": 0.0, "atol": 1e-12}


def run_cases(cases: list[dict[str, Any]]) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    with float64():
        for case in cases:
            model = make_model(case["kind"])
            options = {"schedule": case["schedule"], "num_micro_batches": case["num_micro_batches"]}
            pipeline = Pipeline(model, dist.group.WORLD, **options)
            found.append(train(pipeline, model, accumulation=case["accumulation"]))
    dist.destroy_process_group()
    return found


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), **EXACT
    )


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "plain"])
@pytest.mark.parametrize("stages", [2, 4])
def test_pipeline_trains_as_one_process(run_distributed: Callable[..., list[Any]], kind: str, stages: int) -> None:
    numbers = ((1, 1), (2, 2), (3, 1)) if stages == 2 else ((3, 1),)
    cases = [
        {"kind": kind, "schedule": schedule, "num_micro_batches": number, "accumulation": accumulation}
        for schedule in ("gpipe", "1f1b")
        for number, accumulation in numbers
    ]
    answers = run_distributed(run_cases, stages, cases=cases)
    for place, case in enumerate(cases):
        with float64():
            model = make_model(kind)
            alone = train(model, model, accumulation=case["accumulation"])
        seen: dict[str, list[Any]] = {}
        for answer in (ranks[place] for ranks in answers):
            assert answer["names"] == alone["names"]
            close(answer["losses"], alone["losses"])
            for value, expected in zip(answer["evaluated"], alone["evaluated"], strict=True):
                close(value, expected)
            for what in ("grads", "weights"):
                for name, value in answer[what].items():
                    close(value, alone[what][name])
                    seen.setdefault(f"{what} {name}", []).append(value)
        assert len(seen) == len(alone["grads"]) + len(alone["weights"])
        tied = [name for name, values in seen.items() if len(values) > 1]
        assert len(tied) == (2 if kind in ("tied", "gpt2") else 0)
        assert all(values[0] == other for values in map(seen.get, tied) for other in values[1:])


WEIGHTS = (0.3, 1.7)


def shard(pipeline: Pipeline, mesh: DeviceMesh) -> None:
    for layer in pipeline.stage.layers():
        fully_shard(layer, mesh=mesh)
    foreign = {parameter for parameter in pipeline.module.parameters() if parameter.is_meta}
    fully_shard(pipeline.module, mesh=mesh, ignored_params=foreign)


def run_sharded(schedule: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    data = mesh.get_local_rank("shard")
    with float64():
        model = make_model("tied")
        pipeline = Pipeline(model, mesh.get_group("pp"), schedule=schedule, num_micro_batches=2)
        shard(pipeline, mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with torch.no_grad():
            pipeline(**make_batch(5))
        weight = WEIGHTS[data] if schedule == "gpipe" else 1.0
        for part in range(2):
            (pipeline(**make_batch(part + 10 * data)).loss * weight).backward()
        every, infinite = list(model.parameters()), float("inf")
        norms = [clip_grad_norm(pipeline, every, infinite, kind).item() for kind in (2.0, infinite)]
        optimizer.step()
        state = {name: value.tolist() for name, value in whole_tensors(pipeline, torch.device("cpu"))}
    dist.destroy_process_group()
    return {"norms": norms, "state": state}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline_of_sharded_stages_takes_the_step_of_one_process(
    run_distributed: Callable[..., list[Any]], schedule: str
) -> None:
    answers = run_distributed(run_sharded, 4, schedule=schedule)
    with float64():
        model = make_model("tied")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for part in range(2):
            for data, weight in enumerate(WEIGHTS if schedule == "gpipe" else (1.0, 1.0)):
                (model(**make_batch(part + 10 * data)).loss * weight / 2).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        norms = [torch.nn.utils.get_total_norm(grads, kind).item() for kind in (2.0, float("inf"))]
        optimizer.step()
    for answer in answers:
        close(answer["norms"], norms)
    assert list(answers[0]["state"]) == list(model.state_dict())
    assert all(answer["state"] == answers[0]["state"] for answer in answers)
    for name, value in model.state_dict().items():
        close(answers[0]["state"][name], value.tolist())


def run_unevenly() -> str:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    model = make_model("llama")
    pipeline = Pipeline(model, mesh.get_group("pp"), schedule="1f1b")
    shard(pipeline, mesh["shard"])
    loss = pipeline(**make_batch(1)).loss
    try:
        (loss * (1 + mesh.get_local_rank("shard"))).backward()
    except StrategyError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_interleaved_schedule_refuses_losses_that_ranks_weigh_differently(
    run_distributed: Callable[..., list[Any]],
) -> None:
    assert all("weigh their losses differently" in answer for answer in run_distributed(run_unevenly, 4))


def run_variants() -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    with float64():
        for schedule in ("gpipe", "1f1b"):
            for reentrant in (False, True):
                model = make_model("tied")
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                pipeline = Pipeline(model, dist.group.WORLD, schedule=schedule)
                found[f"{schedule} {reentrant}"] = train(pipeline, model, steps=1)["grads"]
        model = make_model("gpt2")
        for name, parameter in model.named_parameters():
            parameter.requires_grad = ".h.3." in name
        found["frozen"] = train(Pipeline(model, dist.group.WORLD), model, steps=1)["grads"]
        model = make_model("plain")
        model.blocks[1] = torch.nn.Dropout(0.5)
        pipeline = Pipeline(model, dist.group.WORLD, num_micro_batches=2)
        same = {name: value[:1].expand(2, -1).clone() for name, value in make_batch(1).items()}
        same["labels"] = same["input_ids"]
        first, second = pipeline(**same)[1]
        found["dropout"] = bool((first != second).any())
        found["errors"] = []
        for given in ({**same, "x": torch.zeros(3)}, {**same, "output_attentions": True}, {"input_ids": [[1, 2]]}):
            with pytest.raises(TaskError) as error:
                pipeline(**given)
            found["errors"].append(str(error.value))
    dist.destroy_process_group()
    return found


def test_pipeline_recomputes_freezes_and_drops_out(run_distributed: Callable[..., list[Any]]) -> None:
    answers = run_distributed(run_variants, 2)
    with float64():
        model = make_model("tied")
        grads = train(model, model, steps=1)["grads"]
        other = make_model("gpt2")
        for name, parameter in other.named_parameters():
            parameter.requires_grad = ".h.3." in name
        frozen = train(other, other, steps=1)["grads"]
    for answer in answers:
        for name in (f"{schedule} {reentrant}" for schedule in ("gpipe", "1f1b") for reentrant in (False, True)):
            assert answer[name]
            for parameter, grad in answer[name].items():
                close(grad, grads[parameter])
        assert answer["dropout"]
        assert "shape [3]" in answer["errors"][0]
        assert "output_attentions" in answer["errors"][1]
        assert "called without a tensor" in answer["errors"][2]
    assert answers[0]["frozen"] == {}
    assert answers[1]["frozen"].keys() == frozen.keys()
    for parameter, grad in frozen.items():
        close(answers[1]["frozen"][parameter], grad)
