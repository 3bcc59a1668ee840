from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hftrain.core.errors import ConfigError
from hftrain.strategies.deepspeed.config import check_buffers, check_keys, check_offload


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {"stage": 3}}, "Did you mean 'zero_optimization'"),
        ({"gradient_cliping": 1.0}, "mean 'gradient_clipping'"),
        ({"train_micro_batch_size_per_device": 1}, "mean 'train_micro_batch_size_per_gpu'"),
        ({"optimiser": {"type": "AdamW"}}, "mean 'optimizer'"),
    ],
)
def test_key_that_deepspeed_would_pass_over_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_keys(config)


def test_keys_that_only_deepspeed_knows_are_left_to_it() -> None:
    others = (
        "aio",
        "_optimizer",
        "fp16_",
        "fp8",
        "amp",
        "data_types",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "flops_profiler",
    )
    check_keys({**dict.fromkeys(others), "bf16": {"enabled": True}, "optimizer": {}, "scheduler": None})


@pytest.mark.parametrize(
    ("stage", "part", "device", "remedy"),
    [
        (0, "offload_optimizer", "cpu", "Set stage 1, or leave offload_optimizer out"),
        (2, "offload_optimizer", "nvme", "Set stage 3, or offload to the CPU, or leave offload_optimizer out"),
        (0, "offload_optimizer", "nvme", "Set stage 3, or leave offload_optimizer out"),
        (2, "offload_param", "cpu", "Set stage 3, or leave offload_param out"),
        (2, "offload_param", "nvme", "Set stage 3, or leave offload_param out"),
    ],
)
def test_offload_that_the_stage_would_not_do_is_refused(stage: int, part: str, device: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_offload({"zero_optimization": {"stage": stage, part: {"device": device}}})


@pytest.mark.parametrize(
    ("stage", "part", "device"),
    [(1, "offload_optimizer", "cpu"), (3, "offload_optimizer", "nvme"), (3, "offload_param", "cpu")],
)
def test_offload_that_the_stage_does_is_left(stage: int, part: str, device: str) -> None:
    check_offload({"zero_optimization": {"stage": stage, part: {"device": device}}})
    check_offload({"zero_optimization": {"stage": 0, part: {"device": "none"}}})
    check_offload({"zero_optimization": {}})


def test_parameter_that_does_not_fit_the_buffers_is_refused() -> None:
    config = {"zero_optimization": {"offload_param": {"device": "nvme", "buffer_size": 40}}}
    with pytest.raises(ConfigError, match=r"A process's part of weight has 50 numbers, and .* buffer_size is 40"):
        check_buffers(config, nn.Linear(10, 10), world_size=2)
    check_buffers(config, nn.Linear(10, 10), world_size=3)
    check_buffers({"zero_optimization": {"offload_param": {"device": "nvme"}}}, nn.Linear(10, 10), world_size=1)
    check_buffers({"zero_optimization": {}}, nn.Linear(10, 10), world_size=1)
