from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.strategies.deepspeed.config import fill, model_values, read_config, with_preset


def test_config_is_read_from_a_dict_or_a_file_and_left_alone(tmp_path: Path) -> None:
    given = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    for config in (read_config(given), read_config(str(tmp_path / "ds.json")), read_config(tmp_path / "ds.json")):
        assert config == given
        config["zero_optimization"]["stage"] = 3
    assert given["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("absent.json", "Cannot read the DeepSpeed config"),
        ([1], "it is a list, not a dict"),
        ({"zero_optimization": 2}, "zero_optimization is 2, not a dict"),
        ({"zero_optimization": {"stage": 4}}, "stage=4 is not a stage of ZeRO"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size splits each sample's work"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size splits"),
    ],
)
def test_config_that_cannot_work_is_refused(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(given)


def test_old_name_of_bf16_is_taken() -> None:
    assert read_config({"bfloat16": {"enabled": True}})["bf16"] == {"enabled": True}


def test_name_of_a_strategy_stands_for_a_config() -> None:
    assert with_preset(None, stage=None, offload=False) == {"zero_optimization": {"stage": 2}}
    assert with_preset(None, stage=2, offload=True)["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
    }
    assert with_preset(None, stage=3, offload=True)["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert with_preset({"zero_optimization": {"stage": "auto"}}, stage=3, offload=False)["zero_optimization"] == {
        "stage": 3
    }
    for nothing in ({"device": "none"}, {}):
        with pytest.raises(ConfigError, match="says that nothing is offloaded"):
            with_preset({"zero_optimization": {"offload_optimizer": nothing}}, stage=2, offload=True)
    # No stage is stage 0, as DeepSpeed takes it.
    assert with_preset({"zero_optimization": {}}, stage=None, offload=False) == {"zero_optimization": {}}
    with pytest.raises(ConfigError, match="means stage 3, and the config says 2"):
        with_preset({"zero_optimization": {"stage": 2}}, stage=3, offload=False)


@pytest.mark.parametrize("given", [{}, {"stage3_prefetch_bucket_size": "auto"}])
def test_parameters_on_nvme_are_not_prefetched_unless_the_config_says_so(given: dict[str, object]) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme"}, **given}
    filled = with_preset({"zero_optimization": zero}, stage=None, offload=False)
    assert filled["zero_optimization"]["stage3_prefetch_bucket_size"] == 0
    chosen = {"zero_optimization": {**zero, "stage3_prefetch_bucket_size": 7}}
    assert with_preset(chosen, stage=None, offload=False)["zero_optimization"]["stage3_prefetch_bucket_size"] == 7


def test_buckets_follow_the_hidden_size() -> None:
    def sized(**sizes: object) -> nn.Module:
        model = nn.Linear(1, 1)
        model.config = SimpleNamespace(**sizes)
        return model

    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    for model, size in (
        (sized(hidden_size=16), 16),
        (sized(hidden_sizes=[4, 32]), 32),
        (sized(text_config=SimpleNamespace(hidden_size=8)), 8),
    ):
        config = {"zero_optimization": dict.fromkeys(keys, "auto")}
        fill(config, model_values(model))
        assert list(config["zero_optimization"].values()) == [size * size, int(0.9 * size * size), 10 * size]
    assert model_values(nn.Linear(1, 1)) == []
