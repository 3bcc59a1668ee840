from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_arguments

from hftrain.adapter.strategy import strategy_request
from hftrain.core.errors import ConfigError


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def request_of(
    folder: Path, *, strategy: Any = None, use_cpu: bool = False, **given: Any
) -> tuple[str, dict[str, Any]]:
    args = make_arguments(folder, use_cpu=use_cpu, **given)
    return strategy_request(args, strategy, is_checkpointing=False)


def with_config(folder: Path, *, fsdp: str = "full_shard", others: Any = None, **config: Any) -> dict[str, Any]:
    name, options = request_of(folder, fsdp=fsdp, fsdp_config={"xla": True, **config}, **(others or {}))
    assert name == "xla"
    return options


def test_number_of_cores_chooses_xla_and_multiplies_the_batch(tmp_path: Path) -> None:
    args = make_arguments(tmp_path, tpu_num_cores=8, use_cpu=False)
    assert strategy_request(args, None, is_checkpointing=False) == ("xla", {"place_model": True, "num_devices": 8})
    assert (args.train_batch_size, args.eval_batch_size) == (32, 32)


def test_tpu_chooses_xla_unless_the_cpu_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert request_of(tmp_path)[0] == "xla"
    assert request_of(tmp_path, use_cpu=True)[0] == "single"
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert request_of(tmp_path)[0] == "single"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"xla_fsdp_v2": True}, {}),
        ({"xla_fsdp_v2": "true", "min_num_params": 9}, {"min_num_params": 9}),
        ({"xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": "A, B"}, {"layer_classes": ["A", "B"]}),
        ({"xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": ["A"]}, {"layer_classes": ["A"]}),
        ({"xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": True}, {"recomputes": True}),
        ({"xla_fsdp_v2": True, "xla_fsdp_settings": {"buffer_dtype": "torch.float32"}}, {}),
        (
            {"xla_fsdp_settings": {"compute_dtype": "float32", "buffer_dtype": "torch.float32"}},
            {},
        ),
    ],
)
def test_keys_become_options(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_config(tmp_path, **config) == {
        "place_model": True,
        "shards": True,
        "min_num_params": 0,
        "recomputes": False,
        **expected,
    }


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"forward_prefetch": True}, r"\['forward_prefetch'\]: these keys of fsdp_config change nothing"),
        (
            {"xla_fsdp_settings": {"flatten_parameters": True}},
            r"\['flatten_parameters'\]: these xla_fsdp_settings",
        ),
    ],
)
def test_what_changes_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any], shown: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="hftrain"):
        with_config(tmp_path, **given)
    assert any(re.search(shown, record.getMessage()) for record in caplog.records)


@pytest.mark.filterwarnings("ignore:gradient_checkpointing gathers")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"fsdp": "full_shard offload"}, "'offload' is not among the ways"),
        ({"fsdp": "shard_grad_op"}, "'shard_grad_op' is not among the ways"),
        ({"activation_checkpointing": True}, "Use the key xla_fsdp_grad_ckpt"),
        ({"xla_fsdp_grad_ckpt": True, "others": {"gradient_checkpointing": True}}, "recomputes the same activations"),
        ({"xla_fsdp_settings": "bf16"}, "It is a dict of options"),
        ({"xla_fsdp_settings": {"flatten_parameter": True}}, "Did you mean 'flatten_parameters'"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "not what the precision says.*bf16=True"),
        ({"xla_fsdp_settings": {"buffer_dtype": "bfloat16"}, "others": {"bf16": True}}, "not what the precision says"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        with_config(tmp_path, **given)


@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp", "xla_fsdp_v2"])
def test_names_go_with_the_key_and_not_without_it(tmp_path: Path, strategy: str) -> None:
    name, options = request_of(tmp_path, strategy=strategy, fsdp="full_shard", fsdp_config={"xla": True})
    assert (name, options["shards"]) == (strategy, True)
    with pytest.raises(ConfigError, match="Keep one of the two"):
        request_of(tmp_path, strategy=strategy, fsdp="full_shard")


def test_fsdp_on_a_tpu_needs_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    with pytest.raises(ConfigError, match="needs the key xla"):
        request_of(tmp_path, fsdp="full_shard")
