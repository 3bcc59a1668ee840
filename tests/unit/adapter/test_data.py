"""How data is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.tiny import make_arguments

from hftrain.adapter.data import data_seed, loader_options, read_accelerator_config, shard_plan
from hftrain.core.errors import ConfigError
from hftrain.data.sharding import ShardPlan


def test_loaders_follow_the_arguments(tmp_path: Path) -> None:
    arguments = make_arguments(
        tmp_path,
        per_device_train_batch_size=3,
        per_device_eval_batch_size=5,
        dataloader_drop_last=True,
        dataloader_num_workers=2,
        dataloader_prefetch_factor=4,
        dataloader_persistent_workers=True,
        data_seed=7,
        accelerator_config={"split_batches": True, "even_batches": False, "use_seedable_sampler": False},
    )
    arguments.dataloader_pin_memory = True
    workers = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "pin_memory": True}
    for is_training, size in ((True, 3), (False, 5)):
        options = loader_options(arguments, is_training=is_training, has_accelerator=True)
        assert options == {
            **{"batch_size": size, "drop_last": True, "timeout": 0, "multiprocessing_context": None},
            **workers,
        }
    place = {"rank": 1, "world_size": 2, "seed": 7, "even_batches": False}
    for is_training, is_own, splits in ((True, True, True), (False, True, False), (False, False, True)):
        plan = shard_plan(arguments, SimpleNamespace(rank=1, world_size=2), is_training=is_training, is_own=is_own)
        assert plan == ShardPlan(is_training=is_training, split_batches=splits, **place)


@pytest.mark.parametrize(("pins", "has_accelerator"), [(True, False), (False, True)])
def test_memory_is_pinned_where_asked_for_and_of_use(tmp_path: Path, pins: bool, has_accelerator: bool) -> None:
    arguments = make_arguments(tmp_path)
    arguments.dataloader_pin_memory = pins
    assert not loader_options(arguments, is_training=True, has_accelerator=has_accelerator)["pin_memory"]


@pytest.mark.parametrize(("options", "seed"), [({}, 42), ({"seed": 3}, 3), ({"seed": 3, "data_seed": 0}, 0)])
def test_data_has_its_own_seed_or_the_runs(tmp_path: Path, options: dict[str, int], seed: int) -> None:
    assert data_seed(make_arguments(tmp_path, **options)) == seed


@pytest.mark.parametrize("content", [None, "{not json", "[1, 2]", "3"])
def test_accelerator_config_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"accelerator_config='.*config\.json'\. It cannot be read"):
        read_accelerator_config(make_arguments(tmp_path, accelerator_config=str(path)))
