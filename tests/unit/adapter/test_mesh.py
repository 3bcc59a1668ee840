from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig
from support.tiny import make_arguments

from hftrain import ConfigError
from hftrain.adapter.strategy import strategy_request


def request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, world_size: int = 4, strategy: str | None = None, **options: Any
) -> tuple[str, dict[str, Any]]:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    name, found = strategy_request(make_arguments(folder, **options), strategy, is_checkpointing=False)
    return name, {key: found[key] for key in ("sharding", "shard_size") if key in found}


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({}, {}, ("ddp", {})),
        ({"dp_shard_size": 4}, {}, ("fsdp", {"sharding": "full_shard"})),
        ({"dp_shard_size": 4}, {"fsdp": "shard_grad_op"}, ("fsdp", {"sharding": "shard_grad_op"})),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2},
            {},
            ("fsdp", {"sharding": "hybrid_shard", "shard_size": 2}),
        ),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2},
            {"fsdp": "hybrid_shard_zero2"},
            ("fsdp", {"sharding": "hybrid_shard_zero2", "shard_size": 2}),
        ),
    ],
)
def test_sizes_of_data_parallelism_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], options: dict[str, Any], expected: Any
) -> None:
    found = request(tmp_path, monkeypatch, parallelism_config=ParallelismConfig(**sizes), **options)
    assert found == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2, "dp_shard_size": 2}, {"tp_size": 2, "dp_shard": 2}),
        ({"cp_size": 4}, {"cp_size": 4}),
        ({"sp_size": 4}, {"cp_size": 4, "attention": "ulysses"}),
        ({"fsdp_size": 2, "pp_size": 2}, {"dp_shard": 2, "pp_size": 2}),
        ({"tp_size": 4, "tp_plan": {"up": "colwise"}}, {"tp_size": 4, "plan": {"up": "colwise"}}),
        ({"tp_size": 4, "tp_plan": "auto"}, {"tp_size": 4}),
    ],
)
def test_other_sizes_make_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], expected: dict[str, Any]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = ParallelismConfig()
    for name, size in sizes.items():
        setattr(config, name, size)
    name, found = strategy_request(make_arguments(tmp_path, parallelism_config=config), None, is_checkpointing=False)
    options = ("tp_size", "cp_size", "pp_size", "dp_shard", "dp_replicate", "attention", "plan")
    assert name == "mesh"
    assert {key: found[key] for key in options if key in found and found[key] != 1} == expected


def test_pure_copies_are_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig()
    config.dp_replicate_size = 4
    assert request(tmp_path, monkeypatch, parallelism_config=config)[0] == "ddp"


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ({"cp_size": 2, "sp_size": 2}, {}, "cp_size and sp_size both split sequences"),
        ({"ep_size": 2}, {}, "Experts cannot be shared out one by one yet"),
        ({"tp_size": 2}, {"strategy": "ddp"}, "Its sizes mean strategy='mesh'"),
        ({"dp_shard_size": 2}, {}, "describes 2 processes, and the launcher started 4"),
        ({"dp_shard_size": 4}, {"fsdp": "no_shard"}, "fsdp='no_shard' splits the model differently"),
        ({"dp_shard_size": 4}, {"strategy": "ddp"}, "Cannot use strategy='ddp' together with parallelism_config"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], options: dict[str, Any], reason: str
) -> None:
    config = ParallelismConfig()
    for name, size in sizes.items():
        # Set afterwards: accelerate itself refuses some sizes without transformers.
        setattr(config, name, size)
    with pytest.raises(ConfigError, match=reason):
        request(tmp_path, monkeypatch, parallelism_config=config, **options)


def test_other_objects_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="A dict is neither accelerate's ParallelismConfig"):
        request(tmp_path, monkeypatch, parallelism_config={"tp_size": 2})


def test_launchers_sizes_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    assert request(tmp_path, monkeypatch) == ("fsdp", {"sharding": "hybrid_shard", "shard_size": 2})
